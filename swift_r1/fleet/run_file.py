"""The file of `swift launch`: flags of `swift rlhf`, of its servers and of a warm start before it, and a table of roles."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from swift_r1.errors import UsageError, no_such, read_yaml, yaml_fault
from swift_r1.flags.adapters import KIND
from swift_r1.flags.fields import as_words, flag_specs, spellings
from swift_r1.flags.output import LAST
from swift_r1.flags.parser import API_KEY_VARIABLE, Command, parse_arguments
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.run import RunFlags
from swift_r1.flags.server import RolloutArguments
from swift_r1.flags.sft import ALWAYS, SftArguments
from swift_r1.fleet.backends import BACKENDS
from swift_r1.record.folder import WARM_START
from swift_r1.wire.urls import has_password, is_secret_name

TRAIN = "train"
ROLLOUT = "rollout"
JUDGE = "judge"
TEACHER = "teacher"
SERVERS = (JUDGE, TEACHER)
"""Roles of servers beside the rollout servers; each has a section of its own with its model."""
_ROLES = (TRAIN, ROLLOUT, *SERVERS)
_SECTIONS = ("sft", "rlhf", ROLLOUT, *SERVERS, "roles", "environ", *BACKENDS)
_CHOSEN_VARIABLES = (
    *(
        "NNODES",
        "NODE_RANK",
        "NPROC_PER_NODE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
    ),
    API_KEY_VARIABLE,
)
_KINDS: dict[type, str] = {
    int: "a whole number of at least 0",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
_PLACEHOLDER_URL = "http://127.0.0.1:8000"
_ONE = dict.fromkeys(
    SERVERS, "has one address: give it vllm_data_parallel_size for more copies of the model"
)
_ADDRESSES = dict.fromkeys(
    ("host", "port", "api_key"), "swift launch chooses addresses and the key"
)
_SERVER_FLAGS = ("vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_file")
_OF_THE_LAUNCH = {
    **dict.fromkeys(("nnodes", "nproc_per_node"), "say it in roles: train"),
    **dict.fromkeys(("node_rank", "master_addr", "master_port"), "swift launch chooses it"),
    "resume_from_checkpoint": "swift launch resumes its own runs: only `last` may stand here",
}
_OF_THE_RUN = dict.fromkeys(
    ("output_dir", "add_version", "create_checkpoint_symlink"),
    "swift launch chooses it: sft is a part of the run of rlhf",
)
_A = TypeVar("_A", bound=RunFlags)


@dataclass(frozen=True)
class Role:
    """One line of the table of roles.

    Attributes:
        name: `train`, `rollout`, `judge` or `teacher`.
        count: nodes that train, or replicas of a server.
        gpus: of each node that trains, of each replica.
        processes: of each node that trains; its GPUs where there are any.
        cpus: cores that each node's part, or each replica, is given; None: no share is counted.
        hosts: names of nodes on which it may run; empty: all.
    """

    name: str
    count: int = 1
    gpus: int = 0
    processes: int = 1
    cpus: int | None = None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunFile:
    """The content of the file, checked.

    Attributes:
        flags: of `command` under their own names, without addresses.
        rollout: flags of `swift rollout` for the role of that name, model and dtype included.
        servers: the same for `judge` and `teacher`, where there are such roles.
        roles: by name; `train` is always there.
        options: of each backend that has a section.
        environ: variables of every process that is started; None: with the value that they have here.
        args: `flags` as `command` will read them, with addresses that stand for those of the servers.
        command: what trains, `rlhf` or `sft`.
        warm_start: the part before, with which `command` begins; the model of `flags` stands for what it will have made.
    """

    path: Path
    flags: Mapping[str, Any]
    rollout: Mapping[str, Any]
    servers: Mapping[str, Mapping[str, Any]]
    roles: Mapping[str, Role]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environ: Mapping[str, str | None] = field(default_factory=dict)
    args: RunFlags = field(default_factory=RlhfArguments, repr=False)
    command: str = RlhfArguments.command
    warm_start: RunFile | None = None

    def server_flags(self, role: str) -> Mapping[str, Any]:
        """Returns the flags of `swift rollout` for the replicas of a role."""
        return self.rollout if role == ROLLOUT else self.servers[role]

    def parts(self, folder: str) -> list[tuple[RunFile, str]]:
        """Returns what is done one after the other in the run's folder: of each its own folder."""
        before = self.warm_start
        if before is None:
            return [(self, folder)]
        own = f"{folder}/{WARM_START}"
        kept = kept_in(before, own)
        rollout = dict(self.rollout)
        if before.args.takes_adapters:
            start: dict[str, Any] = {"adapters": [kept]}
        else:
            start = {"model": kept}
            if rollout.get("model") == self.flags["model"]:
                rollout["model"] = kept
        after = replace(self, flags={**self.flags, **start}, rollout=rollout, warm_start=None)
        return [(before, own), (after, folder)]


