"""What a launch does when what dies. Its processes are real and its agents too; servers and trainers are stubs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import tempfile
import termios
from pathlib import Path

import psutil
import pytest

from swift_r1.errors import EXIT_RANK_KILLED
from tests.conftest import until, wait_until_gone

ONE = {"train": {}, "rollout": {"replicas": 2}}
TWO_NODES = {"train": {"nodes": 2, "processes": 2}, "rollout": {"hosts": ["local-2"]}}


def port_of(server):
    return server["words"][server["words"].index("--port") + 1]


def test_servers_then_training_then_nothing(launch):
    one = launch(
        ONE | {"judge": {"cpus": 1}},
        judge={"model": "j"},
        environ={"SOME": "thing"},
        streams={"stderr": subprocess.STDOUT},  # it starts cold
        rlhf={"reward_funcs": ["digits", "judge"]},
    )
    servers = one.started("rollout", 3)
    [trainer] = one.started("rlhf")
    flags = trainer["words"]
    ports = {port_of(server) for server in servers}
    assert len(ports) == 3
    assert {url.rpartition(":")[2] for url in flags if url.startswith("http://")} < ports
    assert '"api_key_env": "SWIFT_API_KEY"' in flags[flags.index("--judge") + 1]
    assert len({server["SWIFT_API_KEY"] for server in [*servers, trainer]}) == 1
    assert (
        sorted(len(server["cpus"]) == 1 for server in servers) == [False, False, True]
        or os.cpu_count() == 1
    )
    assert trainer["SOME"] == "thing"
    until(lambda: one.said.count("serves") == 3)
    assert trainer["SWIFT_API_KEY"] not in one.said + " ".join(
        psutil.Process(trainer["pid"]).cmdline()
    )
    one.end(0)
    assert one.wait() == 0
    [folder] = (one.folder / "out").iterdir()
    assert "rlhf is there" in one.said
    assert "rollout is there" in (folder / "launch" / "rollout-1.log").read_text()


def test_a_killed_replica_comes_back_where_it_was(launch):
    one = launch(ONE)
    before = one.started("rollout", 2)
    until(lambda: one.said.count("serves") == 2)
    os.kill(before[0]["pid"], signal.SIGKILL)
    wait_until_gone(
        [psutil.Process(before[0]["child"])] if psutil.pid_exists(before[0]["child"]) else []
    )
    until(lambda: one.said.count("serves") == 3)
    after = one.started("rollout", 2)
    assert sorted(one["words"] for one in after) == sorted(one["words"] for one in before)
    assert len(one.started("rlhf")) == 1


@pytest.mark.long
def test_a_server_that_ends_again_and_again_is_given_up_and_the_last_one_ends_the_launch(
    launch, tmp_path
):
    one = launch(ONE, "--max_restarts", "1")
    servers, [trainer] = one.started("rollout", 2), one.started("rlhf")
    until(lambda: one.said.count("serves") == 2)
    (tmp_path / "refuse").write_text("swift rollout: no memory left\n")
    os.kill(servers[0]["pid"], signal.SIGKILL)
    until(
        lambda: (
            "ended with 2: given up after 2 ends in a row: swift rollout: no memory left"
            in one.said
        )
    )
    [file] = tmp_path.glob("out/*/launch/servers.txt")
    [url] = until(lambda: (lines := file.read_text().split()) and len(lines) == 1 and lines)
    assert url.endswith(f":{port_of(servers[1])}")
    assert one.started("rlhf") == [trainer]
    os.kill(servers[1]["pid"], signal.SIGKILL)
    assert one.wait() == 2
    assert one.said.count("given up") == 3  # the last one at once, and at the end
    assert "; training ends after its step, and saves" in one.said
    assert "saves" in (file.parent / "train-0.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("command", ["rollout", "rlhf"])
def test_a_port_that_was_taken_meanwhile(launch, tmp_path, command):
    (tmp_path / f"taken-{command}").touch()
    one = launch(ONE)
    servers, [trainer] = one.started("rollout", 2), one.started("rlhf")
    until(lambda: one.said.count("serves") == 2)
    assert "ended with 4" in one.said
    [file] = tmp_path.glob("out/*/launch/servers.txt")
    ports = {url.rpartition(":")[2] for url in file.read_text().split()}
    assert ports == {port_of(server) for server in servers}
    assert ("--resume_from_checkpoint" in trainer["words"]) is (command == "rlhf")


@pytest.mark.long
@pytest.mark.parametrize("role", ["judge", "teacher"])
def test_training_is_told_where_a_judge_or_teacher_is_now(launch, role):
    flags = {"reward_funcs": ["digits", "judge"]} if role == "judge" else {}
    one = launch(
        {"train": {"hosts": ["local-0"]}, role: {"hosts": ["local-1", "local-2"]}},
        local={"nodes": 3},
        rlhf=flags,
        **{role: {"model": "other"}},
    )
    [server], [trainer] = one.started("rollout"), one.started("rlhf")
    assert f":{port_of(server)}" in " ".join(trainer["words"])
    one.agent(server).children()[0].kill()
    [again], [after] = one.started("rollout", after=[server]), one.started("rlhf", after=[trainer])
    assert f":{port_of(again)}" in " ".join(after["words"])
    assert after["words"][-2:] == ["--resume_from_checkpoint", "last"]


@pytest.mark.long
def test_a_judge_that_does_not_serve(launch, tmp_path):
    (tmp_path / "late").touch()
    flags = {"reward_funcs": ["digits", "judge"], "vllm_server_timeout": 2}
    one = launch({"train": {}, "judge": {}, "rollout": {}}, judge={"model": "j"}, rlhf=flags)
    assert one.wait() == 5
    assert (
        "judge-0 on local did not serve within 2 s (--vllm_server_timeout): rollout is there"
        in one.said
    )
    assert not list(tmp_path.glob("rlhf-*"))


@pytest.mark.long
def test_training_whose_servers_were_lost_begins_again(launch):
    one = launch(ONE, "--max_restarts", "1")
    one.started("rlhf")
    until(lambda: one.said.count("serves") == 2)
    one.end(3)
    assert one.wait() == 5
    assert "its servers were lost: training resumes from its last checkpoint" in one.said
    assert len(list(one.folder.glob("rlhf-*.json"))) == 2


@pytest.mark.long
@pytest.mark.parametrize("code", [2, 3, 5])
def test_what_would_fail_again_is_not_tried_again(launch, code):
    one = launch({"train": {}})
    one.started("rlhf")
    one.end(code)
    assert one.wait() == code
    assert len(list(one.folder.glob("rlhf-*.json"))) == 1


def test_killed_training_goes_on_from_its_checkpoint_and_not_for_ever(launch):
    one = launch({"train": {}}, "--max_restarts", "1")
    [trainer] = one.started("rlhf")
    assert "--resume_from_checkpoint" not in trainer["words"]
    os.kill(trainer["pid"], signal.SIGKILL)
    [again] = one.started("rlhf", after=[trainer])
    assert again["words"] == [*trainer["words"], "--resume_from_checkpoint", "last"]
    os.kill(again["pid"], signal.SIGKILL)
    assert one.wait() == 5
    assert "restarted 1 times (--max_restarts)" in one.said


@pytest.mark.long
def test_a_server_that_does_not_start_ends_the_launch(launch, tmp_path):
    (tmp_path / "refuse").write_text("swift rollout: no such model\n")
    one = launch(ONE)
    assert one.wait() == 2
    assert "ended with 2 before it was ready: swift rollout: no such model" in one.said


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_signal_reaches_the_trainer_first(launch, number):
    one = launch(ONE)
    one.started("rollout", 2)
    one.started("rlhf")
    one.process.send_signal(number)
    assert one.wait() == 128 + number
    assert f"train-0 on local ended with {128 + number}" in one.said
    [log] = one.folder.glob("out/*/launch/train-0.log")
    assert "saves" in log.read_text()


@pytest.mark.long
def test_a_terminal_that_is_closed_is_a_signal(launch, tmp_path):
    own, other = pty.openpty()

    def in_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        fcntl.ioctl(other, termios.TIOCSCTTY, 0)

    one = launch(ONE, streams={"stdout": other, "preexec_fn": in_terminal})
    os.close(other)
    os.set_blocking(own, False)

    def trains() -> bool:
        with contextlib.suppress(BlockingIOError):  # else it would wait for its output to be read
            os.read(own, 1 << 16)
        return any(tmp_path.glob("rlhf-*.json"))

    until(trains)
    one.below()
    os.close(own)
    assert one.wait() == 143
    [log] = tmp_path.glob("out/*/launch/train-0.log")
    assert "saves" in log.read_text()


@pytest.mark.long
def test_nohup_is_heeded(launch):
    one = launch(ONE, streams={"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)})
    one.started("rlhf")
    one.process.send_signal(signal.SIGHUP)
    one.end(0)
    assert one.wait() == 0
    assert "saves" not in one.said


@pytest.mark.long
def test_a_second_signal_ends_at_once(launch):
    one = launch(TWO_NODES, local={"nodes": 3})
    trainers = one.started("rlhf", 2)
    for trainer in trainers:
        os.kill(trainer["pid"], signal.SIGSTOP)
    one.process.send_signal(signal.SIGINT)
    until(lambda: "once more ends everything at once" in one.said)
    left = Path(tempfile.mkdtemp(prefix="swift-r1-weights-", dir="/dev/shm"))  # as of a server
    one.process.send_signal(signal.SIGINT)
    assert one.wait(20) == 130
    assert not left.exists()


@pytest.mark.long
def test_a_killed_rank_is_named_as_such(launch):
    """The trainer's own launcher has a code for it that nobody else is told."""
    one = launch({"train": {"processes": 2}}, "--max_restarts", "0")
    one.started("rlhf")
    one.end(EXIT_RANK_KILLED)
    assert one.wait() == 5
    assert "train-0 on local has ended, since a signal killed one of its ranks" in one.said


