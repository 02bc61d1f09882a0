"""`swift launch --on ssh` to hosts with a real sshd. Servers and trainers are stubs, but for the last test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import until
from tests.e2e.live_run import steps_of
from tests.fleet.cluster.sshd import SshHosts
from tests.fleet.conftest import STUB, Launch, interpreter, write_run

__all__ = ["interpreter", "write_run"]
pytestmark = pytest.mark.cluster
SCRIPT = f'[ "$2" = swift_r1 ] && exec {sys.executable} {STUB} "$@"; exec {sys.executable} "$@"'
TINY = f'[ "$3" = rollout ] && shift 3 && exec {sys.executable} -m tests.fleet.tiny_rollout "$@"'
REAL = f'{TINY}; exec {sys.executable} "$@"'
ROLES = {"train": {"nodes": 2, "hosts": ["gen1", "gen2"]}, "rollout": {"hosts": ["gen2", "gen3"]}}


@pytest.fixture(scope="module")
def ssh(hosts, tmp_path_factory) -> Iterator[SshHosts]:
    made = SshHosts(tmp_path_factory.mktemp("ssh"), hosts)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def launch(ssh, tmp_path, write_run, interpreter):
    """`launch(roles, *words, python=...) -> Launch` on host 0; all hosts are up before, and without a process after."""
    for number in (1, 2, 3):
        if number not in ssh.daemons:
            ssh.start(number)
    running: list[Launch] = []

    def start(roles, *words: str, script: str = SCRIPT, **sections) -> Launch:
        options = {
            "hosts": ["gen1", {"name": "gen2"}, "gen3"],
            "config": str(ssh.config),
            "python": interpreter(script),
        }
        write_run(roles, ssh=options, **sections)
        running.append(Launch(tmp_path, ["--on", "ssh", *words], ssh.hosts[0].enter))
        return running[-1]

    yield start
    for one in running:
        one.stop()
    for number in ssh.daemons:
        until(lambda number=number: not ssh.processes(number), 40)


def test_roles_on_their_hosts(launch, ssh):
    one = launch(ROLES)
    [server], trainers = one.started("rollout"), one.started("rlhf", 2)
    assert server["words"][server["words"].index("--host") + 1] == ssh.hosts[3].address
    assert {trainer["NNODES"] for trainer in trainers} == {"2"}
    for number in (1, 2, 3):
        assert ssh.processes(number)
    one.end(0, 0)
    one.end(0, 1)
    assert one.wait() == 0


def test_a_host_that_cannot_be_reached_is_named(launch, ssh):
    ssh.kill(2)
    one = launch(ROLES)
    assert one.wait() == 2
    assert (
        f"gen2 could not be reached: ssh: connect to host {ssh.hosts[2].address} port 22: Connection refused"
        in one.said
    )
    assert "roles: train needs 2 nodes on gen1, gen2, and there is room for 1" in one.said


def test_a_replica_of_a_dead_host_comes_back_elsewhere(launch, ssh):
    one = launch(ROLES)
    [server], trainers = one.started("rollout"), one.started("rlhf", 2)
    [file] = one.folder.glob("out/*/launch/servers.txt")
    assert ssh.hosts[3].address in file.read_text()
    ssh.kill(3)
    one.started("rollout", after=[server])
    until(lambda: file.read_text().startswith(f"http://{ssh.hosts[2].address}:"))
    assert len(file.read_text().splitlines()) == 1
    assert [trainer["pid"] for trainer in one.started("rlhf", 2)] == [
        trainer["pid"] for trainer in trainers
    ]


def test_a_host_without_a_network_trains_no_more(launch, ssh):
    roles = {"train": {"nodes": 2}, "rollout": {"hosts": ["gen3"]}}
    one = launch(roles, "--silence_timeout", "6")
    before = one.started("rlhf", 2)
    ssh.hosts[2].unplug()
    try:
        after = one.started("rlhf", 2, after=before)
        assert {trainer["NNODES"] for trainer in after} == {"2"}
        assert "gen2 is gone: it has not been heard from for 6 s" in one.said
        until(lambda: not ssh.processes(2), 60)
    finally:
        ssh.hosts[2].plug_in()


def test_training_goes_on_with_the_hosts_that_are_left(launch, ssh):
    one = launch({"train": {"nodes": 2, "hosts": ["gen1", "gen2"]}})
    before = one.started("rlhf", 2)
    ssh.kill(2)
    [alone] = one.started("rlhf", after=before)
    assert (alone["NNODES"], alone["words"][-2:]) == (None, ["--resume_from_checkpoint", "last"])
    assert "training resumes from its last checkpoint on 1 of 2 nodes" in one.said


@pytest.mark.parametrize(
    ("lost", "line"),
    [
        (2, "gen2 is gone, and no nodes came within 3 s (--node_timeout)"),
        (
            3,
            "rollout-0 has had no place for 3 s (--node_timeout): roles: rollout needs 1 replica on gen3",
        ),
    ],
)
def test_a_lost_host_is_not_waited_for_for_ever(launch, ssh, lost, line):
    roles = {"train": {"nodes": 2, "hosts": ["gen1", "gen2"]}, "rollout": {"hosts": ["gen3"]}}
    one = launch(roles, "--node_timeout", "3")
    one.started("rlhf", 2)
    until(lambda: "rollout-0 on gen3: serves" in one.said)
    ssh.kill(lost)
    assert one.wait() == 5
    assert line in one.said


def test_nothing_is_left_on_any_host(launch, ssh):
    one = launch(ROLES)
    one.started("rollout")
    one.started("rlhf", 2)
    one.process.kill()
    for number in (1, 2, 3):
        until(lambda number=number: not ssh.processes(number), 40)


def test_a_killed_driver_costs_no_whole_step(launch, ssh, tiny_model, tmp_path: Path):
    """The servers' host cannot know whether training still needs them."""
    rlhf = {"max_steps": 5000, "save_steps": 10_000, "output_dir": "run", "add_version": False}
    roles = {"train": {"hosts": ["gen1"]}, "rollout": {"hosts": ["gen2"]}}
    one = launch(roles, script=REAL, model=tiny_model, rlhf=rlhf)
    log = tmp_path / "run" / "logging.jsonl"
    until(lambda: log.exists() and len(steps_of(log.parent)) >= 2, 120)
    one.process.kill()
    for number in (1, 2):
        until(lambda number=number: not ssh.processes(number), 60)
    assert (log.parent / f"checkpoint-{steps_of(log.parent)[-1]['step']}").exists()


def test_a_run(launch, tiny_model, tmp_path: Path):
    """Two hosts train, two generate."""
    rlhf = {"max_steps": 3, "per_device_train_batch_size": 4, "ddp_timeout": 60}
    roles = {
        "train": {"nodes": 2, "hosts": ["gen1", "gen2"]},
        "rollout": {"replicas": 2, "hosts": ["gen1", "gen3"]},
    }
    one = launch(roles, script=REAL, model=tiny_model, rlhf=rlhf)
    assert one.wait(280) == 0
    assert "step 3/3" in one.said
    [folder] = (tmp_path / "out").iterdir()
    assert {path.name for path in (folder / "launch").glob("*.log")} == {
        f"{name}-{number}.log" for name in ("train", "rollout") for number in (0, 1)
    }
