"""`swift launch --on slurm` on a Slurm of Debian's packages: a controller and three nodes."""

from __future__ import annotations

import signal

import pytest

from tests.conftest import until
from tests.fleet.cluster.conftest import ROLES, STEPS
from tests.fleet.cluster.running import STUB, processes_in

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def on_slurm(slurm, launched):
    """`on_slurm(roles, model, python=..., **sections) -> Launch`, once all nodes are free."""

    def make(roles=ROLES, model="m", **sections):
        until(lambda: slurm.states() == ["idle"] * 3, 90)
        one = launched("slurm", slurm.hosts[0].enter, **slurm.environ)
        one.write(roles, model, **sections)
        return one

    yield make
    slurm.run("scancel", "--user=root", check=False)
    until(lambda: not slurm.jobs() and not slurm.shared_memory(), 60)


def the_job(slurm):
    [job] = [line.split()[0] for line in slurm.jobs()]
    return job


def test_a_whole_run(on_slurm, tiny_model, undisturbed):
    one = on_slurm(model=tiny_model, rlhf={"max_steps": STEPS}).start()
    assert one.wait() == 0, one.said
    assert one.learned == undisturbed
    assert "runs on n[1-3]" in one.said


def test_preemption_saves_and_the_queued_job_goes_on(slurm, on_slurm, tiny_model, undisturbed):
    """Slurm's own: SIGTERM to everything on all nodes, and SIGKILL when the partition's GraceTime is over."""
    one = on_slurm(model=tiny_model, rlhf={"max_steps": STEPS, "save_steps": 1000}).start()
    until(lambda: len(one.steps) >= 2, 120)
    slurm.run("sbatch", "-p", "urgent", "-N3", "--exclusive", "--wrap", "sleep 3")
    one.says("is queued again")
    assert "will be taken away soon" in one.said
    before = one.steps
    assert one.wait(400) == 0, one.said
    assert len(before) < STEPS and one.steps == list(range(1, STEPS + 1))
    assert one.learned == undisturbed


def test_the_warning_saves_and_the_queued_job_goes_on(slurm, on_slurm, tiny_model, undisturbed):
    """As towards the end of the job's time: only the script gets SIGTERM."""
    one = on_slurm(model=tiny_model, rlhf={"max_steps": STEPS, "save_steps": 1000}).start()
    until(lambda: len(one.steps) >= 2, 120)
    slurm.run("scancel", "--batch", "--signal=TERM", the_job(slurm))
    one.says("is queued again")
    assert one.wait(400) == 0, one.said
    assert one.steps == list(range(1, STEPS + 1))
    assert one.learned == undisturbed


def test_a_job_that_gains_no_step_is_not_queued_again(slurm, on_slurm):
    one = on_slurm(python=STUB).start("--max_restarts", "0")
    one.says("trains")
    slurm.run("scancel", "--batch", "--signal=TERM", the_job(slurm))
    assert one.wait(120) == 5, one.said
    assert "starts without a step gained: 1 (--max_restarts 0)" in one.said
    assert not slurm.jobs()


def test_a_node_that_is_lost(slurm, on_slurm, tiny_model, undisturbed):
    """Its server comes back on one of the others, and the job goes on without the node."""
    one = on_slurm(model=tiny_model, rlhf={"max_steps": STEPS}).start("--silence_timeout", "10")
    until(lambda: len(one.steps) >= 2, 120)
    assert "rollout-0 on n2: serves" in one.said
    slurm.kill_node(2)
    try:
        one.says("n2 is gone", 60)
        assert one.wait(300) == 0, one.said
        assert "rollout-0 on n1: serves" in one.said or "rollout-0 on n3: serves" in one.said
        assert one.learned == undisturbed
    finally:
        slurm.start_node(2)


def test_ctrl_c_while_it_runs_saves(slurm, on_slurm, tiny_model):
    one = on_slurm(model=tiny_model, rlhf={"max_steps": 5000, "save_steps": 10_000}).start()
    until(lambda: len(one.steps) >= 2, 120)
    # on the nodes: three agents of two processes each, and the driver
    assert len(processes_in(one.folder)) >= 6
    one.send(signal.SIGINT)
    assert one.wait(120) == 130, one.said
    assert [path.name for path in (one.folder / "out").glob("checkpoint-*")] == [
        f"checkpoint-{one.steps[-1]}"
    ]
    assert not slurm.jobs()


def test_ctrl_c_while_it_waits_cancels(slurm, on_slurm):
    one = on_slurm(python=STUB)
    slurm.run("sbatch", "-N1", "--exclusive", "--wrap", "sleep 300")
    one.start().says("waits: Resources (it is the next one, and its nodes are busy)", 30)
    one.send(signal.SIGINT)
    assert one.wait(30) == 130
    assert [line for line in slurm.jobs() if "RUNNING" not in line] == []


def test_a_cancelled_job_is_not_queued_again(slurm, on_slurm):
    one = on_slurm(python=STUB).start()
    one.says("trains")
    slurm.run("scancel", the_job(slurm))
    assert one.wait(60) == 130
    assert "cancelled" in one.said and "queued again" not in one.said
    assert not slurm.jobs()


def test_a_job_that_cannot_be_is_said_in_a_line(on_slurm):
    for own, line in (
        ({"partition": "nope"}, "invalid partition specified: nope"),
        ({"sbatch": ["--nodelist=n9"]}, "Invalid node name specified"),
    ):
        done = on_slurm(python=STUB, slurm=own).once()
        assert done.returncode == 2
        assert line in done.stderr and len(done.stderr.splitlines()) == 1


def test_roles_on_nodes_of_different_kinds(slurm, on_slurm):
    """Components of one job, each with nodes for its roles, or parts of nodes."""
    roles = {"train": {"cpus": 2}, "rollout": {"replicas": 2, "cpus": 1}}
    one = on_slurm(roles, python=STUB, slurm={"rollout": {"constraint": "small"}})
    script = one.once("--dry_run").stdout
    assert (
        "#SBATCH hetjob" in script
        and "#SBATCH --ntasks=2" in script
        and "#SBATCH --constraint=small" in script
    )
    one.start().says("trains")
    until(lambda: len(list(one.folder.glob("r*-*.json"))) == 3)
    assert "+1: started" in one.said  # a node of the second component
    (one.folder / "end-0").write_text("0")
    assert one.wait(60) == 0, one.said


def test_no_sbatch(launched, tmp_path):
    one = launched("slurm", (), PATH=str(tmp_path))
    one.write(ROLES, python=STUB)
    done = one.once()
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "swift launch: there is no sbatch on this machine: start on a login node of the cluster, or --dry_run"
    )