def kept_in(run: RunFile, folder: str) -> str:
    """Returns the link to the checkpoint of a run in `folder` that the next begins with, on every machine alike."""
    return f"{folder}/{'last' if run.args.metric_for_best_model is None else 'best'}"


def read_run_file(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunFile:
    """Reads the file, with `overrides` of flags of `swift rlhf` in the place of what the file has for them.

    Raises:
        UsageError: every fault of the file.
    """
    content = _load(Path(path))
    faults = list(unknown(content, _SECTIONS, "section"))
    sections = {name: _mapping(content, name, faults) for name in _SECTIONS}
    roles = {}
    for name, values in sections["roles"].items():
        role = _role(name, values, faults)
        if role is not None:
            roles[name] = role
    if "roles" not in content:
        faults.append("roles is missing: at least `roles: {train: {}}`")
    elif TRAIN not in sections["roles"]:
        faults.append(f"roles: {TRAIN} is missing: who trains")
    rlhf = _named(RlhfArguments, sections["rlhf"] | dict(overrides or {}))
    sft = _named(SftArguments, sections["sft"])
    taught = None
    if "sft" in content:
        faults += [f"sft: {name}: {why}" for name, why in _OF_THE_RUN.items() if name in sft]
        train_alone = {name: role for name, role in roles.items() if name == TRAIN}
        taught = _checked(SftArguments, sft, train_alone, faults, ALWAYS)
    given = frozenset(rlhf)
    if taught is not None and rlhf:
        rlhf.setdefault("model", taught.model)
    args = _checked(RlhfArguments, rlhf, roles, faults)
    if taught is not None:
        faults += _begins_with(taught, args, given)
    servers = {}
    for name in (ROLLOUT, *SERVERS):
        own = _named(RolloutArguments, sections[name])
        if name in roles:
            servers[name] = _server(own, rlhf if name == ROLLOUT else {}, roles[name])
            faults += _server_faults(name, own, servers[name])
        elif own:
            faults.append(
                f"{name} has flags, and no role of that name: add it to roles, or leave the section out"
            )
    environ = _environ(sections["environ"], faults)
    if faults:
        raise UsageError(*(f"{path}: {fault}" for fault in dict.fromkeys(faults)))
    options = {name: sections[name] for name in BACKENDS if name in content}
    run = RunFile(
        Path(path),
        rlhf,
        servers.pop(ROLLOUT, {}),
        servers,
        roles,
        options,
        environ,
        args,
    )
    if taught is None:
        return run
    before = replace(
        run,
        flags=sft | {"create_checkpoint_symlink": True},
        roles={TRAIN: roles[TRAIN]},
        args=taught,
        command=taught.command,
    )
    return replace(run, warm_start=before)


def _begins_with(taught: SftArguments, args: RunFlags, given: frozenset[str]) -> Iterator[str]:
    """Yields what keeps `rlhf` from beginning with what `sft` has taught."""
    for name in ("model", "adapters"):
        if name in given:
            yield f"rlhf: {name}: it begins with what sft has taught: leave it out"
    if taught.save_strategy == "no":
        yield "sft: save_strategy: rlhf begins with a checkpoint of sft: leave it out"
    if not taught.takes_adapters:
        return
    if not args.takes_adapters:
        yield (
            f"rlhf: train_type: sft teaches adapters (train_type {taught.train_type}), and rlhf begins with them: "
            "train_type lora here too, or full there"
        )
    for name in KIND:
        if name in given and getattr(args, name) != getattr(taught, name):
            yield f"rlhf: {name}: the adapters of sft have another: leave it out"


def with_addresses(
    rlhf: Mapping[str, Any],
    urls: Mapping[str, Sequence[str]],
    server_file: str | None = None,
) -> dict[str, Any]:
    """Returns flags of `swift rlhf` with the addresses of the servers of each role, or the file that has those of the
    rollout servers. Raises UsageError: `judge` cannot be read, or a flag names another server."""
    flags = dict(rlhf)
    faults = list[str]()
    if ROLLOUT in urls:
        flags |= (
            {"vllm_server_file": server_file}
            if server_file
            else {"vllm_server_base_url": list(urls[ROLLOUT])}
        )
        if set(_SERVER_FLAGS).intersection(rlhf):
            faults.append(
                f"the role {ROLLOUT} has addresses: leave out {', '.join(_SERVER_FLAGS)}, or the role"
            )
        if not flags.setdefault("use_vllm", True) or flags.get("vllm_mode", "server") != "server":
            faults.append(
                f"roles: {ROLLOUT} generates: leave out use_vllm and vllm_mode, or the role"
            )
    if TEACHER in urls:
        if {"teacher_model", "teacher_model_server"}.intersection(flags):
            faults.append(
                "the role teacher teaches: leave out teacher_model and teacher_model_server, or the role"
            )
        flags["teacher_model_server"] = list(urls[TEACHER])
    if JUDGE in urls:
        judge = _judge(flags.get("judge") or {})
        if "url" in judge:
            faults.append("judge: swift launch knows its url: leave it out, or the role judge")
        [url] = urls[JUDGE]
        flags["judge"] = json.dumps(judge | {"url": f"{url}/v1", "api_key_env": API_KEY_VARIABLE})
    if faults:
        raise UsageError(*faults)
    return flags


def _judge(value: Any) -> dict[str, Any]:
    """Reads `--judge` without what only its checks want: an object, JSON, or a file."""
    import yaml

    try:
        text = (
            value
            if isinstance(value, dict) or value.lstrip().startswith("{")
            else Path(value).read_text()
        )
        content = text if isinstance(text, dict) else read_yaml(text)
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise UsageError(
            f"judge: {yaml_fault(error) if isinstance(error, yaml.YAMLError) else error}"
        ) from error
    if not isinstance(content, dict):
        raise UsageError("judge: must be a mapping")
    return content


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {yaml_fault(error)}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} must have the sections {', '.join(_SECTIONS)}")
    return {str(name): value for name, value in content.items()}


