"""The commands of a launch: words and variables of every process, without the interpreter's name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.flags.fields import as_words, flag_specs
from swift_r1.flags.output import LAST
from swift_r1.flags.parser import API_KEY_VARIABLE
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.fleet.placement import NodeSlot
from swift_r1.fleet.run_file import TRAIN, RunFile, is_secret, with_addresses
from swift_r1.runtime.processes import module_words
from swift_r1.wire.urls import has_password

_FORWARDED = ("HF_TOKEN", "WANDB_API_KEY", "SWIFT_REWARD_API_TOKEN", "SWIFT_JUDGE_API_KEY")


def server_words(run: RunFile, role: str, address: str, port: int) -> list[str]:
    flags = dict(run.server_flags(role)) | {"host": address, "port": port}
    return module_words("swift_r1", "rollout", *as_words(flags))


def train_words(
    run: RunFile,
    urls: Mapping[str, Sequence[str]],
    folder: str,
    resume: bool,
    server_file: str | None = None,
) -> list[str]:
    """Returns the command of each node that trains, into `folder`; `urls` are the addresses of the servers of each
    role, of which those of the rollout servers may be in a file instead."""
    flags: dict[str, Any] = with_addresses(run.flags, urls, server_file) | {
        "output_dir": folder,
        "add_version": False,
    }
    if resume:
        flags["resume_from_checkpoint"] = LAST
    return module_words("swift_r1", run.command, *as_words(flags))


def server_file(folder: str) -> str:
    """Returns the path of the file with the addresses of the rollout servers."""
    return f"{folder}/launch/servers.txt"


def rank_variables(
    run: RunFile,
    nodes: int,
    number: int,
    address: str,
    port: int,
) -> dict[str, str]:
    """Returns the variables that place a node's ranks among all."""
    own = {"NPROC_PER_NODE": str(run.roles[TRAIN].processes)}
    if nodes == 1:
        return own
    return own | {
        "NNODES": str(nodes),
        "NODE_RANK": str(number),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def device_variables(place: NodeSlot, node_has_gpus: bool) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)} if place.gpus or node_has_gpus else {}


def shared_variables(run: RunFile, key: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of all processes: the file's, the servers' key, and this process's keys of trackers and
    hubs. Raises UsageError: one that the file only names is not set here."""
    missing = [name for name, value in run.environ.items() if value is None and name not in environ]
    if missing:
        raise UsageError(
            *(f"{run.path}: environ: {name} has no value, and is not set here" for name in missing)
        )
    secrets = {spec.info.secret for spec in flag_specs(RlhfArguments).values() if spec.info.secret}
    passed = {name: environ[name] for name in sorted({*secrets, *_FORWARDED}) if name in environ}
    given = {name: environ[name] if value is None else value for name, value in run.environ.items()}
    return passed | given | {API_KEY_VARIABLE: key}


def shown_command(
    python: str,
    folder: str | None,
    words: Sequence[str],
    environ: Mapping[str, str],
) -> str:
    """Writes a command for a shell; the values of keys are `***`."""
    shown = {
        name: "***" if is_secret(name) or has_password(value) else shlex.quote(value)
        for name, value in environ.items()
    }
    variables = " ".join(f"{name}={value}" for name, value in shown.items())
    place = f"cd {shlex.quote(folder)} && " if folder else ""
    return f"{place}{variables} {shlex.join([python, *words])}".replace("&&  ", "&& ")
