"""Two hosts train, a third generates, or each has an engine beside its rank: `swift rlhf` as a user starts it on each,
and no address is loopback except that of the engine beside rank 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.conftest import until, wait_until_gone
from tests.e2e.live_run import words_of

TESTS = Path(__file__).resolve().parents[1]
KEY = "not-on-loopback"
PORT = 8765
DDP_TIMEOUT = 20


@pytest.fixture
def server(hosts, tiny_model, tmp_path):
    """`tests/tiny_server.py` on the third host; its URL."""
    config = {"host": hosts[2].address, "api_key": KEY}
    words = [
        sys.executable,
        str(TESTS / "tiny_server.py"),
        str(tiny_model),
        str(PORT),
        json.dumps(config),
    ]
    process = hosts[2].start(words, tmp_path, tmp_path / "server.log")
    yield f"http://{hosts[2].address}:{PORT}"
    process.terminate()
    process.wait(30)


@pytest.fixture
def train(hosts, tiny_model, tmp_path):
    """`train(**flags) -> the two processes`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(master=hosts[0].address, **flags):
        own = {
            "dataset": "counting#40",
            "reward_isolation": [],
            "per_device_train_batch_size": 4,
            "max_completion_length": 8,
            "learning_rate": 1e-3,
            "deepspeed": "zero2",
            "ddp_timeout": DDP_TIMEOUT,
            "use_vllm": "true",
        }
        words = words_of(tiny_model, tmp_path / "run", **own | flags)
        for number in range(2):
            started.append(
                hosts[number].start(
                    [sys.executable, "-m", "swift_r1", "rlhf", *words],
                    tmp_path,
                    tmp_path / f"node{number}.log",
                    NNODES="2",
                    NODE_RANK=str(number),
                    NPROC_PER_NODE="1",
                    MASTER_ADDR=hosts[0].address if number else master,
                    MASTER_PORT="29512",
                    SWIFT_API_KEY=KEY,
                )
            )
        return started

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
    for number in range(2):
        print((tmp_path / f"node{number}.log").read_text())


def steps_of(folder: Path) -> list[dict[str, float]]:
    path = next((folder / "run").glob("**/logging.jsonl"), None)
    lines = path.read_text().splitlines() if path else []
    return [row for row in map(json.loads, lines) if "loss" in row]


def rank_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    """The ranks that a launcher has."""
    path = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    pids = path.read_text().split() if path.exists() else []
    found = []
    for pid in pids:
        try:
            if b"swift_r1.cli.rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_hosts_train_and_a_third_generates(train, server, tmp_path):
    processes = train(vllm_server_base_url=server, weight_transport="http", max_steps=3)
    assert [process.wait(500) for process in processes] == [0, 0]
    steps = steps_of(tmp_path)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["grad_norm"] > 0 and row["rollout/logp_diff"] < 0.01 for row in steps)
    assert (tmp_path / "run" / "checkpoint-3" / "model.safetensors").exists()
    assert "GLOO_SOCKET_IFNAME=eth0" in (tmp_path / "node1.log").read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_rank_ends_both_hosts_and_the_run_goes_on(train, server, tmp_path, node):
    train = partial(train, vllm_server_base_url=server, weight_transport="http")
    processes = train(max_steps=100_000, save_steps=1, save_total_limit=1)
    deadline = time.monotonic() + 400
    while not list((tmp_path / "run").glob("checkpoint-*")):
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.1)
    [rank] = rank_of(processes[node])
    os.kill(rank, signal.SIGKILL)
    killed = time.monotonic()
    while any(rank_of(process) for process in processes):
        assert time.monotonic() - killed < DDP_TIMEOUT, "ranks did not end in time"
        time.sleep(0.05)
    assert [process.wait(60) for process in processes] == [5, 5]
    line = f"swift rlhf: rank {node} on node {node} was the first to end: killed by SIGKILL (likely out of memory)"
    for number in range(2):
        *_, last, helps = (tmp_path / f"node{number}.log").read_text().splitlines()
        assert last == line
        assert helps.startswith("swift rlhf: the largest part is ")

    [saved] = [int(path.name.partition("-")[2]) for path in (tmp_path / "run").glob("checkpoint-*")]
    again = {"resume_from_checkpoint": "last", "resume_force": "true", "max_steps": saved + 1}
    processes = train(save_steps=1, save_total_limit=1, **again)[2:]
    assert [process.wait(400) for process in processes] == [0, 0]
    assert [row["step"] for row in steps_of(tmp_path)] == list(range(1, saved + 2))


BESIDE = {
    "vllm_mode": "colocate",
    "torch_dtype": "float32",
    "vllm_engine_kwargs": json.dumps({"kv_cache_memory_bytes": 64 << 20}),
    "vllm_server_timeout": 400,
}


def engines_of(hosts, number):
    """The rollout servers on a host, and what they have started."""
    listed = subprocess.run(
        ["ip", "netns", "pids", hosts[number].namespace], capture_output=True, text=True, check=True
    )
    processes = [psutil.Process(int(pid)) for pid in listed.stdout.split()]
    servers = [one for one in processes if "swift_r1.serving.server" in " ".join(one.cmdline())]
    return [process for one in servers for process in (one, *one.children(recursive=True))]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_host_has_engines_and_a_killed_rank_ends_those_of_both(train, hosts, tmp_path):
    # As in ms-swift's script for node 0.
    processes = train(
        "127.0.0.1", max_steps=100_000, weight_check_steps=1, add_version="true", **BESIDE
    )

    def trained():
        assert all(process.poll() is None for process in processes)
        return len(steps_of(tmp_path)) >= 3

    until(trained, 600)
    engines = [engines_of(hosts, number) for number in range(2)]
    assert all(engines)
    [folder] = (tmp_path / "run").iterdir()  # which node 0 has named
    args = json.loads((folder / "args-node1.json").read_text())["args"]
    assert [url.rpartition(":")[0] for url in args["vllm_server_base_url"]] == [
        "http://127.0.0.1",
        f"http://{hosts[1].address}",
    ]
    assert all(
        row["rollout/servers"] == 2 and row["rollout/weight_check"] < 0.01
        for row in steps_of(tmp_path)
    )
    assert sorted(log.name for log in folder.glob("engine-*.log")) == [
        "engine-0.log",
        "engine-1.log",
    ]
    [rank] = rank_of(processes[1])
    os.kill(rank, signal.SIGKILL)
    assert [process.wait(60) for process in processes] == [5, 5]
    wait_until_gone([one for engine in engines for one in engine], 30)
