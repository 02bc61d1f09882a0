"""What a launch does when what dies. Its processes are real and its agents too; servers and trainers are stubs."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.conftest import until, wait_until_gone

ONE = {"train": {}, "rollout": {"replicas": 2}}
TWO_NODES = {"train": {"nodes": 2, "processes": 2}, "rollout": {"hosts": ["local-2"]}}


def test_servers_then_training_then_nothing(launch):
    one = launch(
        ONE | {"judge": {"cpus": 1}},
        judge={"model": "j"},
        environ={"SOME": "thing"},
        rlhf={"reward_funcs": ["digits", "judge"]},
    )
    servers = one.started("rollout", 3)
    [trainer] = one.started("rlhf")
    flags = trainer["words"]
    ports = {server["words"][server["words"].index("--port") + 1] for server in servers}
    assert len(ports) == 3
    assert {url.rpartition(":")[2] for url in flags if url.startswith("http://")} < ports
    assert '"api_key_env": "SWIFT_API_KEY"' in flags[flags.index("--judge") + 1]
    assert len({server["SWIFT_API_KEY"] for server in [*servers, trainer]}) == 1
    assert sorted(len(server["cpus"]) == 1 for server in servers) == [False, False, True] or os.cpu_count() == 1
    assert trainer["SOME"] == "thing"
    until(lambda: one.said.count("serves") == 3)
    assert trainer["SWIFT_API_KEY"] not in one.said + " ".join(psutil.Process(trainer["pid"]).cmdline())
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
    wait_until_gone([psutil.Process(before[0]["child"])] if psutil.pid_exists(before[0]["child"]) else [])
    until(lambda: one.said.count("serves") == 3)
    after = one.started("rollout", 2)
    assert sorted(one["words"] for one in after) == sorted(one["words"] for one in before)
    assert len(one.started("rlhf")) == 1


@pytest.mark.parametrize("code", [2, 5, 3])
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


def test_a_server_that_does_not_start_ends_the_launch(launch, tmp_path):
    (tmp_path / "refuse").write_text("swift rollout: no such model\n")
    one = launch(ONE)
    assert one.wait() == 2
    assert "ended with 2 before it was ready: swift rollout: no such model" in one.said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_trainer_first(launch, number):
    one = launch(ONE)
    one.started("rollout", 2)
    [trainer] = one.started("rlhf")
    one.process.send_signal(number)
    assert one.wait() == 128 + number
    assert f"ended with {128 + number}" in one.said or not psutil.pid_exists(trainer["pid"])


def test_a_second_signal_ends_at_once(launch):
    one = launch(TWO_NODES, local={"nodes": 3})
    trainers = one.started("rlhf", 2)
    for trainer in trainers:
        os.kill(trainer["pid"], signal.SIGSTOP)
    one.process.send_signal(signal.SIGINT)
    until(lambda: "once more ends everything at once" in one.said)
    one.process.send_signal(signal.SIGINT)
    assert one.wait(20) == 130


@pytest.mark.parametrize("who", ["driver", "agent", "the agent's first process"])
def test_nothing_is_left_behind(launch, who):
    one = launch(TWO_NODES | {"rollout": {"replicas": 2}}, "--on_node_loss", "stop", local={"nodes": 2})
    one.started("rollout", 2)
    trainers = one.started("rlhf", 2)
    below = one.below()
    assert len(one.agents()) == 2 and len(below) >= 12
    if who == "driver":
        one.process.kill()
        one.process.wait(10)
        wait_until_gone(below, 40)
        return
    agent = one.agent(next(one for one in trainers if one["NODE_RANK"] == "0"))
    [inner] = agent.children()
    own = [inner, *inner.children(recursive=True)]
    (inner if who == "agent" else agent).kill()
    wait_until_gone(own, 40)
    assert one.wait() == 5
    assert "local-0 is gone" in one.said


@pytest.mark.parametrize(("policy", "nodes", "ranks"), [("restart", 3, "2"), ("wait", 2, "2")])
def test_a_lost_node_that_trained(launch, policy, nodes, ranks):
    one = launch(TWO_NODES | {"rollout": {}}, "--on_node_loss", policy, local={"nodes": nodes})
    before = one.started("rlhf", 2)
    assert {trainer["NODE_RANK"] for trainer in before} == {"0", "1"}
    one.started("rollout")
    one.agent(before[0]).children()[0].kill()
    after = one.started("rlhf", 2, after=before)
    assert {trainer["NNODES"] for trainer in after} == {ranks}
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


def test_gpus_are_shared_out(launch):
    one = launch({"train": {"gpus": 2}, "rollout": {"replicas": 2, "gpus": 1}}, local={"gpus": 4})
    servers, [trainer] = one.started("rollout", 2), one.started("rlhf")
    assert trainer["CUDA_VISIBLE_DEVICES"] == "0,1" and trainer["NPROC_PER_NODE"] == "2"
    assert {server["CUDA_VISIBLE_DEVICES"] for server in servers} == {"2", "3"}


def test_two_launches_in_one_folder(launch):
    first = launch({"train": {}}, "--add_version", "false")
    first.started("rlhf")
    second = launch({"train": {}}, "--add_version", "false")
    assert second.process.wait(60) == 2
    assert "another process" in second.said
