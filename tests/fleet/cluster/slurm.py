"""A Slurm of Debian's packages on several hosts of one machine: a login host with the controller, and nodes with a
slurmd each. Each node is a process namespace too: it dies with all that runs on it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import until
from tests.hosts import REPO, Host, shared_memory_of

NEEDS = ("slurmctld", "slurmd", "munged", "srun")
GPUS = 2  # of each node: character devices that are none
CPUS = 4

CONF = """\
ClusterName=swift
SlurmctldHost=login({login})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
{more}
SlurmdParameters=config_overrides
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=10
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n[1-{nodes}] NodeAddr={addresses} NodeHostname=n[1-{nodes}] {size}
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=60 PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=n[1-{nodes}] MaxTime=60 PriorityTier=10
"""


class Slurm:
    """Host 0 is the login host."""

    def __init__(
        self, folder: Path, hosts: Sequence[Host], *, grace_s: int = 60, more: str = ""
    ) -> None:
        if missing := [name for name in NEEDS if shutil.which(name) is None]:
            pytest.skip(
                f"{', '.join(missing)} not found (apt-get install slurmctld slurmd slurm-client munge)"
            )
        if os.geteuid() != 0:
            pytest.skip("slurmd needs root here")
        self.folder, self.hosts = folder, hosts
        nodes = len(hosts) - 1
        (folder / "slurm.conf").write_text(
            CONF.format(
                folder=folder,
                login=hosts[0].address,
                nodes=nodes,
                addresses=",".join(host.address for host in hosts[1:]),
                size=f"CPUs={CPUS} RealMemory=8000 Gres=gpu:{GPUS} Feature=small",
                grace=grace_s,
                more=more,
            )
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
        for number in range(GPUS):
            subprocess.run(["mknod", folder / f"gpu{number}", "c", "1", "3"], check=True)
        for name in ("state", *(f"spool/n{number}" for number in range(1, nodes + 1))):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        folder.chmod(0o755)
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        folder = self.folder
        files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        ends = ("key", "socket", "pid", "log", "seed")
        munged = [f"--{name}={folder}/munge.{end}" for name, end in zip(files, ends, strict=True)]
        self._daemon("munged", ["munged", "--foreground", "--force", *munged])
        until(lambda: (folder / "munge.socket").exists(), 20)
        named = ["unshare", "--uts", "sh", "-c", 'hostname login; exec "$@"', "sh"]
        self._daemon("login", [*self.hosts[0].enter, *named, "slurmctld", "-D", "-i"])
        for number in range(1, len(self.hosts)):
            self.start_node(number)
        until(lambda: self.states() == ["idle"] * (len(self.hosts) - 1), 60)

    def start_node(self, number: int) -> None:
        name = f"n{number}"
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        named = ["sh", "-c", f'hostname {name} && mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
        self._daemon(name, [*self.hosts[number].enter, *apart, *named, "slurmd", "-D", "-N", name])

    def kill_node(self, number: int) -> None:
        """With all that runs on it, at once."""
        node = self.running.pop(f"n{number}")
        node.kill()  # `unshare`, whose end is that of its namespace
        node.wait(20)

    def states(self) -> list[str]:
        listed = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%t", check=False)
        return sorted(listed.stdout.split())

    def shared_memory(self) -> list[str]:
        """What is in /dev/shm of any node."""
        daemons = [
            one for name in self.running if name.startswith("n") for one in self._children(name)
        ]
        return [file for pid in daemons for file in shared_memory_of(pid)]

    def _children(self, name: str) -> list[int]:
        """Of `unshare`, which is outside of the node."""
        return [one.pid for one in psutil.Process(self.running[name].pid).children()]

    def jobs(self) -> list[str]:
        return self.run("squeue", "-h", "-o", "%i %T").stdout.splitlines()

    def run(
        self, *words: str, check: bool = True, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """A command on the login host."""
        return subprocess.run(
            [*self.hosts[0].enter, *words],
            cwd=self.folder,
            env=os.environ | self.environ | environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=check,
        )

    def begin(
        self, words: Sequence[str], cwd: Path, log: Path, **environ: str
    ) -> subprocess.Popen[bytes]:
        """Starts a command on the login host."""
        return self.hosts[0].start(words, cwd, log, **self.environ, **environ)

    def stop(self) -> None:
        if "login" in self.running:
            self.run("scancel", "--user=root", check=False)
        for name in sorted(self.running, reverse=True):  # nodes, munged, login
            process = self.running.pop(name)
            process.send_signal(signal.SIGKILL if name.startswith("n") else signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)

    def said(self) -> str:
        return "\n".join(
            f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.out"))
        )

    def _daemon(self, name: str, words: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.running[name] = subprocess.Popen(
                words,
                cwd=self.folder,
                env=os.environ | self.environ | {"PYTHONPATH": str(REPO)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
