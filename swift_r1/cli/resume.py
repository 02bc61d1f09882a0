"""`--resume_from_checkpoint`: which run goes on, from which checkpoint, and whether it still is that run."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.arguments.world import World
from swift_r1.data.view import Rows
from swift_r1.errors import UsageError
from swift_r1.launch.run_folder import holds_run, newest_version

LAST = "last"
_FREE = """
    output_dir add_version resume_from_checkpoint resume_force save_steps save_total_limit save_only_model
    metric_for_best_model greater_is_better
    logging_steps log_completions report_to run_name eval_steps eval_unit eval_on_start eval_datasets eval_limit
    num_generations_eval eval_temperature eval_top_p eval_max_completion_length val_dataset
    per_device_eval_batch_size api_key vllm_server_host vllm_server_port
    vllm_server_base_url vllm_server_timeout vllm_max_model_len vllm_enforce_eager
    vllm_gpu_memory_utilization vllm_engine_kwargs weight_transport weight_delta weight_check_steps ddp_timeout
    shutdown_timeout sleep_level offload_model offload_optimizer max_runtime max_skipped_steps step_timeout estimate
    dataloader_num_workers dataset_num_proc load_from_cache_file strict
    reward_num_workers reward_timeout reward_memory_limit multi_turn_timeout
"""
FREE_FLAGS = frozenset(_FREE.split())
"""Flags that a resumed run may have otherwise: what they change is not what is learned."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run goes on. `run_dir` None: in a new folder; `checkpoint` None: from the beginning."""

    run_dir: Path | None = None
    checkpoint: Path | None = None


def find_checkpoint(args: RlhfArguments) -> Resume:
    """What `--resume_from_checkpoint` means here; a line on stderr says so. Hashes every file of the checkpoint.

    Raises:
        UsageError: the checkpoint is missing, broken, without state, or of a run outside `--output_dir`.
    """
    if args.resume_from_checkpoint is None:
        return Resume()
    from swift_r1.runtime.processes import run_folder_held
    from swift_r1.training.checkpoint.folder import fault_of, newest_whole

    base = Path(str(args.output_dir)).absolute()
    if args.resume_from_checkpoint == LAST:
        run_dir = newest_version(base) if args.add_version else base
        if run_dir is None or not holds_run(run_dir):
            _say(f"there is no run in {base} yet: starting from the beginning")
            return Resume()
        with run_folder_held(run_dir):
            checkpoint = newest_whole(run_dir)
        if checkpoint is None:
            _say(f"{run_dir} has no whole checkpoint yet: starting from the beginning")
            return Resume(run_dir)
    else:
        checkpoint = Path(args.resume_from_checkpoint).absolute()
        run_dir = checkpoint.parent
        if fault := fault_of(checkpoint):
            raise UsageError(f"--resume_from_checkpoint {args.resume_from_checkpoint}: {fault}")
        if base not in (run_dir, run_dir.parent):
            raise UsageError(
                f"--resume_from_checkpoint {args.resume_from_checkpoint} goes on in {run_dir}, which is not in "
                f"--output_dir {args.output_dir}: give the run's own flags"
            )
    _say(f"resuming from {checkpoint}")
    return Resume(run_dir, checkpoint)


def check_same_run(args: RlhfArguments, world: World, dataset: str, checkpoint: Path) -> None:
    """Refuses to go on with another run's flags, processes or data; with `--resume_force true` only says what differs.

    Raises:
        UsageError: with the differences, one a line.
    """
    from swift_r1.training.checkpoint.run_state import RunState

    state = RunState.read(checkpoint)
    saved = state.fingerprint
    differences = changed_flags(saved.args, args.to_dict())
    if saved.world_size != world.size:
        differences.append(f"{saved.world_size} processes became {world.size}")
    in_training = bool(differences)
    if saved.dataset != dataset:
        differences.append("the training data has other rows, or another order")
    if not differences:
        return
    if not args.resume_force:
        raise UsageError(
            f"{checkpoint} is of a run with other settings (--resume_force true resumes all the same):", *differences
        )
    if state.round is not None and in_training:
        raise UsageError(
            f"{checkpoint} was saved in the middle of a round, which only the run's own settings can go on with:",
            *differences,
        )
    for line in differences:
        _say(f"--resume_force true: {line}")


def changed_flags(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line a flag that is not what it was, but for those that are free to change."""
    names = [name for name in now if name not in FREE_FLAGS and saved.get(name) != now[name]]
    return [f"--{name} {_shown(saved.get(name))} became {_shown(now[name])}" for name in names]


def dataset_hash(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of training rows in their order: 128 bits as hexadecimal digits."""
    if isinstance(rows, Rows):
        return rows.digest()
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


def _say(text: str) -> None:
    print(f"swift rlhf: {text}", file=sys.stderr, flush=True)