def _mapping(content: Mapping[str, Any], name: str, faults: list[str]) -> dict[str, Any]:
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        faults.append(f"{name} must be a mapping, not {value!r}")
        return {}
    return {str(key): one for key, one in value.items()}


def unknown(given: Iterable[str], known: Iterable[str], what: str) -> Iterator[str]:
    """Yields a line for each name that is not known, with the nearest one that is."""
    names = list(known)
    return (no_such(what, name, names) for name in given if name not in names)


def _role(name: str, values: Any, faults: list[str]) -> Role | None:
    """Returns a line of the table of roles; None where something is wrong with it, which `faults` gets."""
    faults += unknown([name], _ROLES, "role")
    if name not in _ROLES:
        return None
    values = {} if values is None else values
    if not isinstance(values, dict):
        faults.append(f"roles: {name} must be a mapping like {{gpus: 1}}, not {values!r}")
        return None
    numbers = (
        ["nodes", "gpus", "processes", "cpus"] if name == TRAIN else ["replicas", "gpus", "cpus"]
    )
    hosts = values.get("hosts", [])
    found = list(unknown(map(str, values), [*numbers, "hosts"], "key"))
    for key in numbers:
        value = values.get(key, 1)
        least = 0 if key == "gpus" else 1
        if type(value) is not int or value < least:
            found.append(f"{key} must be a whole number of at least {least}, not {value!r}")
    if values.get("gpus") and "processes" in values:
        found.append("processes: leave it out where there are gpus, each of which has one")
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        found.append(f"hosts must be a list of names, not {hosts!r}")
    if name in _ONE and values.get("replicas", 1) != 1:
        found.append(_ONE[name])
    if found:
        faults += [f"roles: {name}: {fault}" for fault in found]
        return None
    gpus = values.get("gpus", 0)
    processes = values.get("processes") or gpus or 1
    return Role(name, values.get(numbers[0], 1), gpus, processes, values.get("cpus"), tuple(hosts))


def is_secret(variable: str) -> bool:
    """Says whether a variable is a key by its name."""
    return (
        is_secret_name(variable)
        or re.search("(^|_)(KEY|TOKEN|SECRET|PASSWORD)(_|$)", variable.upper()) is not None
    )


