"""The job that is estimated, from flags, a run file or a recorded run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.flags.fields import flag_specs
from swift_r1.flags.forecast import arguments_of
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.fleet.run_file import ROLLOUT, TRAIN, RunFile
from swift_r1.lab.estimate.chips import CHIPS, Chip
from swift_r1.lab.estimate.flags import EstimateArguments
from swift_r1.lab.estimate.layout import Layout, estimate_layout
from swift_r1.lab.estimate.model import model_of, with_tower
from swift_r1.lab.estimate.roles import Job, ServerRole
from swift_r1.lab.estimate.work import CPU, GPU, QUANTILES, Efficiency, Round
from swift_r1.record.folder import COMPLETIONS
from swift_r1.record.metrics import read_json_lines
from swift_r1.runtime.files import read_text, regular
from swift_r1.training.memory import WIDTHS, zero_of
from swift_r1.training.micro_batches import LEAST_SAVING

PROMPT_TOKENS = 256.0
_MOST_ROWS = 20_000  # of completions.jsonl


@dataclass(frozen=True, slots=True)
class AverageLengths:
    """Tokens of a prompt and of a completion, on average, and ascending quantiles of the completions'."""

    prompt: float
    completion: float
    quantiles: tuple[float, ...] = ()


def assumed(chip: Chip) -> Efficiency:
    """Before anything is measured."""
    return CPU if chip.is_cpu else GPU


def with_cores(chip: Chip, cores: float) -> Chip:
    """Returns the chip with the figures of so many cores; a CPU's are those of one."""
    if not chip.is_cpu:
        return chip
    return replace(
        chip,
        flops=chip.flops * cores,
        bandwidth=chip.bandwidth * cores,
        memory=chip.memory * cores,
    )


