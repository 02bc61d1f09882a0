"""Faults of the flags that say where completions come from, and how they make up a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from swift_r1.arguments.rlhf_flags import RlhfFlags
from swift_r1.arguments.world import World


def rollout_faults(args: RlhfFlags, given: frozenset[str]) -> Iterator[str]:
    """Where completions come from, how they are sampled, and how far ahead."""
    if args.colocates:
        yield from _colocate_faults(args)
    elif args.use_vllm:
        yield from _server_faults(args, given)
    if args.offload_optimizer and args.optim.startswith("paged"):
        yield (
            f"--offload_optimizer true with --optim {args.optim}, whose moments move between GPU and host by "
            "themselves: leave one out"
        )
    if args.top_k == 0:
        yield "--top_k 0 leaves no token to sample: -1 is off"
    mode = args.rollout_importance_sampling_mode
    if args.cuts_sampling and mode is not None and mode.startswith("sequence"):
        yield (
            f"--rollout_importance_sampling_mode {mode} with --top_p or --top_k would weigh a completion by how "
            "much of the distribution was cut at each of its tokens: use token_truncate"
        )
    yield from stop_word_faults(args.stop_words)
    if args.async_generate and not args.use_vllm:
        yield (
            "--async_generate true needs a `swift rollout` server (--use_vllm true): the process that trains cannot "
            "generate meanwhile"
        )
    if args.cuts_sampling and args.ratio_to_behaviour:
        yield (
            "--async_generate true takes the ratio to the engine's log-probs, those of a part of the distribution with "
            "--top_p or --top_k: add --rollout_importance_sampling_mode token_truncate, or --max_staleness 0"
        )


def stop_word_faults(stop_words: list[str]) -> Iterator[str]:
    if "" in stop_words:
        yield "--stop_words holds an empty string, which would end every completion at once"


def _colocate_faults(args: RlhfFlags) -> Iterator[str]:
    if args.async_generate and args.max_staleness:
        yield (
            "--async_generate true gains nothing with --vllm_mode colocate, where engine and trainer share a device: "
            "use --vllm_mode server, or leave it out"
        )
    if args.weight_transport == "nccl":
        yield (
            "--weight_transport nccl needs a GPU for the trainer and another for the engine; with --vllm_mode colocate "
            "use auto"
        )


def _server_faults(args: RlhfFlags, given: frozenset[str]) -> Iterator[str]:
    """Which servers, and how weights go to them."""
    hosts, ports, urls = args.vllm_server_host, args.vllm_server_port, args.vllm_server_base_url
    if not urls and not hosts:
        yield (
            "--use_vllm true needs --vllm_server_host (and --vllm_server_port), --vllm_server_base_url, or --vllm_mode "
            "colocate"
        )
        return
    if urls and ("vllm_server_host" in given or "vllm_server_port" in given):
        yield "give either --vllm_server_base_url or --vllm_server_host/--vllm_server_port, not both"
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield f"--vllm_server_base_url must begin with http:// or https://: {url!r}"
    if not urls and len(hosts) != len(ports) and 1 not in (len(hosts), len(ports)):
        yield (
            f"--vllm_server_host has {len(hosts)} values and --vllm_server_port {len(ports)}: give one port for all "
            "hosts, or one for each"
        )
        return
    for url, times in Counter(args.rollout_base_urls).items():
        if times > 1:
            yield f"{url} is named {times} times: each server once"
    if args.weight_transport == "nccl" and len(args.rollout_base_urls) > 1:
        yield "--weight_transport nccl takes one server: use --vllm_tensor_parallel_size there, or http or shm"
    if args.weight_delta == "true" and args.weight_transport in ("shm", "nccl"):
        yield f"--weight_delta true sends changes by http, and --weight_transport is {args.weight_transport}"


def round_faults(args: RlhfFlags, world: World) -> Iterator[str]:
    """The arithmetic of a round: completions, groups, micro-batches."""
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        yield "give either --generation_batch_size or --steps_per_generation, not both"
        return
    micro_batch = args.per_device_train_batch_size * world.size
    across = f"--per_device_train_batch_size {args.per_device_train_batch_size} x {world.size} processes"
    accumulation = args.gradient_accumulation_steps
    micro_batches = args.micro_batches_per_round
    if (size := args.generation_batch_size) is not None:
        if size % micro_batch:
            near = _near_multiples(size, micro_batch)
            yield f"--generation_batch_size {size} is no multiple of {micro_batch} ({across}): {near}"
            return
        micro_batches = size // micro_batch
    if micro_batches % accumulation:
        yield (
            f"{micro_batches} micro-batches are generated at once, which is no multiple of "
            f"--gradient_accumulation_steps {accumulation}: {_near_multiples(micro_batches, accumulation)} "
            "for --steps_per_generation"
        )
        return
    completions = micro_batch * micro_batches
    if completions % args.num_generations:
        yield (
            f"a round of {completions} completions ({across} x {micro_batches} micro-batches) does not divide into "
            f"groups of --num_generations {args.num_generations}: change --per_device_train_batch_size, "
            "--steps_per_generation, --gradient_accumulation_steps or --num_generations so that it does"
        )


def _near_multiples(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {below + divisor}"
