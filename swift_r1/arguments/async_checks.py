"""Faults of arguments about generating ahead (`--async_generate true`); as `checks.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from swift_r1.arguments.parser import Fault

if TYPE_CHECKING:
    from swift_r1.arguments.rlhf import RlhfArguments


def async_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Where nothing can be generated ahead, or not as another flag promises."""
    names = ("async_generate", "max_staleness")
    if not args.async_generate:
        if "max_staleness" in given:
            yield Fault("--max_staleness has no effect without --async_generate true", names)
        return
    if not args.use_vllm:
        yield Fault(
            "--async_generate true needs a `swift rollout` server (--use_vllm true): the process that trains cannot "
            "generate meanwhile",
            ("async_generate", "use_vllm"),
        )
    if args.cuts_sampling and args.ratio_to_behaviour:
        yield Fault(
            "--async_generate true takes the ratio to the engine's log-probs, those of a part of the distribution with "
            "--top_p or --top_k: add --rollout_importance_sampling_mode token_truncate, or --max_staleness 0",
            ("async_generate", "top_p", "top_k"),
        )
