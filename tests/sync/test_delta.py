"""A bucket as what has changed in it: the outcome is the whole, or it is refused and the whole is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.sync.buckets import (
    BadChange,
    apply_change,
    bucket_digest,
    changed_words,
    encode_change,
)
from swift_r1.sync.staging import Staging
from swift_r1.sync.transport import incoming
from swift_r1.wire.protocol import HTTPError
from tests.live_servers import to_bytes

WORDS = 200_000


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 1e-5, 1e-3, 0.01, 0.2, 1.0]))
def test_what_is_changed_and_applied_is_the_new(seed: int, share: float) -> None:
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 2**16, WORDS, dtype=np.uint16)
    new = old.copy()
    places = generator.random(WORDS) < share
    new[places] ^= generator.integers(1, 2**16, int(places.sum()), dtype=np.uint16)
    body = encode_change(new, changed_words(new, old))
    named = apply_change(body, old)
    assert np.array_equal(old, new) and named >= places.sum()
    # 3 bytes a changed word; where they are rare, and have to be named on the way, 4.
    assert len(body) <= 16 + 4 * (places.sum() + WORDS // 65535 + 1)


def test_a_change_that_is_none_is_refused_and_changes_nothing() -> None:
    old = np.arange(1000, dtype=np.uint16)
    new = old.copy()
    new[[3, 400, 999]] = 7
    body = encode_change(new, changed_words(new, old))
    beyond = encode_change(np.append(new, [1, 1]), np.array([1001]))
    for bad in (
        b"",
        body[:15],
        body[:-1],
        body + b"x",
        b"XXXX" + body[4:],
        beyond,
        body[:4] + b"\x07" + body[5:],
    ):
        with pytest.raises(BadChange):
            apply_change(bad, old)
    assert np.array_equal(old, np.arange(1000))


def bucket(*values: float) -> list[tuple[str, torch.Tensor]]:
    return [
        ("a", torch.full((40, 50), values[0], dtype=torch.bfloat16)),
        ("empty", torch.zeros(0, 3)),
        ("b", torch.tensor(values, dtype=torch.bfloat16)),
    ]


async def chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


@pytest.fixture
def staging() -> Staging:
    return Staging(1 << 20)


def test_the_server_makes_the_new_file_of_the_old_one(staging: Staging) -> None:
    old, new = to_bytes(bucket(1, 2)), to_bytes(bucket(1, 9))
    words = np.frombuffer(new, np.uint16)
    change = encode_change(words, changed_words(words, np.frombuffer(old, np.uint16)))

    async def play() -> None:
        staged = await staging.write(0, chunks(old), None)
        assert staging.base is None
        staging.forget([staged])
        staging.hold(1, "h")
        assert staging.base == "h"
        made = await staging.change(0, chunks(change), bucket_digest(new))
        assert (
            staging.base is None
            and made.path.read_bytes() == new
            and made.digest == bucket_digest(new)
        )
        # Its file was used up; another outcome than promised is refused, and no file is left of it.
        for index, promised, says in (
            (0, "0" * 32, "not here any more"),
            (1, "0" * 32, "not here"),
        ):
            with pytest.raises(HTTPError, match=says):
                await staging.change(index, chunks(change), promised)
        staging.forget([made])
        staging.hold(1, "g")
        with pytest.raises(HTTPError, match="other bytes than were promised"):
            await staging.change(0, chunks(change), "0" * 32)
        staging.hold(1, "g")
        assert staging.base is None and not list(Path(staging.folder).iterdir())

    asyncio.run(play())
    staging.close()


def test_a_file_that_somebody_has_made_too_large_is_not_read(staging: Staging) -> None:
    """Whoever shares the machine may write to it: the pages of a hole would fill the memory."""
    with incoming(staging.folder, 0).open("wb") as file:
        file.truncate(1 << 40)
    change = encode_change(np.zeros(4, np.uint16), np.array([1]))
    with pytest.raises(HTTPError, match="larger than the whole model"):
        asyncio.run(staging.change(0, chunks(change), "0" * 32))
    assert not list(staging.folder.iterdir())
    staging.close()
