"""The script of a Slurm job that runs a launch: its roles as the job's components, and the driver on its first node."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.fleet.run_file import SERVERS, TRAIN, Role, RunFile, option_faults, read_options
from swift_r1.runtime.processes import module_words

DEFAULT_WARNING_S = 300
_START_S = 60  # that servers and training take at the least to start
_FROM_HOURS = (3600, 60, 1)
_FROM_MINUTES = (60, 1)
_OWN: dict[str, type] = {
    "partition": str,
    "account": str,
    "qos": str,
    "constraint": str,
    "mem": str,
    "sbatch": list,
}
"""Options of `sbatch` that a role may have its own of."""
_KNOWN: dict[str, type] = {
    **_OWN,
    **{"time": str, "warning": int, "setup": list, "python": str},
    **dict.fromkeys(("train", "rollout", *SERVERS), dict),
}


@dataclass(frozen=True)
class Component:
    """Nodes of one kind in a job.

    Attributes:
        roles: that are meant to run there.
        size: options of `sbatch` that say how much is asked for.
        own: further ones.
    """

    roles: tuple[str, ...]
    size: tuple[str, ...]
    own: tuple[str, ...]


def slurm_options(run: RunFile) -> dict[str, Any]:
    """Returns the section `slurm`, checked. Raises UsageError."""
    given = run.options.get("slurm", {})
    if isinstance(given.get("time"), int):
        raise UsageError(
            f'{run.path}: slurm: time must be in quotes, like "24:00:00": YAML makes a number of it'
        )
    options = read_options(run, "slurm", _KNOWN)
    faults = [
        f"{run.path}: slurm: {role}: {fault}"
        for role in ("train", "rollout", *SERVERS)
        for fault in option_faults(options.get(role, {}), _OWN)
    ]
    time = _seconds(options.get("time", "UNLIMITED"))
    warning = options.get("warning", DEFAULT_WARNING_S)
    if time <= warning + _START_S:
        faults.append(
            f"{run.path}: slurm: time {options['time']} is {time:g} s, and training is told to save {warning} s before "
            f"its end (warning), which leaves nothing to train in once it has started (at least {_START_S} s)"
        )
    if faults:
        raise UsageError(*faults)
    return options


def _seconds(time: str) -> float:
    """Returns the seconds of a time as Slurm takes it: `MM`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM`, `D-HH:MM:SS`;
    infinite where it sets no limit, or is for Slurm to refuse."""
    days, dash, clock = time.rpartition("-")
    parts = clock.split(":")
    if (
        not all(part.isdecimal() for part in (*parts, days or "0"))
        or len(parts) > 3
        or set(parts) == {"0"}
    ):
        return math.inf
    places = _FROM_HOURS if dash or len(parts) == 3 else _FROM_MINUTES
    return 86400 * int(days or 0) + sum(
        int(part) * place for part, place in zip(parts, places, strict=False)
    )


def components(run: RunFile, options: Mapping[str, Any]) -> list[Component]:
    """Returns one for the nodes that train and the roles that fit on nodes like these; one for each other role.

    A server shares the kind of node if it has no options of its own and its replicas fill such nodes: by GPUs, where
    both have them, else by `cpus`. Where neither says how much it needs each replica gets a node.
    """
    train = run.roles[TRAIN]
    first = [TRAIN]
    others = []
    nodes = train.count
    cpus = train.cpus
    for role in (one for name, one in run.roles.items() if name != TRAIN):
        on_each = 0 if role.name in options else _replicas_on(train, role)
        if on_each:
            first.append(role.name)
            nodes += math.ceil(role.count / on_each)
            cpus = max(cpus, on_each * role.cpus) if cpus and role.cpus else None
        else:
            others.append(Component((role.name,), _tasks(role), _own(options, role.name)))
    size = (f"--nodes={nodes}", "--ntasks-per-node=1", *_gpus("node", train.gpus), *_cpus(cpus))
    return [Component(tuple(first), size, _own(options, TRAIN)), *others]


def job_script(run: RunFile, words: Sequence[str], folder: Path) -> str:
    """Returns the script that `sbatch` is given. The driver takes the place of the shell, so that the warning reaches
    it.

    Args:
        words: those after `swift launch`.
        folder: of the runs, for the job's output.
    """
    options = slurm_options(run)
    warning = options.get("warning", DEFAULT_WARNING_S)
    whole_job = (
        f"--job-name={run.path.stem}",
        f"--chdir={Path.cwd()}",
        f"--output={folder}/slurm-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:TERM@{warning}",
    )
    limits = (f"--time={options['time']}",) if "time" in options else ()
    parts = [
        "\n".join(f"#SBATCH {word}" for word in (*limits, "--no-kill", *part.size, *part.own))
        for part in components(run, options)
    ]
    driver = shlex.join([sys.executable, *module_words("swift_r1", "launch", *words)])
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"#SBATCH {shlex.quote(word)}" for word in whole_job),
            "\n#SBATCH hetjob\n".join(parts),
            "set -e",
            *map(str, options.get("setup", [])),
            f"exec {driver} ${{SLURM_RESTART_COUNT:+--resume_from_checkpoint last}}",
            "",
        ]
    )


def _replicas_on(train: Role, role: Role) -> int:
    """Returns how many of a server's replicas fit on a node like those that train; 0: it needs another kind."""
    if train.gpus or role.gpus:
        return train.gpus // role.gpus if role.gpus else 0
    if train.cpus and role.cpus:
        return train.cpus // role.cpus
    return int(train.cpus == role.cpus)


def _tasks(role: Role) -> tuple[str, ...]:
    alone = replace(role, count=1)
    return (f"--ntasks={role.count}", *_gpus("task", alone.gpus), *_cpus(alone.cpus))


def _gpus(of: str, count: int) -> Iterator[str]:
    if count:
        yield f"--gpus-per-{of}={count}"


def _cpus(count: int | None) -> tuple[str, ...]:
    """Returns the words for so many cores; without a number all of the node's: Slurm's own default is one."""
    return (f"--cpus-per-task={count}",) if count else ("--exclusive",)


def _own(options: Mapping[str, Any], role: str) -> tuple[str, ...]:
    chosen = {name: value for name, value in options.items() if name in _OWN} | options.get(
        role, {}
    )
    further = [str(one) for one in chosen.pop("sbatch", [])]
    return (*(f"--{name}={value}" for name, value in chosen.items()), *further)
