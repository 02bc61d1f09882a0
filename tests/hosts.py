"""Several hosts on one machine: network namespaces, each with its own address, joined by a bridge in another one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Host:
    """One namespace."""

    namespace: str
    address: str

    def start(
        self, words: Sequence[str], cwd: Path, log: Path, **environ: str
    ) -> subprocess.Popen[bytes]:
        """A process on this host, in a session of its own; what it prints goes to `log`."""
        base = {
            name: value
            for name, value in os.environ.items()
            if name not in ("MASTER_ADDR", "MASTER_PORT")
        }
        with log.open("ab") as out:
            return subprocess.Popen(
                [*self.enter, *words],
                cwd=cwd,
                env=base | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"} | environ,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def enter(self) -> tuple[str, ...]:
        """The words before those of a command that is to run on this host. Not `ip netns exec`, under which there is no
        /sys/fs/cgroup."""
        return ("nsenter", f"--net=/run/netns/{self.namespace}")

    def unplug(self) -> None:
        """Nothing comes or goes any more, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def plug_in(self) -> None:
        _ip("-n", self.namespace, "link", "set", "eth0", "up")


@contextlib.contextmanager
def made_hosts(count: int) -> Iterator[list[Host]]:
    """Skips where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2 (apt-get install iproute2)")
    prefix = f"sr1-{os.getpid()}-{count}"
    switch = f"{prefix}-switch"
    made = [Host(f"{prefix}-{number}", f"10.77.0.{number + 1}") for number in range(count)]
    try:
        _ip("netns", "add", switch)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(made):
            name = host.namespace
            _ip("netns", "add", name)
            _ip(
                "link",
                "add",
                "eth0",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                f"p{number}",
                "netns",
                switch,
            )
            _ip("-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")
        yield made
    finally:
        for name in (*(host.namespace for host in made), switch):
            subprocess.run(
                ["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False
            )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, timeout=20, check=True)


OWN_SHARED_MEMORY = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs tmpfs /dev/shm && exec "$@"',
    "sh",
)
"""Words before those of a command that is to have a /dev/shm of its own, as on another machine."""


def shared_memory_of(pid: int) -> list[str]:
    """What a process has in its /dev/shm."""
    return os.listdir(f"/proc/{pid}/root/dev/shm")


def python(*words: str) -> list[str]:
    return [sys.executable, *words]
