"""`--on ssh`: the nodes are hosts that `ssh` reaches without a question, and that have this package."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.fleet.backend import Node, agent_words
from swift_r1.fleet.backends.local import LocalClusterBackend
from swift_r1.fleet.run_file import RunFile, option_faults, read_options

_CONNECT_S = 10
_KINDS = {"hosts": list, "python": str, "folder": str, "config": str}
_OF_A_HOST = {
    "name": str,
    "address": str,
    "gpus": int,
    "cpus": int,
    "python": str,
    "folder": str,
}


class SshBackend(LocalClusterBackend):
    """Its agents are at the other end of `ssh`; `config` is a file for it."""

    def __init__(
        self,
        nodes: Sequence[Node],
        interpreters: Mapping[str, str],
        config: str | None,
        silence_s: float,
    ) -> None:
        super().__init__(nodes, silence_s)
        self._interpreters = interpreters
        self._config = config

    def command(self, node: Node) -> Sequence[str]:
        options = {
            "BatchMode": "yes",  # a question would wait for ever
            "ControlMaster": "no",  # else another connection's end would be this one's
            "ControlPath": "none",
            "ConnectTimeout": _CONNECT_S,
            "ServerAliveInterval": max(1, round(self._silence_s / 4)),
            "ServerAliveCountMax": 3,
        }
        words = ["ssh", "-T", *(["-F", self._config] if self._config else [])]
        words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        agent = shlex.join([self._interpreters[node.name], *agent_words(self._silence_s)])
        return [*words, node.name, f"cd {shlex.quote(str(node.folder))} && exec {agent}"]


def open_backend(run: RunFile, silence_s: float) -> SshBackend:
    options = read_options(run, "ssh", _KINDS)
    faults: list[str] = (
        [] if options.get("hosts") else ["hosts is missing: a list of names that ssh knows"]
    )
    nodes: dict[str, Node] = {}
    interpreters: dict[str, str] = {}
    for one in options.get("hosts", []):
        host: dict[str, Any] = one if isinstance(one, dict) else {"name": one}
        found = [f"hosts: {fault}" for fault in option_faults(host, _OF_A_HOST)]
        name = str(host.get("name", ""))
        if not found and (not name or name.startswith("-") or name in nodes):
            found = [
                f"hosts: {name!r} is {'there twice' if name in nodes else 'no name of a host'}"
            ]
        faults += found
        if not found:
            own = {key: host.get(key, options.get(key)) for key in ("python", "folder")}
            interpreters[name] = own["python"] or sys.executable
            nodes[name] = Node(
                name,
                host.get("address"),
                host.get("gpus"),
                host.get("cpus"),
                own["python"],
                own["folder"] or str(Path.cwd()),
            )
    if faults:
        raise UsageError(*(f"{run.path}: ssh: {fault}" for fault in faults))
    return SshBackend(list(nodes.values()), interpreters, options.get("config"), silence_s)
