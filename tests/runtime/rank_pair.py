"""Two processes that are ranks of one run, and play a scene: `rank_pair.py SCENE RANK PORT TIMEOUT`.

A rank says `ready` once it has joined, and how the scene ended for it. Run by test_distributed.py.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from swift_r1.runtime.ranks import LostRank, Presence, join_ranks, lost_peer


def main(scene: str, rank: int, port: str, timeout_s: float) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    waited = []
    ranks = join_ranks(120, distributed=True)
    # The short time-out is for the scene alone: on a busy machine the two do not start together.
    store = dist.PrefixStore("scene", ranks.presence._store)
    presence = Presence(store, rank, 2, timeout_s, waited.append)
    ranks.barrier()
    ranks = replace(ranks, presence=presence)
    print("ready", flush=True)
    if rank == 0:
        SCENES[scene](ranks, timeout_s)
    try:
        total = int(ranks.sum_data(torch.ones(1))[0])
    except (RuntimeError, LostRank) as error:
        assert lost_peer(error), error
        print(f"lost: {error}", flush=True)
        os._exit(0)
    print(f"sum {total}, heard {len(waited) > 0}", flush=True)
    os._exit(0)


def rewards(ranks, timeout_s):
    """Takes three time-outs, and is busy all the while."""
    with ranks.busy():
        said = ranks.presence._store
        begun = time.monotonic()
        first = said.add("0", 0)
        while time.monotonic() < begun + 3 * timeout_s or said.add("0", 0) < first + 8:
            time.sleep(0.05)


def stuck(ranks, timeout_s):
    """Never comes, and says nothing."""
    sys.stdin.read()


def stopped(ranks, timeout_s):
    """Is busy until it is stopped."""
    with ranks.busy():
        sys.stdin.read()


def killed(ranks, timeout_s):
    """Dies once the other one has joined too."""
    sys.stdin.readline()
    os._exit(1)


SCENES = {scene.__name__: scene for scene in (rewards, stuck, stopped, killed)}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
