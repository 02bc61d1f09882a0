"""Hosts that `ssh` reaches: an sshd in each of some network namespaces, with keys of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import living, until
from tests.hosts import Host

SSHD = "/usr/sbin/sshd"
SERVER = """\
Port 22
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
SetEnv PYTHONPATH={path} OMP_NUM_THREADS=1
"""
CLIENT = """\
Host gen1 gen2 gen3
  IdentityFile {folder}/key
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  LogLevel ERROR
{names}
"""


class SshHosts:
    """Host 0 gives the orders; the others are called gen1, gen2, ..."""

    def __init__(self, folder: Path, hosts: Sequence[Host]) -> None:
        if not Path(SSHD).exists() or shutil.which("ssh") is None:
            pytest.skip("sshd not found (apt-get install openssh-server)")
        if os.geteuid() != 0:
            pytest.skip("sshd needs root here")
        self.folder, self.hosts = folder, hosts
        self.config = folder / "ssh_config"
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True
        )
        path = ":".join(one for one in sys.path if one)
        (folder / "sshd_config").write_text(SERVER.format(folder=folder, path=path))
        names = "".join(
            f"Host gen{n}\n  HostName {host.address}\n" for n, host in enumerate(hosts) if n
        )
        self.config.write_text(CLIENT.format(folder=folder, names=names))
        Path("/run/sshd").mkdir(exist_ok=True)
        self.daemons: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        words = [
            *self.hosts[number].enter,
            SSHD,
            "-D",
            "-e",
            "-f",
            str(self.folder / "sshd_config"),
        ]
        with (self.folder / f"sshd-{number}.log").open("ab") as out:
            self.daemons[number] = subprocess.Popen(
                words, stdout=out, stderr=out, start_new_session=True
            )
        probe = [
            *self.hosts[0].enter,
            "ssh",
            "-F",
            str(self.config),
            "-o",
            "BatchMode=yes",
            f"gen{number}",
            "true",
        ]
        until(
            lambda: (
                subprocess.run(probe, capture_output=True, timeout=20, check=False).returncode == 0
            ),
            20,
        )

    def processes(self, number: int, sshd: bool = False) -> list[psutil.Process]:
        """All on a host but those of its sshd, which may not know that a connection is dead."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.hosts[number].namespace],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        found = [
            psutil.Process(int(pid)) for pid in done.stdout.split() if psutil.pid_exists(int(pid))
        ]
        return [one for one in living(found) if sshd or _name(one) not in ("sshd", "")]

    def kill(self, number: int) -> None:
        """The host dies with all that runs on it."""
        self.daemons.pop(number).kill()
        while own := self.processes(number, sshd=True):
            for one in own:
                one.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        for number in list(self.daemons):
            self.kill(number)


def _name(process: psutil.Process) -> str:
    """Empty where it has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""
