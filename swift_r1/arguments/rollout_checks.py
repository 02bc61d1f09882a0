"""Faults of the flags that say where completions come from, and how they make up a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from swift_r1.arguments.fields import Fault
from swift_r1.arguments.rlhf_flags import RlhfFlags
from swift_r1.arguments.world import World


def rollout_faults(args: RlhfFlags, given: frozenset[str]) -> Iterator[Fault]:
    """Where completions come from, how they are sampled, and how far ahead."""
    if args.colocates:
        yield from _colocate_faults(args)
    elif args.use_vllm:
        yield from _server_faults(args, given)
    if args.offload_optimizer and args.optim.startswith("paged"):
        yield Fault(
            f"--offload_optimizer true with --optim {args.optim}, whose moments move between GPU and host by "
            "themselves: leave one out",
            ("offload_optimizer", "optim"),
        )
    if args.top_k == 0:
        yield Fault("--top_k 0 leaves no token to sample: -1 is off", ("top_k",))
    mode = args.rollout_importance_sampling_mode
    if args.cuts_sampling and mode is not None and mode.startswith("sequence"):
        yield Fault(
            f"--rollout_importance_sampling_mode {mode} with --top_p or --top_k would weigh a completion by how "
            "much of the distribution was cut at each of its tokens: use token_truncate",
            ("rollout_importance_sampling_mode", "top_p", "top_k"),
        )
    yield from stop_word_faults(args.stop_words)
    if args.async_generate and not args.use_vllm:
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


def stop_word_faults(stop_words: list[str]) -> Iterator[Fault]:
    if "" in stop_words:
        yield Fault("--stop_words holds an empty string, which would end every completion at once", ("stop_words",))


def _colocate_faults(args: RlhfFlags) -> Iterator[Fault]:
    if args.async_generate and args.max_staleness:
        yield Fault(
            "--async_generate true gains nothing with --vllm_mode colocate, where engine and trainer share a device: "
            "use --vllm_mode server, or leave it out",
            ("async_generate", "vllm_mode"),
        )
    if args.weight_transport == "nccl":
        yield Fault(
            "--weight_transport nccl needs a GPU for the trainer and another for the engine; with --vllm_mode colocate "
            "use auto",
            ("weight_transport", "vllm_mode"),
        )


def _server_faults(args: RlhfFlags, given: frozenset[str]) -> Iterator[Fault]:
    """Which servers, and how weights go to them."""
    hosts, ports, urls = args.vllm_server_host, args.vllm_server_port, args.vllm_server_base_url
    if not urls and not hosts:
        yield Fault(
            "--use_vllm true needs --vllm_server_host (and --vllm_server_port), --vllm_server_base_url, or --vllm_mode "
            "colocate",
            ("vllm_server_host", "vllm_server_base_url", "use_vllm"),
        )
        return
    if urls and ("vllm_server_host" in given or "vllm_server_port" in given):
        yield Fault("give either --vllm_server_base_url or --vllm_server_host/--vllm_server_port, not both")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield Fault(f"--vllm_server_base_url must begin with http:// or https://: {url!r}")
    if not urls and len(hosts) != len(ports) and 1 not in (len(hosts), len(ports)):
        yield Fault(
            f"--vllm_server_host has {len(hosts)} values and --vllm_server_port {len(ports)}: give one port for all "
            "hosts, or one for each",
            ("vllm_server_host", "vllm_server_port"),
        )
        return
    for url, times in Counter(args.rollout_base_urls).items():
        if times > 1:
            yield Fault(f"{url} is named {times} times: each server once", ("vllm_server_base_url", "vllm_server_host"))
    if args.weight_transport == "nccl" and len(args.rollout_base_urls) > 1:
        yield Fault(
            "--weight_transport nccl takes one server: use --vllm_tensor_parallel_size there, or http or shm",
            ("weight_transport",),
        )
    if args.weight_delta == "true" and args.weight_transport in ("shm", "nccl"):
        yield Fault(
            f"--weight_delta true sends changes by http, and --weight_transport is {args.weight_transport}",
            ("weight_delta", "weight_transport"),
        )


def round_faults(args: RlhfFlags, world: World) -> Iterator[Fault]:
    """The arithmetic of a round: completions, groups, micro-batches."""
    names = (
        *("generation_batch_size", "steps_per_generation", "per_device_train_batch_size"),
        *("gradient_accumulation_steps", "num_generations"),
    )
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        yield Fault("give either --generation_batch_size or --steps_per_generation, not both", names)
        return
    micro_batch = args.per_device_train_batch_size * world.size
    across = f"per_device_train_batch_size {args.per_device_train_batch_size} x {world.size} processes"
    accumulation = args.gradient_accumulation_steps
    micro_batches = args.micro_batches_per_round
    if (size := args.generation_batch_size) is not None:
        if size % micro_batch:
            near = _near_multiples(size, micro_batch)
            yield Fault(f"--generation_batch_size {size} is no multiple of {micro_batch} ({across}): {near}", names)
            return
        micro_batches = size // micro_batch
    if micro_batches % accumulation:
        yield Fault(
            f"{micro_batches} micro-batches are generated at once, which is no multiple of "
            f"--gradient_accumulation_steps {accumulation}: {_near_multiples(micro_batches, accumulation)} "
            "for --steps_per_generation",
            names,
        )
        return
    completions = micro_batch * micro_batches
    if completions % args.num_generations:
        yield Fault(
            f"a round of {completions} completions ({across} x {micro_batches} micro-batches) does not divide into "
            f"groups of --num_generations {args.num_generations}: change --per_device_train_batch_size, "
            "--steps_per_generation, --gradient_accumulation_steps or --num_generations so that it does",
            names,
        )


def _near_multiples(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {below + divisor}"
