"""`swift rollout` with completions of lengths as in practice, for `async.py --long_tail`: 1 in 16 is of `max_tokens`,
the others of a tenth, whatever the model would say. The same seed gives the same length.

    PYTHONPATH=. python benchmarks/long_tail_server.py --model M --port 8000
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def serve(words: Sequence[str]) -> int:
    """What `swift rollout` starts, with other lengths."""
    from swift_r1.serving import server
    from swift_r1.serving.engines.vllm import VllmEngine

    generate = VllmEngine.generate

    async def tailed(
        self: VllmEngine, prompt: Sequence[int], sampling: Any, seed: int | None
    ) -> Any:
        length = sampling.max_tokens if (seed or 0) % 16 == 0 else max(1, sampling.max_tokens // 10)
        change = {"max_tokens": length, "ignore_eos": True, "stop_token_ids": ()}
        return await generate(self, prompt, sampling.model_copy(update=change), seed)

    VllmEngine.generate = tailed  # type: ignore[method-assign]
    return server.main(words)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        from swift_r1.serving.server import leave

        leave(serve(sys.argv[1:]))
    from swift_r1.cli import rollout

    rollout.SERVER_MODULE = "benchmarks.long_tail_server"  # type: ignore[misc]
    sys.exit(rollout.run(sys.argv[1:]))