def _environ(given: Mapping[str, Any], faults: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, value in given.items():
        if name in _CHOSEN_VARIABLES:
            faults.append(f"environ: {name}: swift launch chooses it")
        elif isinstance(value, dict | list):
            faults.append(f"environ: {name} must be one value, not {value!r}")
        elif value is not None and (is_secret(name) or has_password(str(value))):
            faults.append(
                f"environ: {name}: a key has no place in a file: leave its value out, and set it here"
            )
        else:
            found[name] = None if value is None else _text_of(value)
    return found


def _text_of(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _named(cls: type[Command], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags under their own names: an alias in the file and a name on the command line are the same
    flag."""
    known = spellings(cls)
    found = dict[str, Any]()
    for written, value in values.items():
        name = written.replace("-", "_")
        found[known[name].name if name in known else name] = value
    return found


def _server(given: Mapping[str, Any], policy: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """Returns a server's flags: a rollout server has the policy's model and dtype, and its GPUs one copy of it."""
    flags = {name: policy[name] for name in ("model", "torch_dtype") if name in policy} | dict(
        given
    )
    if role.gpus > 1 and not {"vllm_tensor_parallel_size", "vllm_data_parallel_size"}.intersection(
        flags
    ):
        flags["vllm_tensor_parallel_size"] = role.gpus
    return flags


def _server_faults(name: str, given: Mapping[str, Any], flags: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name}: {key}: {why}" for key, why in _ADDRESSES.items() if key in given)
    if name in SERVERS and not given.get("model"):
        yield f"{name}: model is missing: its server has one of its own"
        return
    own = {key: value for key, value in flags.items() if key not in _ADDRESSES}
    try:
        parse_arguments(RolloutArguments, as_words(own), {})
    except UsageError as error:
        yield from (f"{name}: {fault}" for fault in error.faults)


def _checked(
    cls: type[_A],
    flags: Mapping[str, Any],
    roles: Mapping[str, Role],
    faults: list[str],
    recorded: Mapping[str, Any] | None = None,
) -> _A:
    """Returns the flags as their command will read them; what is wrong with them is in `faults`."""
    section = cls.command
    if not flags:
        faults.append(f"{section} is missing: the flags of swift {section}")
        return cls()
    own: dict[str, Any] = {}
    for key, value in flags.items():
        if key in _OF_THE_LAUNCH and value != LAST:
            faults.append(f"{section}: {key}: {_OF_THE_LAUNCH[key]}")
        else:
            own[key] = value
    for key, spec in flag_specs(cls).items():
        if spec.info.secret and key in own:
            faults.append(
                f"{section}: {key}: a key has no place in a file: set {spec.info.secret} where swift launch runs"
            )
    train = roles.get(TRAIN, Role(TRAIN))
    world = {
        "NPROC_PER_NODE": str(train.processes),
        "NNODES": str(train.count),
        "MASTER_ADDR": "node0",
    }
    try:
        own = with_addresses(own, {name: [_PLACEHOLDER_URL] for name in roles if name != TRAIN})
        return parse_arguments(cls, as_words(own), world, recorded=recorded)
    except UsageError as error:
        faults += [f"{section}: {fault}" for fault in error.faults]
        return cls()


def read_options(run: RunFile, backend: str, known: Mapping[str, type]) -> dict[str, Any]:
    """Returns what the file has for a backend. Raises UsageError: keys that are not `known`, or values of another
    type."""
    options = dict(run.options.get(backend, {}))
    faults = option_faults(options, known)
    if faults:
        raise UsageError(*(f"{run.path}: {backend}: {fault}" for fault in faults))
    return options


def hosts_faults(run: RunFile, instead: str) -> list[str]:
    """Returns a line for each role with `hosts`, for a backend that cannot be told names."""
    return [
        f"{run.path}: roles: {name}: hosts: {instead}"
        for name, role in run.roles.items()
        if role.hosts
    ]


def option_faults(options: Mapping[str, Any], known: Mapping[str, type]) -> list[str]:
    """Returns a line for each key that is not known, or has a value of another type."""
    faults = list(unknown(options, known, "key"))
    for name, value in options.items():
        kind = known.get(name)
        if kind is not None and (type(value) is not kind or (isinstance(value, int) and value < 0)):
            faults.append(f"{name} must be {_KINDS[kind]}, not {value!r}")
    return faults
