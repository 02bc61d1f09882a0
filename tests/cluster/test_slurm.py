"""`swift launch --on slurm` on a Slurm of Debian's packages: a controller, and three nodes that share nothing but files."""

from __future__ import annotations

import signal

import pytest

from tests.cluster.conftest import ROLES, STEPS
from tests.cluster.running import STUB, processes_in
from tests.conftest import until

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def on_slurm(slurm, launched):
    def make(python=None, roles=ROLES, model="m", **sections):
        until(lambda: slurm.states() == ["idle"] * 3, 90)
        one = launched("slurm", slurm.hosts[0].enter, **slurm.environ)
        one.write(roles, model, **({"python": python} if python else {}), **sections)
        return one

    yield make
    slurm.run("scancel", "--user=root", check=False)
    until(lambda: not slurm.jobs(), 60)


def test_a_whole_run(on_slurm, tiny_model, undisturbed):
    one = on_slurm(model=tiny_model, rlhf={"max_steps": STEPS}).start()
    assert one.wait() == 0, one.said
    assert one.learned == undisturbed
    assert "runs on n[1-3]" in one.said


def test_preemption_saves_and_the_queued_job_goes_on(slurm, on_slurm, tiny_model, undisturbed):
    one = on_slurm(model=tiny_model, rlhf={"max_steps": STEPS, "save_steps": 1000}).start()
    until(lambda: len(one.steps) >= 2, 120)
    urgent = slurm.run("sbatch", "--parsable", "-p", "urgent", "-N3", "--exclusive", "--wrap", "sleep 3").stdout.strip()
    one.says("will be taken away soon")
    one.says("is queued again")
    before = one.steps
    until(lambda: not any(job.startswith(urgent) for job in slurm.jobs()), 120)
    assert one.wait(400) == 0, one.said
    assert len(before) < STEPS and one.steps == list(range(1, STEPS + 1))
    assert one.learned == undisturbed


def test_the_warning_saves_and_the_queued_job_goes_on(slurm, on_slurm, tiny_model, undisturbed):
    """As at the end of its time: only the script gets SIGTERM."""
    one = on_slurm(model=tiny_model, rlhf={"max_steps": STEPS, "save_steps": 1000}).start()
    until(lambda: len(one.steps) >= 2, 120)
    [job] = [job.split()[0] for job in slurm.jobs()]
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    one.says("is queued again")
    assert one.wait(400) == 0, one.said
    assert one.steps == list(range(1, STEPS + 1))
    assert one.learned == undisturbed


def test_ctrl_c_while_it_waits(slurm, on_slurm):
    blocker = slurm.run("sbatch", "--parsable", "-N3", "--exclusive", "--wrap", "sleep 300").stdout.strip()
    one = on_slurm.__wrapped__ if hasattr(on_slurm, "__wrapped__") else on_slurm
    assert blocker and one
