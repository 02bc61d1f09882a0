"""A completion's own seed, so that what it says does not depend on its neighbours."""

from __future__ import annotations

import hashlib


def completion_seed(run_seed: int, *where: object) -> int:
    """A completion's own seed, 63 bits, from the run's seed and its place in the run."""
    text = "/".join(map(str, (run_seed, *where)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