@pytest.mark.parametrize(
    "who",
    [
        "driver",
        pytest.param("agent", marks=pytest.mark.long),
        pytest.param("the agent's first process", marks=pytest.mark.long),
        pytest.param("the agent's process group", marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_behind(launch, who):
    one = launch(
        TWO_NODES | {"rollout": {"replicas": 2}}, "--max_restarts", "0", local={"nodes": 2}
    )
    one.started("rollout", 2)
    trainers = one.started("rlhf", 2)
    below = one.below()
    assert len(one.agents()) == 2 and len(below) >= 12
    if who == "driver":
        one.process.kill()
        one.process.wait(10)
        wait_until_gone(below, 40)
        assert {path.name for path in one.folder.glob("saved-*")} == {"saved-0", "saved-1"}
        return
    agent = one.agent(next(one for one in trainers if one["NODE_RANK"] == "0"))
    [inner] = agent.children()
    own = [inner, *inner.children(recursive=True)]
    if who.endswith("group"):  # as Ray does with what its workers have started
        os.killpg(os.getpgid(agent.pid), signal.SIGKILL)
    else:
        (inner if who == "agent" else agent).kill()
    wait_until_gone(own, 40)
    assert one.wait() == 5
    assert "local-0 is gone" in one.said


@pytest.mark.long
def test_ranks_whose_launcher_is_killed_save_before_training_begins_again(launch, tmp_path):
    (tmp_path / "ranks").touch()
    one = launch({"train": {}})
    [trainer] = one.started("rlhf")
    [rank] = [each for each in one.below() if each.cmdline()[-1] == "rank"]
    os.kill(trainer["pid"], signal.SIGKILL)
    until((tmp_path / "rank-saves-0").exists)
    until(lambda: not psutil.pid_exists(trainer["pid"]))  # its agent has seen it
    (tmp_path / "disk").touch()
    wait_until_gone([rank])
    assert (tmp_path / "rank-saved-0").exists()
    one.started("rlhf", after=[trainer])


@pytest.mark.long
@pytest.mark.parametrize(
    "nodes", [2, 3], ids=["the agent is reached again", "another node takes its place"]
)
def test_a_lost_node_that_trained(launch, nodes):
    one = launch(TWO_NODES | {"rollout": {}}, local={"nodes": nodes})
    before = one.started("rlhf", 2)
    assert {trainer["NODE_RANK"] for trainer in before} == {"0", "1"}
    one.started("rollout")
    one.agent(before[0]).children()[0].kill()
    after = one.started("rlhf", 2, after=before)
    assert {trainer["NNODES"] for trainer in after} == {"2"}
    assert all("last" in trainer["words"] for trainer in after)
    for node in (0, 1):
        one.end(0, node)
    assert one.wait() == 0


def test_more_than_there_is_is_said(launch):
    one = launch({"train": {"gpus": 4}, "rollout": {"replicas": 3, "gpus": 2}}, local={"gpus": 8})
    assert one.wait() == 2
    assert (
        "roles: rollout needs 3 replicas with 2 GPUs each, and there is room for 2; nodes, with what is free: "
        "local 0 of 8 GPUs" in one.said
    )
    assert list((one.folder / "out").iterdir()) == []  # else it would be the newest run


@pytest.mark.long
def test_a_warm_start_comes_first_and_is_done_once(launch, tmp_path):
    """Killed in its part, it goes on there; once it has ended, the next launch begins behind it."""

    def started(command: str) -> list[list[str]]:
        found = sorted(tmp_path.glob(f"{command}-*.json"), key=lambda path: path.stat().st_mtime)
        return [json.loads(path.read_text())["words"] for path in found]

    parts = {"model": None, "sft": {"model": "base", "dataset": "rows.jsonl"}}
    roles = {"train": {}, "rollout": {}}
    one = launch(roles, **parts)
    [teacher] = one.started("sft")
    assert "--resume_from_checkpoint" not in teacher["words"] and not started("rollout")
    os.kill(teacher["pid"], signal.SIGKILL)
    [again] = one.started("sft", after=[teacher])
    assert again["words"] == [*teacher["words"], "--resume_from_checkpoint", "last"]
    one.end(0)
    assert one.wait() == 0, one.said
    [folder] = tmp_path.glob("out/*")
    kept = f"out/{folder.name}/sft/last"
    assert f"sft has ended; rlhf begins with its last checkpoint, {kept}" in one.said
    [server], [trainer] = started("rollout"), started("rlhf")
    for words in (server, trainer):
        assert words[words.index("--model") + 1] == kept

    (folder / "sft").mkdir()
    (folder / "sft" / "args.json").write_text("{}")
    (folder / "sft" / "summary.json").write_text('{"exit_code": 0}')
    one = launch(roles, "--resume_from_checkpoint", "last", **parts)
    assert one.wait() == 0, one.said
    assert len(started("sft")) == 2 and len(started("rlhf")) == 2
    assert "--resume_from_checkpoint" in started("rlhf")[1]
    assert len(list(tmp_path.glob("out/*"))) == 1
