"""What holds on every engine: a run with vLLM; and thirty agents killed, which a run does not show."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import time
from collections import Counter

import psutil
import pytest

from tests.conftest import until
from tests.e2e.live_run import steps_of
from tests.fleet.cluster.conftest import ROLES
from tests.fleet.cluster.running import PLAIN, Launch, processes_in
from tests.fleet.cluster.test_ray import on_ray, ray_cluster
from tests.fleet.cluster.test_slurm import on_slurm
from tests.hosts import OWN_SHARED_MEMORY, shared_memory_of

__all__ = ["on_ray", "on_slurm", "ray_cluster"]
KILLS, KILLED_STEPS = 30, 120
VLLM = {"vllm_engine_kwargs": {"kv_cache_memory_bytes": 64 << 20}, "vllm_max_model_len": 512}
AGENT = "swift_r1.fleet.agent"


@pytest.fixture
def on_local(launched):
    def make(roles=ROLES, model="m", **sections):
        one = launched("local")
        one.write(roles, model, **sections)
        return one

    return make


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["local", "slurm", "ray"])
def test_a_whole_run_with_vllm(request, tiny_model, engine):
    make = request.getfixturevalue(f"on_{engine}")
    one = make(
        {"train": {}, "rollout": {}}, tiny_model, python=PLAIN, rollout=VLLM, rlhf={"max_steps": 4}
    ).start()
    assert one.wait(800) == 0, one.said
    steps = steps_of(one.folder / "out")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert max(row["rollout/logp_diff"] for row in steps) < 2e-3


@pytest.mark.timeout(400)
@pytest.mark.parametrize("killed", ["driver", "agent"])
def test_what_is_killed_costs_no_whole_step(on_local, tiny_model, killed):
    """Training and its servers are told to end at about the same moment."""
    one = on_local(
        {"train": {}, "rollout": {}}, tiny_model, rlhf={"max_steps": 5000, "save_steps": 10_000}
    )
    one.start("--max_restarts", "0")
    until(lambda: len(one.steps) >= 2, 120)
    (one.process if killed == "driver" else agents_at_work(one)[0]).send_signal(signal.SIGKILL)
    assert one.wait() == (-signal.SIGKILL if killed == "driver" else 5)
    until(lambda: not processes_in(one.folder), 60)
    assert [path.name for path in (one.folder / "out").glob("checkpoint-*")] == [
        f"checkpoint-{one.steps[-1]}"
    ]


@pytest.fixture
def apart():
    """A process with a /dev/shm of its own, which others can share."""
    keeper = subprocess.Popen([*OWN_SHARED_MEMORY, "sleep", "infinity"])
    until(lambda: psutil.Process(keeper.pid).name() == "sleep")
    yield keeper.pid
    keeper.kill()
    keeper.wait(10)


def agents_at_work(launch: Launch) -> list[psutil.Process]:
    """The first process of each agent that has started something."""
    found = []
    for one in psutil.Process(launch.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (
                AGENT in one.cmdline()
                and AGENT not in one.parent().cmdline()
                and len(one.children(recursive=True)) > 1
            ):
                found.append(one)
    return found


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_thirty_killed_agents(launched, tiny_model, tmp_path, apart):
    """Each is that of a server or of training, at any moment; the run learns what an undisturbed one does."""
    enter = ("nsenter", f"--mount=/proc/{apart}/ns/mnt", "env")
    flags = {"max_steps": KILLED_STEPS, "save_steps": 1, "save_total_limit": 2}
    calm = launched("local", (*enter, f"--chdir={tmp_path}/local-0"))
    calm.write(ROLES, tiny_model, rlhf=flags)
    assert calm.start().wait(400) == 0, calm.said
    one = launched("local", (*enter, f"--chdir={tmp_path}/local-1"))
    one.write(ROLES, tiny_model, rlhf=flags, local={"nodes": 3})
    one.start("--max_restarts", "1000")
    chance, due = random.Random(27), 2
    for _ in range(KILLS):
        until(lambda due=due: one.steps and one.steps[-1] >= due, 200)
        time.sleep(chance.random() * 0.5)  # at any moment of the step
        victim = chance.choice(agents_at_work(one))
        # the guard, or the agent itself
        chance.choice([victim, *victim.children()]).send_signal(signal.SIGKILL)
        due = min(one.steps[-1] + chance.randint(1, 5), KILLED_STEPS - 1)
    assert one.wait(400) == 0, one.said
    lost = Counter(
        re.findall(r"^swift launch: (train|rollout)-\d is lost with", one.said, re.MULTILINE)
    )
    assert min(lost["train"], lost["rollout"]) >= 5
    assert one.steps == list(range(1, KILLED_STEPS + 1))
    assert one.learned == calm.learned
    until(lambda: not shared_memory_of(apart), 60)
