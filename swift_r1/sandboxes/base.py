"""What a sandbox is to its users: commands, files, and an end."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from swift_r1.workers.sandbox.start import SandboxError

__all__ = [
    "ExecResult",
    "SandboxError",
    "SandboxLimits",
    "SandboxOver",
    "SandboxSpec",
    "StatefulSandbox",
    "proxy_address",
]


class SandboxOver(SandboxError):
    """The sandbox has come to a limit of its whole life, or what ran in it has ended it."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What all processes of a sandbox may take together.

    Attributes:
        cpus: processors that it runs on; None: all of them.
        cpu_seconds: of processor time, over its whole life.
        memory_bytes: at a time.
        processes: and threads, at a time.
        disk_bytes: of what it writes to files.
        output_bytes: of what a command prints that are given back.
        seconds: of its whole life.
    """

    cpus: int | None = None
    cpu_seconds: float = 3600.0
    memory_bytes: int = 2 << 30
    processes: int = 256
    disk_bytes: int = 1 << 30
    output_bytes: int = 64 << 10
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        """Raises ValueError: one of them allows nothing, or is no such number."""
        for one in fields(self):
            value = getattr(self, one.name)
            seconds = one.type == "float"
            kinds = (int, float) if seconds else (int,)
            if one.default is None and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
                what = "a number" if seconds else "a whole number"
                raise ValueError(f"{one.name} must be {what} above 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is made of.

    Attributes:
        image: `host` (this machine's programs, none of its files), or the provider's kind of image: of `local` a folder
            with a root in it.
        network: HOST:PORT of a proxy, all that is in reach; None: nothing is.
        workdir: where commands begin; it is made.
        env: variables of commands.
    """

    image: str = "host"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    network: str | None = None
    workdir: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError: `network` is no address."""
        if self.network is not None:
            proxy_address(self.network)


def proxy_address(named: str) -> tuple[str, int]:
    """Returns host and port of `network`. Raises ValueError: it is not HOST:PORT."""
    host, _, port = named.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"a sandbox's network is HOST:PORT of a proxy, got {named!r}")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended.

    Attributes:
        exit_code: negative for a signal; None: out of time.
        output: standard output and errors as they came; head and tail of it where it was too long.
        truncated: whether it was.
    """

    exit_code: int | None
    output: str
    truncated: bool = False


class StatefulSandbox(ABC):
    """A machine of its own for one episode. One caller at a time; what runs in it goes on between calls."""

    @abstractmethod
    def exec(self, command: str, seconds: float) -> ExecResult:
        """Runs a command in bash (where there is none, in sh), in the folder `workdir`; when `seconds` are over, what it
        has started is killed. Raises SandboxOver, SandboxError."""

    @abstractmethod
    def write_file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Writes a file, in the place of one that is there; its folder is made. A relative path is below `workdir`.
        Raises SandboxOver; SandboxError: also where it cannot be written."""

    @abstractmethod
    def close(self) -> None:
        """Ends all that runs in it; its files go, too."""

    def __enter__(self) -> StatefulSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
