"""How long ranks wait for each other, and how a lost one is told."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from swift_r1.training.distributed import join_ranks, lost_peer, peer_fault


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
    said = RuntimeError("[/src/gloo/transport/tcp/pair.cc:537] Read error [::1]:42: Connection reset by peer. This")
    assert lost_peer(said) and peer_fault(said) == "Read error [::1]:42: Connection reset by peer"
    assert lost_peer(RuntimeError("[x.cc:1] Timed out waiting 20000ms for recv operation to complete"))
    assert not lost_peer(RuntimeError("size mismatch")) and not lost_peer(ValueError("reset by peer"))
