"""How the memory of a GPU is divided: what vLLM beside the trainer gets of it, and how many tokens the trainer computes
at a time. The estimate of `memory.py` says what either needs; nothing here asks a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from swift_r1.flags.run import RunFlags
from swift_r1.flags.world import World
from swift_r1.models.shape import ModelShape, context_length
from swift_r1.runtime.hardware import GpuMemory
from swift_r1.training.memory import (
    CONTEXT_BYTES,
    DEFAULT_PROMPT_TOKENS,
    ENGINE_BYTES,
    WIDTHS,
    MemoryEstimate,
    estimated,
)

SPARE = 0.03
"""Share of a GPU that is given to nobody: estimates are off by some percent."""
LEAST_SHARE = 0.1
"""Share of a GPU that an engine gets in any case where there is room: how much its first, largest batch takes is known
of one model alone, and what is left holds prompts that may come again."""
ENOUGH_TOKENS = 8192
"""Tokens of a micro-batch for which checkpointing is not worth its second forward pass: with a 0.5B they keep an H200
busy for 0.07 s, about as long as their launches take (results/gpu)."""
MOST_TOKENS = 65_536
"""Tokens of a micro-batch beyond which nothing is gained."""
_LARGE = 70 * 2**30  # vLLM decodes 1,024 completions at once on such a GPU, else 256


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """Bytes that vLLM needs on each of its GPUs.

    Attributes:
        fixed: weights, CUDA's context, activations and graphs.
        least: with the keys and values of the longest sequence that it must take, and of a group.
        wanted: with those of all `completions` that it decodes at once, at their longest.
    """

    fixed: float
    least: float
    wanted: float
    completions: int


@dataclass(frozen=True, slots=True)
class Division:
    """Bytes of a GPU that has room for both: for the engine, and for the trainer while it trains."""

    engine: float
    trainer: float
    need: EngineNeed


def engine_length(args: RunFlags) -> int | None:
    """Returns the longest prompt with its completion in an engine beside the trainer; None: the model's context."""
    if args.vllm_max_model_len is not None:
        return args.vllm_max_model_len
    if not args.max_length or args.leads_turns:
        return None
    return args.max_length + max(args.max_completion_length, args.eval_max_completion_length or 0)


def engine_need(
    args: RunFlags, shape: ModelShape, world: World, gpu: GpuMemory, completions: int
) -> EngineNeed:
    """Returns what vLLM needs for a round of so many completions of all ranks."""
    devices = args.vllm_tensor_parallel_size
    width = WIDTHS[args.torch_dtype or shape.dtype]
    cached = 1.0 if str(args.vllm_kv_cache_dtype or "").startswith("fp8") else width
    token = 2 * shape.layers * shape.kv_width * cached / devices
    prompt = args.max_length or DEFAULT_PROMPT_TOKENS
    most = args.vllm_max_num_seqs or (1024 if gpu.total >= _LARGE else 256)
    at_once = min(most, math.ceil(completions * devices / world.size))

    def tokens_of(count: int) -> int:
        return count * args.max_completion_length + math.ceil(count / args.num_generations) * prompt

    longest = engine_length(args) or context_length(args.model) or tokens_of(1)
    fixed = shape.total * width / devices + ENGINE_BYTES + CONTEXT_BYTES
    own = args.vllm_engine_kwargs.get("kv_cache_memory_bytes")
    if own is not None:
        return EngineNeed(fixed, fixed + own, fixed + own, at_once)
    least = fixed + token * max(longest, tokens_of(min(at_once, args.num_generations)))
    wanted = max(least, fixed + token * tokens_of(at_once))
    return EngineNeed(fixed, least, wanted, at_once)


def held_beside(args: RunFlags, most: MemoryEstimate) -> float:
    """Returns the bytes of a trainer that stay on the GPU while an engine generates that sleeps otherwise."""
    away = {"weights", "reference"} if args.offload_model else set[str]()
    away |= {"gradients", "optimizer"} if args.offload_optimizer else set()
    return sum(
        size for name, size in most.parts.items() if name.removeprefix("critic's ") not in away
    )


def divided(
    args: RunFlags, shape: ModelShape, world: World, gpu: GpuMemory, completions: int
) -> Division | None:
    """Divides a GPU between the trainer, whose micro-batches may be small, and its engine, which gets what it can use
    but at most half of what neither needs. None where there is no room for both."""
    need = engine_need(args, shape, world, gpu, completions)
    usable = gpu.free - SPARE * gpu.total
    smallest = estimated(smallest_cut(args), shape, world, gpu.total)
    if args.sleep_level:  # they take turns; a sleeping engine keeps its context and its graphs
        for_engine = usable - held_beside(args, smallest)
        for_trainer = usable - ENGINE_BYTES - CONTEXT_BYTES
        engine = min(need.wanted, for_engine)
    else:
        for_engine = usable - smallest.peak
        spare = for_engine - need.least
        engine = min(max(need.wanted, LEAST_SHARE * gpu.total), need.least + spare / 2)
        for_trainer = usable - engine
    if for_engine < need.least or for_trainer < smallest.peak:
        return None
    return Division(engine, for_trainer, need)


def open_flags(args: RunFlags) -> frozenset[str]:
    """Returns the flags of how a step is cut that nobody gave."""
    return frozenset({"max_tokens_per_micro_batch", "gradient_checkpointing"}) - args.given


def smallest_cut(args: RunFlags) -> RunFlags:
    """Returns the arguments with what takes least memory for the flags that nobody gave."""
    free = open_flags(args)
    if "max_tokens_per_micro_batch" in free:
        args = replace(args, max_tokens_per_micro_batch=_longest(args))
    return replace(args, gradient_checkpointing=True) if "gradient_checkpointing" in free else args


def chosen_cut(
    args: RunFlags, ranks: int, peak: Callable[[RunFlags], float], room: float
) -> RunFlags | None:
    """Returns the arguments with micro-batches and checkpointing with which the `peak` of a rank, of so many, is at most
    `room` bytes, where nobody gave them; None where nothing fits. How a step is cut changes none of its numbers but by
    rounding (tests/training/test_invariance.py)."""
    return next((cut for cut in _cuts(args, ranks) if peak(cut) <= room), None)


def _cuts(args: RunFlags, ranks: int) -> Iterator[RunFlags]:
    """Yields what may be chosen, the fastest first: micro-batches of at least `ENOUGH_TOKENS` without checkpointing,
    then as large as fit with it."""
    free = open_flags(args)
    sizes: list[int | None] = [args.max_tokens_per_micro_batch]
    if "max_tokens_per_micro_batch" in free:
        sizes = list(_sizes(args, ranks))
    ways = (False, True) if "gradient_checkpointing" in free else (args.gradient_checkpointing,)
    enough = min(ENOUGH_TOKENS, sizes[0] or 0)
    for checkpointing in ways:
        for size in sizes:
            if checkpointing or len(ways) == 1 or size is None or size >= enough:
                yield replace(
                    args, max_tokens_per_micro_batch=size, gradient_checkpointing=checkpointing
                )


def _sizes(args: RunFlags, ranks: int) -> Iterator[int]:
    """Yields tokens of a micro-batch: all that a rank has of a step, halves of it, and a single completion."""
    longest = _longest(args)
    completions = math.ceil(args.completions_per_step * args.sequence_parallel_size / ranks)
    size = min(completions * longest, max(MOST_TOKENS, longest))
    while size > longest:
        yield size
        size //= 2
    yield longest


def _longest(args: RunFlags) -> int:
    return (args.max_length or DEFAULT_PROMPT_TOKENS) + args.max_completion_length
