"""How long ranks wait for each other, and how a lost one is told."""

import os
import signal
import socket
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from swift_r1.errors import UsageError
from swift_r1.runtime.hardware import hardware
from swift_r1.runtime.ranks import join_ranks, lost_peer, peer_fault
from tests import forks


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU")
def test_a_gpu_that_torch_cannot_use_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on the CPU instead would be silent, and take weeks. `--use_cpu true` hides the GPU."""
    (tmp_path / "information").write_text("Model: \t\t NVIDIA H200\n")
    file = str(tmp_path / "information")
    monkeypatch.setattr(
        "swift_r1.runtime.ranks.hardware", partial(hardware, gpus=file, devices=file)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UsageError, match=r"a GPU \(NVIDIA H200\) that torch .* cannot use"):
        join_ranks(7, distributed=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert join_ranks(7, distributed=False).device.type == "cpu"


def test_each_process_needs_a_gpu_which_it_holds_once_the_workers_are_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", held.append)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        UsageError,
        match=r"process 2 of this machine has no GPU: torch sees 2, so NPROC_PER_NODE may",
    ):
        join_ranks(7, distributed=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    ranks = join_ranks(7, distributed=False)
    assert ranks.device == torch.device("cuda", 1) and held == []
    ranks.use_device()
    assert held == [ranks.device]


def test_groups_that_others_make_wait_as_long_as_ours(monkeypatch):
    """DeepSpeed makes groups of its own and names no time."""
    monkeypatch.setattr(distributed_c10d, "default_pg_timeout", distributed_c10d.default_pg_timeout)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    ranks = join_ranks(7, distributed=True)
    try:
        group = dist.new_group()
        assert distributed_c10d._get_default_timeout("gloo") == timedelta(seconds=7)
        assert group.size() == 1
    finally:
        ranks.close()


def test_what_gloo_says_of_a_lost_rank():
    said = RuntimeError(
        "[/src/gloo/transport/tcp/pair.cc:537] Read error [::1]:42: Connection reset by peer. This"
    )
    assert lost_peer(said) and peer_fault(said) == "Read error [::1]:42: Connection reset by peer"
    assert lost_peer(
        RuntimeError("[x.cc:1] Timed out waiting 20000ms for recv operation to complete")
    )
    assert not lost_peer(RuntimeError("size mismatch")) and not lost_peer(
        ValueError("reset by peer")
    )


@pytest.fixture
def scene(tmp_path):
    """Starts both ranks of a scene; gives their processes once they have joined."""
    started = []

    def play(name: str, timeout_s: float):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [str(Path(__file__).with_name("rank_pair.py")), name]
        started.extend(
            forks.start(
                [*command, str(rank), port, str(timeout_s)], stdin=forks.PIPE, stdout=forks.PIPE
            )
            for rank in range(2)
        )
        for one in started:
            assert one.stdout.readline() == "ready\n"
        return started

    yield play
    for one in started:
        one.kill()
        one.wait(20)


@pytest.mark.long
def test_a_rank_that_scores_for_several_time_outs_is_waited_for(scene):
    for one in scene("rewards", 2.5):
        said = one.stdout.readline()
        assert said.startswith("sum 2, ")
    # rank 1, whose own watchdog must know that it waits for good reason
    assert said == "sum 2, heard True\n"


def test_a_rank_that_does_not_come_and_says_nothing_is_found(scene):
    _, waiting = scene("stuck", 2.0)
    assert waiting.stdout.readline() == "lost: rank 0 has said nothing for 2 s (--ddp_timeout)\n"


def test_a_rank_that_is_stopped_while_it_is_busy_is_found(scene):
    """Rank 0 holds the store here, which then answers nobody."""
    busy, waiting = scene("stopped", 2.0)
    os.kill(busy.pid, signal.SIGSTOP)
    said = waiting.stdout.readline()
    assert said.startswith("lost: ") and said.endswith(" for 2 s (--ddp_timeout)\n")


def test_a_rank_that_died_is_found_at_once(scene):
    dies, waiting = scene("killed", 600)
    dies.stdin.write("\n")
    dies.stdin.flush()
    assert "Connection" in waiting.stdout.readline()
