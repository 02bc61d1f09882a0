"""`swift launch --on ray` on `ray.cluster_utils.Cluster`: a head that runs nothing, and three nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO, until
from tests.fleet.cluster.conftest import ROLES, STEPS
from tests.fleet.cluster.running import STUB, processes_in
from tests.hosts import OWN_SHARED_MEMORY, Host, shared_memory_of

pytestmark = pytest.mark.timeout(400)


class RayCluster:
    """`tests/fleet/cluster/ray_cluster.py` on a host."""

    def __init__(self, host: Host, log: Path) -> None:
        self.enter, self.killed = host.enter, False
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [
                    *host.enter,
                    *OWN_SHARED_MEMORY,
                    sys.executable,
                    "-m",
                    "tests.fleet.cluster.ray_cluster",
                ],
                cwd=REPO,
                env=os.environ | {"PYTHONPATH": str(REPO), "RAY_USAGE_STATS_ENABLED": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        self.address = self._answer()

    def fill(self, count: int = 3) -> list[str]:
        """As many nodes as that are there then; their ids."""
        return self._ask(f"fill {count}")

    def kill(self, node: str, what: str = "kill") -> None:
        """Its daemon and all that runs on it, at once, or the `raylet` alone; nobody is told."""
        self._ask(f"{what} {node}")
        self.killed = True

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)

    def _ask(self, order: str) -> list[str]:
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        line = next((line for line in self.process.stdout if line.startswith(("[", '"'))), None)
        assert line is not None, "the cluster has ended"
        return json.loads(line)


@pytest.fixture(scope="module")
def ray_cluster(hosts, tmp_path_factory):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'swift-r1[ray]'")
    cluster = RayCluster(hosts[0], tmp_path_factory.mktemp("ray") / "cluster.log")
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def on_ray(ray_cluster, launched):
    """`on_ray(roles, model, python=..., **sections) -> Launch`, on three nodes that are free."""

    def make(roles=ROLES, model="m", **sections):
        ray_cluster.fill()
        one = launched("ray", ray_cluster.enter, RAY_ADDRESS=ray_cluster.address)
        one.write(roles, model, **sections)
        return one

    yield make
    pid = ray_cluster.process.pid
    # the nodes share one /dev/shm, and nobody could tidy up on a machine that died
    if ray_cluster.killed:
        ray_cluster.killed = False
        print(f"left by a node that was killed: {shared_memory_of(pid)}")
        subprocess.run(
            [
                "nsenter",
                f"--mount=/proc/{pid}/ns/mnt",
                "find",
                "/dev/shm",
                "-mindepth",
                "1",
                "-delete",
            ],
            check=True,
        )
    until(lambda: not shared_memory_of(pid), 60)


def node_of(ray_cluster, launch, task):
    """The node on which a task was started last."""
    line = [
        line for line in launch.said.splitlines() if line.startswith(f"swift launch: {task} on ")
    ][-1]
    name = line.split(f"{task} on ")[1].partition("/")[0]
    return next(node for node in ray_cluster.fill(0) if node.startswith(name))


def test_a_whole_run(on_ray, tiny_model, undisturbed):
    one = on_ray(model=tiny_model, rlhf={"max_steps": STEPS}).start()
    assert one.wait() == 0, one.said
    assert one.learned == undisturbed


def test_a_lost_node_costs_its_server_a_while(ray_cluster, on_ray, tiny_model, undisturbed):
    """Ray finds another place for the server's bundle."""
    one = on_ray(ROLES, tiny_model, rlhf={"max_steps": STEPS}, ray={"strategy": "STRICT_SPREAD"})
    ray_cluster.fill(4)
    one.start()
    until(lambda: len(one.steps) >= 2, 120)
    ray_cluster.kill(node_of(ray_cluster, one, "rollout-0"))
    assert one.wait(200) == 0, one.said
    assert one.steps == list(range(1, STEPS + 1))
    assert one.learned == undisturbed
    assert one.said.count("rollout-0 on ") >= 2


def test_a_lost_node_that_trained_costs_the_steps_since_the_last_checkpoint(
    ray_cluster, on_ray, tiny_model, undisturbed
):
    one = on_ray(ROLES, tiny_model, rlhf={"max_steps": STEPS, "save_steps": 2}).start()
    until(lambda: len(one.steps) >= 3, 120)
    ray_cluster.kill(node_of(ray_cluster, one, "train-0"))
    ray_cluster.fill()
    assert one.wait(300) == 0, one.said
    assert "training resumes from its last checkpoint" in one.said
    assert one.steps == list(range(1, STEPS + 1))
    assert one.learned == undisturbed


def test_a_killed_raylet_costs_no_whole_step(ray_cluster, on_ray, tiny_model):
    """The agents of its bundles, training's and the server's, end at the same moment."""
    roles = {"train": {"cpus": 1}, "rollout": {"cpus": 1}}
    one = on_ray(
        roles,
        tiny_model,
        rlhf={"max_steps": 5000, "save_steps": 10_000},
        ray={"strategy": "STRICT_PACK"},
    )
    one.start("--max_restarts", "0")
    until(lambda: len(one.steps) >= 2, 120)
    ray_cluster.kill(node_of(ray_cluster, one, "train-0"), "raylet")
    ray_cluster.fill()
    one.wait()
    until(lambda: not processes_in(one.folder), 60)
    assert "state-dump" not in one.said
    assert [path.name for path in (one.folder / "out").glob("checkpoint-*")] == [
        f"checkpoint-{one.steps[-1]}"
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(on_ray, number):
    one = on_ray(python=STUB).start()
    one.says("trains")
    one.send(number)
    assert one.wait(60) == 128 + number


def test_a_killed_driver_leaves_nothing(on_ray):
    one = on_ray(python=STUB).start()
    one.says("trains")
    one.send(signal.SIGKILL)
    one.wait(10)


def test_what_does_not_fit_is_said(on_ray):
    one = on_ray(ROLES | {"train": {"cpus": 64}}, python=STUB, ray={"wait": 1})
    done = one.once()
    assert done.returncode == 2
    assert (
        "Ray has not placed the roles within 1 s (ray: wait): 66 CPUs needed, 6 of 6 free"
        in done.stderr
    )


def test_no_ray(launched, tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('as if it were not there')")
    one = launched("ray", (), PYTHONPATH=f"{tmp_path}:{REPO}")
    one.write(ROLES, python=STUB)
    done = one.once()
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "swift launch: Ray is not installed: pip install 'swift-r1[ray]', the cluster's own version"
    )
