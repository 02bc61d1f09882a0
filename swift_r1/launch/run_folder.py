"""The folder of a run and its args.json: a new one, or that of a resumed run with its checkpoint, if it still is that
run."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.data.store import Rows
from swift_r1.errors import UsageError
from swift_r1.flags.batch import SIZES, batch_sizes
from swift_r1.flags.fields import flag_specs, spellings
from swift_r1.flags.output import LAST
from swift_r1.flags.parser import Command
from swift_r1.flags.plan import Plan
from swift_r1.flags.run import RunFlags
from swift_r1.flags.world import World
from swift_r1.launch.nodes import Nodes
from swift_r1.record.folder import newest_version
from swift_r1.runtime.hardware import hardware
from swift_r1.runtime.libraries import package_versions
from swift_r1.runtime.processes import run_folder_held, say

if TYPE_CHECKING:
    from swift_r1.record.recorded import Replay

_LAYOUT = ("deepspeed", "fsdp", "zero_hpz_partition_size", "sequence_parallel_size")
"""Flags of how the processes share the work: what is learned depends on them only by rounding."""
_OF_A_NODE = {*(one.name for one in fields(World)), "output_dir", "view", "view_port"}
"""Flags that each node may have its own of; node 0 tells the others the run's folder."""
_SIGNS_OF_A_RUN = ("args.json", "logging.jsonl", "completions.jsonl", "checkpoint-*")


def run_folder_faults(args: RunFlags, world: World) -> list[str]:
    """Says why the output folder cannot be used, before anything is made."""
    folder = Path(str(args.output_dir))
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        return [f"--output_dir {folder}: {existing} is a file"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"--output_dir {folder}: no permission to write in {existing}"]
    fresh = not args.add_version and world.node_rank == 0 and args.resume_from_checkpoint is None
    found = holds_run(folder) if fresh else None
    if found:
        return [
            f"--output_dir {folder} holds a run already ({found}): give another folder, continue that run "
            "(--resume_from_checkpoint last), or leave --add_version true for a new folder inside it"
        ]
    return []


def holds_run(folder: Path) -> str | None:
    """Returns the name of something in `folder` that only a run leaves there; None where there is nothing."""
    return next((path.name for sign in _SIGNS_OF_A_RUN for path in folder.glob(sign)), None)


def run_folder(args: RunFlags, world: World, nodes: Nodes | None, resumed: Path | None) -> Path:
    """Returns the run's folder: that of the `resumed` run, or a new one. Node 0 tells the others. Raises UsageError
    where it cannot be made, or another node resumes another run."""
    if nodes is not None and world.node_rank:
        [place] = nodes.ask(["folder"])
        if resumed is not None and resumed != Path(place):
            raise UsageError(
                f"node 0 trains in {place}, and this node would continue in {resumed}: --output_dir must be shared"
            )
        return make_run_folder(replace(args, output_dir=place, add_version=False))
    folder = resumed or make_run_folder(args)
    if nodes is not None:
        nodes.tell("folder", str(folder))
    return folder


def make_run_folder(args: RunFlags) -> Path:
    """Makes and returns the run's folder (absolute): `vN-YYYYmmdd-HHMMSS` in `--output_dir`, or that itself.
    UsageError where it cannot be made."""
    base = Path(str(args.output_dir)).absolute()
    try:
        base.mkdir(parents=True, exist_ok=True)
        if not args.add_version:
            return base
        while True:
            folder = base / f"v{newest_version(base)[0] + 1}-{time.strftime('%Y%m%d-%H%M%S')}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue  # another run took the number just now
    except OSError as error:
        raise UsageError(f"--output_dir {args.output_dir}: {error.strerror or error}") from error


def write_args(
    folder: Path,
    args: RunFlags,
    world: World,
    words: Sequence[str],
    dataset: str,
    checkpoint: Path | None = None,
    prepared: Mapping[str, str] | None = None,
    plan: Plan | None = None,
    own_dtype: bool = False,
    replay: Replay | None = None,
) -> Path:
    """Writes args.json: every resolved flag, the command line, package versions, the machine, the plan, a hash of the
    training data, where its rows lie prepared, the checkpoint that the run goes on from, whether its checkpoints have
    the dtype of the model's config rather than that of training, and which run it replays.

    Secrets are left out. Nodes other than the first write `args-node<k>.json` beside it. UsageError where it cannot be
    written.
    """
    path = folder / ("args.json" if world.node_rank == 0 else f"args-node{world.node_rank}.json")
    content: Mapping[str, Any] = {
        "args": args.to_dict(),
        "run_dir": str(folder),
        "command": ["swift", args.command, *without_secrets(words)],
        "versions": package_versions(),
        "hardware": hardware(os.environ),
        "world_size": world.size,
        "plan": None if plan is None else asdict(plan),
        "dataset_hash": dataset,
        "prepared_data": dict(prepared or {}),
        "own_dtype": own_dtype,
        "replay": None if replay is None else asdict(replay),
        "resumed_from": str(checkpoint) if checkpoint else None,
        "started": time.time(),
    }
    try:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def settings_of_all_nodes(args: RunFlags, world: World) -> dict[str, Any]:
    """Returns flags and versions in which the nodes of a run may not differ."""
    flags = {f"--{name}": value for name, value in args.to_dict().items() if name not in _OF_A_NODE}
    versions = {name: version for name, version in package_versions().items() if name != "python"}
    return flags | versions | {"NNODES": world.nnodes, "NPROC_PER_NODE": world.nproc_per_node}


