"""The ranks of one training run and what they tell each other: flat tensors over a gloo group, no pickle."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


@dataclass(frozen=True)
class Ranks:
    """This process's place among the training processes.

    `group` is a gloo group for control messages (also beside nccl), None where there is one process.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, tensors: Sequence[Tensor] | None) -> list[Tensor]:
        """Rank 0's 1-D int64 and float32 tensors, on every rank (CPU).

        Rank 0 passes them, the others pass None.
        """
        if self.group is None:
            assert tensors is not None
            return list(tensors)
        count = torch.tensor([len(tensors) if tensors is not None else 0])
        dist.broadcast(count, 0, group=self.group)
        header = torch.zeros(int(count), 2, dtype=torch.long)
        if tensors is not None:
            header = torch.tensor([[t.numel(), t.is_floating_point()] for t in tensors], dtype=torch.long)
        dist.broadcast(header, 0, group=self.group)
        received = []
        for number, (size, floating) in enumerate(header.tolist()):
            dtype = torch.float32 if floating else torch.long
            tensor = torch.empty(size, dtype=dtype) if tensors is None else tensors[number].to(dtype).contiguous()
            dist.broadcast(tensor, 0, group=self.group)
            received.append(tensor)
        return received

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """Every rank's 1-D tensor (of any length, one dtype) on rank 0, None elsewhere."""
        if self.group is None:
            return [tensor]
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([tensor.numel()]), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=tensor.dtype)
        padded[: tensor.numel()] = tensor
        received = [torch.zeros_like(padded) for _ in sizes] if self.is_main else None
        dist.gather(padded, received, 0, group=self.group)
        if received is None:
            return None
        return [part[: int(size)] for part, size in zip(received, sizes, strict=True)]

    def sum(self, tensor: Tensor) -> Tensor:
        """Elementwise sum over ranks, on every rank (CPU, same dtype)."""
        total = tensor.detach().cpu().clone()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total

    def max(self, value: float) -> float:
        """The largest of all ranks' values, on every rank."""
        largest = torch.tensor([float(value)])
        if self.group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.item()

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(timeout_s: float, distributed: bool) -> Ranks:
    """Joins the process group that the launcher's environment describes (RANK, WORLD_SIZE, LOCAL_RANK, ...).

    Args:
        timeout_s: how long any rank waits for another before it gives up (`--ddp_timeout`).
        distributed: join a group even if this is its only process (DeepSpeed needs one).
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if not distributed:
        return Ranks(0, 1, device, None)
    timeout = timedelta(seconds=timeout_s)
    # DeepSpeed makes groups of its own without a time limit of theirs: they get torch's.
    distributed_c10d.default_pg_timeout = timeout
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(dist.get_rank(), dist.get_world_size(), device, group)


_OF_A_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Broken pipe",
    "gloo/transport",
)


def peer_fault(error: BaseException) -> str:
    """What the collective says, without gloo's source file and good wishes."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error).splitlines()[0]).partition(". ")[0]


def lost_peer(error: BaseException) -> bool:
    """Whether `error` is what a collective raises when another rank is gone or does not come.

    gloo raises plain RuntimeErrors, which only their text tells apart.
    """
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    return type(error) is RuntimeError and any(words in str(error) for words in _OF_A_PEER)
