"""What `--dry_run` writes for Slurm and Kubernetes, where neither is: a script and a manifest."""

from __future__ import annotations

import pytest
import yaml

from tests import forks

GPU_ROLES = {"train": {"nodes": 2, "gpus": 8}, "rollout": {"replicas": 4, "gpus": 2}}


@pytest.fixture
def dry_run(write_run, tmp_path):
    """`dry_run(engine, roles, **sections) -> (exit code, output, errors)`."""

    def run(engine, roles, **sections):
        write_run(roles, **sections)
        words = ["-m", "swift_r1", "launch", "run.yaml", "--on", engine, "--dry_run"]
        done = forks.run(words, cwd=tmp_path, timeout=60)
        return done.returncode, done.stdout, done.stderr

    return run


def sbatch(script):
    """The options of each component, the whole job's with the first."""
    parts = [part.splitlines() for part in script.split("#SBATCH hetjob\n")]
    return [[line.split()[1] for line in part if line.startswith("#SBATCH ")] for part in parts]


def test_replicas_that_fill_nodes_like_those_that_train(dry_run):
    code, script, _ = dry_run(
        "slurm", GPU_ROLES, slurm={"time": "24:00:00", "partition": "gpu", "warning": 600}
    )
    assert code == 0
    [options] = sbatch(script)
    assert {
        "--nodes=3",
        "--gpus-per-node=8",
        "--exclusive",
        "--time=24:00:00",
        "--partition=gpu",
    } < set(options)
    assert {"--requeue", "--no-kill", "--signal=B:TERM@600", "--open-mode=append"} < set(options)
    last = script.splitlines()[-1]
    assert last.startswith("exec ") and "dry_run" not in last
    assert last.endswith(
        "launch run.yaml --on slurm ${SLURM_RESTART_COUNT:+--resume_from_checkpoint last}"
    )


def test_roles_that_need_other_nodes_are_components(dry_run):
    roles = {
        "train": {"nodes": 2, "gpus": 8, "cpus": 64},
        "rollout": {"replicas": 3},
        "judge": {"gpus": 1, "cpus": 8},
    }
    sections = {
        "judge": {"model": "j"},
        "rlhf": {"reward_funcs": ["digits", "judge"]},
        "slurm": {
            "partition": "gpu",
            "mem": "64G",
            "setup": ["module load cuda"],
            "judge": {"partition": "small"},
        },
    }
    code, script, _ = dry_run("slurm", roles, **sections)
    assert code == 0
    train, rollout, judge = sbatch(script)
    assert {
        "--nodes=2",
        "--gpus-per-node=8",
        "--cpus-per-task=64",
        "--partition=gpu",
        "--mem=64G",
    } < set(train)
    assert set(rollout) == {
        "--no-kill",
        "--ntasks=3",
        "--exclusive",
        "--partition=gpu",
        "--mem=64G",
    }
    assert {
        "--ntasks=1",
        "--gpus-per-task=1",
        "--cpus-per-task=8",
        "--partition=small",
        "--mem=64G",
    } < set(judge)
    assert "\nmodule load cuda\nexec " in script


def test_faults_of_the_sections(dry_run):
    code, _, said = dry_run(
        "slurm", {"train": {}}, slurm={"partitoin": "x", "rollout": {"nodes": 3}}
    )
    assert code == 2 and "slurm: there is no key partitoin: did you mean partition?" in said
    code, _, said = dry_run("kubernetes", {"train": {}}, kubernetes={"image": "i"})
    assert code == 2 and "kubernetes: claim is missing" in said
    for engine, line in (
        ("kubernetes", "Kubernetes chooses the nodes"),
        ("ray", "Ray chooses the nodes"),
    ):
        code, _, said = dry_run(
            engine, {"train": {"hosts": ["a"]}}, kubernetes={"image": "i", "claim": "c"}
        )
        assert code == 2 and f"run.yaml: roles: train: hosts: {line}" in said


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("00:05:00", 300),
        ("0-0:6", 360),
        ("00:06:01", None),
    ],
)
def test_a_time_that_is_over_before_training_begins(dry_run, time, seconds):
    code, script, errors = dry_run("slurm", GPU_ROLES, slurm={"time": time})
    if seconds is None:
        assert code == 0 and f"--time={time}" in script
    else:
        assert code == 2 and script == ""
        assert (
            f"slurm: time {time} is {seconds} s" in errors
            and "300 s before its end (warning)" in errors
        )


def test_a_jobset(dry_run, monkeypatch):
    monkeypatch.setenv("SWIFT_API_KEY", "hidden")
    code, text, _ = dry_run(
        "kubernetes", GPU_ROLES, kubernetes={"image": "swift:1", "claim": "data"}
    )
    assert code == 0 and "hidden" not in text
    manifest = yaml.safe_load(text)
    assert manifest["spec"]["successPolicy"] == {
        "operator": "All",
        "targetReplicatedJobs": ["train"],
    }
    train, rollout = manifest["spec"]["replicatedJobs"]
    assert (rollout["name"], rollout["replicas"]) == ("rollout", 4)
    pods = [job["template"]["spec"]["template"]["spec"] for job in (train, rollout)]
    [trains], [serves] = (pod["containers"] for pod in pods)
    assert (
        train["template"]["spec"]["completions"] == 2
        and pods[0]["terminationGracePeriodSeconds"] == 300
    )
    assert [one["resources"]["limits"] for one in (trains, serves)] == [
        {"nvidia.com/gpu": "8"},
        {"nvidia.com/gpu": "2"},
    ]
    assert {"name": "MASTER_ADDR", "value": "run-train-0-0.run"} in trains["env"]
    assert "http://run-rollout-3-0.run:8000" in trains["command"] and "0.0.0.0" in serves["command"]
    assert trains["envFrom"] == [{"secretRef": {"name": "swift-r1"}}]


def test_a_manifest_is_not_applied_from_here(dry_run, write_run, tmp_path):
    write_run({"train": {}}, kubernetes={"image": "i", "claim": "c"})
    words = ["-m", "swift_r1", "launch", "run.yaml", "--on", "kubernetes"]
    done = forks.run(words, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "swift launch run.yaml --on kubernetes --dry_run | kubectl apply --server-side -f -"
    )