def without_secrets(words: Sequence[str]) -> list[str]:
    """Returns a command line with the values of secrets replaced by `***`."""
    secrets = {
        name
        for one in Command.__subclasses__()
        for name, spec in spellings(one).items()
        if spec.info.secret
    }
    shown: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_key = name.lstrip("-").replace("-", "_") in secrets and name.startswith("--")
        shown.append("***" if hide_next else f"{name}=***" if is_key and equals else word)
        hide_next = is_key and not equals
    return shown


def find_checkpoint(args: RunFlags) -> tuple[Path | None, Path | None]:
    """Finds the folder and checkpoint that `--resume_from_checkpoint` names; a line on stderr says so. Hashes every
    file of it.

    Without a folder the run makes a new one; without a checkpoint it starts from the beginning. UsageError where the
    checkpoint is missing, broken, without state, or of a run outside `--output_dir`.
    """
    if args.resume_from_checkpoint is None:
        return None, None
    from swift_r1.training.checkpoint.folder import fault_of, newest_whole

    base = Path(str(args.output_dir)).absolute()
    if args.resume_from_checkpoint == LAST:
        newest = newest_version(base)[1] if args.add_version else base
        if newest is None or not holds_run(newest):
            say(f"there is no run in {base} yet: starting from the beginning", args.command)
            return None, None
        with run_folder_held(newest):
            whole = newest_whole(newest)
        if whole is None:
            say(f"{newest} has no whole checkpoint yet: starting from the beginning", args.command)
            return newest, None
        run_dir = newest
        checkpoint = whole
    else:
        checkpoint = Path(args.resume_from_checkpoint).absolute()
        run_dir = checkpoint.parent
        fault = fault_of(checkpoint)
        if fault:
            raise UsageError(f"--resume_from_checkpoint {args.resume_from_checkpoint}: {fault}")
        if base not in (run_dir, run_dir.parent):
            raise UsageError(
                f"--resume_from_checkpoint {args.resume_from_checkpoint} goes on in {run_dir}, which is not in "
                f"--output_dir {args.output_dir}: give the run's own flags"
            )
    say(f"resuming from {checkpoint}", args.command)
    return run_dir, checkpoint


def check_same_run(args: RunFlags, world: World, dataset: str, checkpoint: Path) -> None:
    """Refuses to go on with another run's flags or data; with `--resume_force true` only says what differs, as of other
    processes and backends, which change nothing but rounding. Raises UsageError with the differences."""
    from swift_r1.training.checkpoint.state import RunState

    state = RunState.read(checkpoint)
    saved = state.fingerprint
    specs = flag_specs(type(args))
    # which may lack newer flags
    before = {name: spec.default for name, spec in specs.items()} | dict(saved.args)
    now = args.to_dict()
    same = {*_LAYOUT, *(SIZES if batch_sizes(before) == batch_sizes(now) else ())}
    changed = {
        name: f"--{name} {_shown(before[name])} became {_shown(value)}"
        for name, value in now.items()
        if not specs[name].info.may_change and before[name] != value
    }
    layout = [line for name, line in changed.items() if name in _LAYOUT]
    if saved.world_size != world.size:
        layout.insert(0, f"{_processes(saved.world_size)} became {world.size}")
    sharded = any(values[name] for values in (before, now) for name in ("deepspeed", "fsdp"))
    if layout and sharded and "8bit" in args.optim and before["optim"] == args.optim:
        raise UsageError(
            f"{checkpoint} has 8-bit moments (--optim {args.optim}) in the parts of {_processes(saved.world_size)} of "
            f"{_backend(before)}, and only these can go on with it: {', '.join(layout)}"
        )
    differences = [line for name, line in changed.items() if name not in same]
    in_training = bool(differences)
    if saved.dataset != dataset:
        differences.append("the training data has other rows, or another order")
    if differences and not args.resume_force:
        raise UsageError(
            f"{checkpoint} is of a run with other settings (--resume_force true resumes all the same):",
            *differences,
        )
    if state.round is not None and in_training:
        raise UsageError(
            f"{checkpoint} was saved in the middle of a round, which only the run's own settings can go on with:",
            *differences,
        )
    for line in differences:
        say(f"--resume_force true: {line}", args.command)
    if layout:
        kept = "" if in_training else ": the same prompts, seeds and batches"
        say(
            f"{', '.join(layout)}{kept}; sums are added up in another order, so last digits differ",
            args.command,
        )


def dataset_hash(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the hash of training rows in their order: 128 bits as hexadecimal digits."""
    if isinstance(rows, Rows):
        return rows.digest()
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _backend(flags: Mapping[str, Any]) -> str:
    return next(
        (f"--{name} {_shown(flags[name])}" for name in ("deepspeed", "fsdp") if flags[name]),
        "plain torch",
    )


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