def round_of(args: RlhfArguments, lengths: AverageLengths) -> Round:
    """Returns the work of a round of resolved arguments."""
    prompt = lengths.prompt
    completion = lengths.completion
    completions = int(args.generation_batch_size or args.completions_per_step)
    prompts = max(1, completions // args.num_generations)
    apart = completions * (prompt + completion)
    shared = completions * completion + prompts * prompt
    shares = args.share_prompt == "true" or (
        args.share_prompt == "auto" and shared <= (1 - LEAST_SAVING) * apart
    )
    return Round(
        prompts=prompts,
        group=args.num_generations,
        prompt_tokens=prompt,
        completion_tokens=completion,
        longest=_longest(args, lengths.quantiles),
        updates=max(1, completions // args.completions_per_step) * args.num_iterations,
        iterations=args.num_iterations,
        shares_prompts=shares,
        recorded=lengths.quantiles,
    )


def _longest(args: RlhfArguments, recorded: Sequence[float]) -> int:
    """Returns the most tokens of a completion: `--max_completion_length`, or with several turns, which each may have as
    many, those of the longest that was recorded."""
    lengths = [int(length) for length in recorded] if args.takes_turns else []
    return max(args.max_completion_length, *lengths, 0)


def job_of(
    args: EstimateArguments,
    world_size: int,
    chip: Chip,
    use: Efficiency,
    lengths: AverageLengths | None = None,
    run_file: RunFile | None = None,
) -> Job:
    """Returns the job that the flags ask for; `lengths` were measured. Raises UsageError: a config cannot be read."""
    known = lengths or AverageLengths(
        (args.max_length or 4 * PROMPT_TOKENS) / 4, args.max_completion_length / 2
    )
    completion = min(
        args.mean_completion_length or known.completion, float(_longest(args, known.quantiles))
    )
    known = AverageLengths(args.mean_prompt_length or known.prompt, completion, known.quantiles)
    server: Mapping[str, Any] = {} if run_file is None else run_file.rollout
    cache = server.get("vllm_kv_cache_dtype", args.vllm_kv_cache_dtype)
    share = server.get("vllm_gpu_memory_utilization", 0.9)
    model = model_of(args.model)
    round_ = round_of(args, known)
    if args.mean_image_pixels:
        model = with_tower(model, args.model)
        patches = args.mean_image_pixels / model.shape.patch**2
        round_ = replace(round_, patches=patches, tower_passes=1 if args.freeze_vit else 3)
    return Job(
        args=args,
        model=model,
        round=round_,
        chip=with_cores(chip, usable_cores(run_file, TRAIN) / ranks_of_node(world_size, run_file)),
        server_chip=with_cores(chip, usable_cores(run_file, ROLLOUT)),
        use=use,
        per_node=args.gpus_per_node,
        critic=model_of(args.critic_model) if args.critic_model else None,
        share=float(share),
        most=int(server.get("vllm_max_num_seqs") or args.vllm_max_num_seqs or chip.most_at_once),
        cache_width=1.0 if str(cache or "").startswith("fp8") else None,
        cache_bytes=_cache_bytes(server or args.to_dict()),
        others=_others(run_file),
    )


def usable_cores(run_file: RunFile | None, name: str) -> float:
    """Cores of a node that trains, or of a rollout server: as many as its role says, else all of this machine."""
    role = None if run_file is None else run_file.roles.get(name)
    return float((role and role.cpus) or len(os.sched_getaffinity(0)))


def ranks_of_node(world_size: int, run_file: RunFile | None) -> int:
    """Ranks that share a machine."""
    return world_size if run_file is None else run_file.roles[TRAIN].processes


def layout_of(args: RlhfArguments, world_size: int, run_file: RunFile | None = None) -> Layout:
    """Returns the layout that the flags or the roles say; a server that is only an address counts as one device.
    OSError: the file of servers cannot be read."""
    stage, _ = zero_of(args)
    if run_file is not None and (role := run_file.roles.get(ROLLOUT)) is not None:
        copies = int(run_file.rollout.get("vllm_data_parallel_size", 1))
        size = int(run_file.rollout.get("vllm_tensor_parallel_size", 1))
        return Layout(world_size, stage, "server", role.count * copies, size)
    if args.colocates:
        size = args.vllm_tensor_parallel_size
        return Layout(world_size, stage, "colocate", max(1, world_size // size), size)
    if not args.use_vllm:
        return Layout(world_size, stage, "embedded", world_size)
    urls = args.rollout_base_urls
    if args.vllm_server_file is not None:
        from swift_r1.wire.server_file import servers_of

        urls = servers_of(args.vllm_server_file).urls
    return Layout(world_size, stage, "server", max(1, len(urls)))


def sampling_seconds(
    args: RlhfArguments, world_size: int, parts: Sequence[int], group: int
) -> float:
    """Returns the seconds in which the cores of this machine answer prompts, so many in each of `parts`, with a `group`
    of completions that are as long as they may be. Raises UsageError: there is no config of the model."""
    chip = with_cores(CHIPS["cpu"], usable_cores(None, TRAIN) / world_size)
    longest = AverageLengths(PROMPT_TOKENS, args.max_completion_length)
    round_ = replace(round_of(args, longest), prompts=parts[0], group=group)
    job = Job(args, model_of(args.model), round_, chip, CPU, per_node=world_size)
    layout = Layout(world_size, None, "embedded", world_size)
    return len(parts) * estimate_layout(job, layout).phases["generate"]


def _others(run_file: RunFile | None) -> tuple[ServerRole, ...]:
    if run_file is None:
        return ()
    found = []
    for name, flags in run_file.servers.items():
        model = model_of(str(flags["model"]))
        width = WIDTHS[str(flags.get("torch_dtype") or model.shape.dtype)]
        size = int(flags.get("vllm_tensor_parallel_size", 1))
        replicas = run_file.roles[name].count * int(flags.get("vllm_data_parallel_size", 1))
        found.append(ServerRole(name, model, replicas, size, width, _cache_bytes(flags)))
    return tuple(found)


def _cache_bytes(flags: Mapping[str, Any]) -> float | None:
    """Returns the bytes of each GPU's cache of keys and values, where an engine's arguments say them."""
    given = flags.get("vllm_engine_kwargs") or {}
    arguments: Mapping[str, float] = json.loads(given) if isinstance(given, str) else given
    return arguments.get("kv_cache_memory_bytes")


def recorded_lines(folder: Path) -> list[dict[str, Any]]:
    """Returns the logged steps of a run without the first, which warms up. UsageError: fewer than two."""
    try:
        lines = [line for line in read_json_lines(folder / "logging.jsonl") if "time/step" in line]
    except OSError as error:
        raise UsageError(
            f"--measured {folder}: logging.jsonl: {error.strerror or error}"
        ) from error
    if len(lines) < 2:
        raise UsageError(
            f"--measured {folder}: needs two logged steps or more, of which the first is left out"
        )
    return lines[1:]


def of_run(folder: Path, chip: Chip, use: Efficiency) -> tuple[Job, Layout]:
    """Returns the job and the layout of a recorded run with its own lengths, and as many servers as took work. Raises
    UsageError: it is none of ours, or its model's config is gone."""
    try:
        content = json.loads(read_text(folder / "args.json"))
        args = arguments_of(content)
        args = replace(args, given=frozenset(flag_specs(type(args))))
        world_size = int(content["world_size"])
        cores = int(content["hardware"]["cores"])
    except OSError as error:
        raise UsageError(f"--measured {folder}: args.json: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"--measured {folder}: args.json is not that of a run of this version"
        ) from error
    job = Job(
        args=args,
        model=model_of(args.model),
        round=round_of(args, _recorded_lengths(folder, args)),
        chip=with_cores(chip, cores / world_size),
        server_chip=with_cores(chip, cores),
        use=use,
        per_node=max(8, world_size),
        critic=model_of(args.critic_model) if args.critic_model else None,
        most=args.vllm_max_num_seqs or chip.most_at_once,
    )
    servers = [
        line["rollout/servers"] for line in recorded_lines(folder) if line.get("rollout/servers")
    ]
    layout = layout_of(replace(args, vllm_server_file=None), world_size)
    return job, replace(layout, replicas=max(1, round(fmean(servers)))) if servers else layout


def _recorded_lengths(folder: Path, args: RlhfArguments) -> AverageLengths:
    """Returns the lengths of a run's completions and prompts. A prompt's are those of the tokens that training computed
    in addition: prompts of groups or of completions, whichever is nearer to the prompts' text."""
    lines = recorded_lines(folder)
    completion = fmean(line["completions/mean_length"] for line in lines)
    once = round_of(args, AverageLengths(1.0, completion))
    computed = fmean(line["tokens_computed"] for line in lines) * once.updates / once.iterations
    more = max(0.0, computed - once.generated_tokens)
    per_group = max(1.0, more / once.prompts)
    per_completion = max(1.0, more / once.completions)
    rows = _rows(folder / COMPLETIONS)
    if not rows:
        shared = round_of(args, AverageLengths(per_group, completion)).shares_prompts
        return AverageLengths(per_group if shared else per_completion, completion)
    written = sum(len(str(row["completion"])) for row in rows) / max(
        1, sum(row["tokens"] for row in rows)
    )
    by_text = fmean(len(str(row["prompt"])) for row in rows) / max(written, 1e-3)
    prompt = min((per_group, per_completion), key=lambda one: abs(one - by_text))
    ends = sorted(float(row["tokens"]) for row in rows)
    quantiles = tuple(
        ends[(2 * index + 1) * len(ends) // (2 * QUANTILES)] for index in range(QUANTILES)
    )
    return AverageLengths(prompt, completion, quantiles)


def _rows(file: Path) -> list[dict[str, Any]]:
    """Returns the first completions of a run; none where the file is not there."""
    if not file.exists():
        return []
    with open(file, encoding="utf-8", opener=regular) as lines:
        rows = [json.loads(line) for line in islice(lines, _MOST_ROWS) if line.endswith("\n")]
    return [row for row in rows if {"prompt", "completion", "tokens"} <= row.keys()]
