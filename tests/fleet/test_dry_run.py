"""`swift launch --dry_run`: its commands are what a shell can run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.server import RolloutArguments
from tests.conftest import REPO


def swift(folder, *words, **environ):
    return subprocess.run(
        [sys.executable, "-m", "swift_r1", "launch", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPO)} | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_commands_with_their_nodes_and_variables(tmp_path, write_run):
    write_run(
        {
            "train": {"nodes": 2, "gpus": 2},
            "rollout": {"replicas": 2, "gpus": 1, "hosts": ["gen2", "gen3"]},
        },
        rlhf={"learning_rate": 1.0e-6},
        ssh={
            "hosts": [
                "gen1",
                {"name": "gen2", "address": "10.0.0.2", "gpus": 2},
                {"name": "gen3", "gpus": 1},
                "gen4",
            ],
            "python": "/venv/bin/python",
            "folder": "/shared/my work",
        },
        environ={"NCCL_DEBUG": "WARN"},
    )
    done = swift(
        tmp_path,
        "run.yaml",
        "--on",
        "ssh",
        "--dry-run",
        "--learning_rate",
        "2e-6",
        SWIFT_API_KEY="secret",
    )
    assert done.returncode == 0, done.stderr
    assert "secret" not in done.stdout
    lines = done.stdout.splitlines()
    commands = {
        lines[n][2:]: shlex.split(lines[n + 1])
        for n in range(len(lines) - 1)
        if lines[n].startswith("# ")
    }
    server = commands["rollout-1 on gen3"]
    assert server[:2] == ["cd", "/shared/my work"]
    assert {"SWIFT_API_KEY=***", "NCCL_DEBUG=WARN", "CUDA_VISIBLE_DEVICES=0"} < set(server)
    flags = parse_arguments(RolloutArguments, server[server.index("rollout") + 1 :], {})
    assert (flags.host, flags.model) == ("gen3", "m")
    for number, node in ((0, "gen1"), (1, "gen4")):
        words = commands[f"train-{number} on {node}"]
        variables = dict(word.split("=", 1) for word in words[3 : words.index("/venv/bin/python")])
        assert variables["NODE_RANK"] == str(number) and variables["MASTER_ADDR"] == "gen1"
        assert (variables["NNODES"], variables["NPROC_PER_NODE"]) == ("2", "2")
        args = parse_arguments(RlhfArguments, words[words.index("rlhf") + 1 :], variables)
        assert args.learning_rate == 2e-6 and str(args.vllm_server_file).endswith(
            "/out/launch/servers.txt"
        )
    assert "http://10.0.0.2:8000 http://gen3:8001 > out/launch/servers.txt" in done.stdout.replace(
        "'", ""
    )
    assert sum(line.startswith("# agent on gen") for line in lines) == 4
    assert any("BatchMode=yes" in line and "ControlMaster=no" in line for line in lines)


def test_nodes_that_ray_has_not_chosen_yet(tmp_path, write_run):
    """No cluster is asked, and Ray need not be installed."""
    write_run(
        {"rollout": {"replicas": 2, "gpus": 1}, "train": {"gpus": 1}},
        ray={"address": "127.0.0.1:1"},
    )
    done = swift(tmp_path, "run.yaml", "--on", "ray", "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"# rollout-0 on bundle-0", "# rollout-1 on bundle-1", "# train-0 on bundle-2"} < set(
        lines
    )
    assert "http://bundle-0:8000 http://bundle-1:8001" in done.stdout


def test_bad_words(tmp_path, write_run):
    write_run({"train": {}})
    done = swift(
        tmp_path,
        "run.yaml",
        "--on",
        "shh",
        "--max_restart",
        "2",
        "--learning_rat",
        "1e-6",
        "--seed",
        "x",
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "swift launch: unknown flag --learning_rat: did you mean --learning_rate?",
        "swift launch: --seed must be a whole number, not 'x'",
        "swift launch: --on must be one of local, ssh, slurm, ray, kubernetes, not 'shh'",
        "swift launch: unknown flag --max_restart: did you mean --max_restarts?",
    ]


def test_hosts_that_cannot_be(tmp_path, write_run):
    write_run({"train": {}}, ssh={"hosts": [{"nam": "a"}, "-oProxyCommand=x", "b", "b"]})
    done = swift(tmp_path, "run.yaml", "--on", "ssh", "--dry_run")
    assert done.returncode == 2
    assert [line.partition("ssh: ")[2] for line in done.stderr.splitlines()] == [
        "hosts: there is no key nam: did you mean name?",
        "hosts: '-oProxyCommand=x' is no name of a host",
        "hosts: 'b' is there twice",
    ]


def test_a_faulty_file_is_said_at_once(tmp_path):
    (tmp_path / "run.yaml").write_text("rlhf: [\n")
    done = swift(tmp_path, "run.yaml")
    assert done.returncode == 2 and "run.yaml is not valid YAML" in done.stderr
    assert (
        swift(tmp_path, "none.yaml").stderr
        == "swift launch: none.yaml: No such file or directory\n"
    )
