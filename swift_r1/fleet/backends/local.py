"""`--on local`: this machine is the node, or several nodes of the same name and a number, to try what nodes do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from swift_r1.fleet.backend import AgentPipe, Node, ProcessPipe, agent_words
from swift_r1.fleet.run_file import RunFile, read_options


class LocalClusterBackend:
    """Its agents are processes of this machine."""

    def __init__(self, nodes: Sequence[Node], silence_s: float) -> None:
        self._nodes = nodes
        self._silence_s = silence_s

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def connect(self, node: Node) -> AgentPipe:
        return ProcessPipe(self.command(node))

    def command(self, node: Node) -> Sequence[str]:
        return [sys.executable, *agent_words(self._silence_s)]


def open_backend(run: RunFile, silence_s: float) -> LocalClusterBackend:
    options = read_options(
        run,
        "local",
        {
            "nodes": int,
            "gpus": int,
            "cpus": int,
            "python": str,
        },
    )
    names = (
        [f"local-{number}" for number in range(options["nodes"])]
        if "nodes" in options
        else ["local"]
    )
    python = options.get("python")
    folder = str(Path.cwd())
    return LocalClusterBackend(
        [
            Node(
                name,
                "127.0.0.1",
                options.get("gpus"),
                options.get("cpus"),
                python,
                folder,
            )
            for name in names
        ],
        silence_s,
    )
