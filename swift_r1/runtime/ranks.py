"""The ranks of a training run: which are alive, and what they exchange, flat tensors over a gloo group (no pickle)."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from swift_r1.errors import UsageError
from swift_r1.runtime.hardware import hardware
from swift_r1.runtime.sequence_parallel import SequenceGroup, join_sequence_group

if TYPE_CHECKING:
    # `dist.Store`, which torch does not export to mypy
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

_NEVER = timedelta(days=365)
_EVERY_S = 5.0  # seconds between two heartbeats
_DTYPES = (torch.int64, torch.float32, torch.uint8)  # that are broadcast


class LostRank(Exception):
    """A rank was silent for `--ddp_timeout` seconds while another waited for it."""


class Presence:
    """Tells a rank that works for long from one that hangs (`--ddp_timeout`), by heartbeats through the group's store.

    A rank that waits in a collective sends one every few seconds, and so does one that is `busy` with what the others
    wait for: rewards, a save, the rollout server. A waiting rank gives up on one that has been silent for `timeout_s`.
    A stopped process is silent; one that never finishes is ended by its own watchdog.

    Args:
        store: shared by the ranks; nothing else uses these keys.
        heard: called every few seconds while this rank waits and has heard from all others.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        heard: Callable[[str], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._heard = heard
        self._others = [other for other in range(world_size) if other != rank]
        self._every_s = min(_EVERY_S, timeout_s / 4)
        self._beat()

    def wait(self, work: dist.Work) -> None:
        """Waits until the collective is done. Raises LostRank: a rank that it needs is silent; RuntimeError: the
        collective's, about a broken connection."""
        if not self._others:
            work.wait()
            return
        if self._done(work):
            return
        answered = time.monotonic()
        since = dict.fromkeys(self._others, answered)
        said: dict[int, bytes] = {}

        def listen() -> None:
            """Sends a heartbeat, and notes whose have come since the last time."""
            nonlocal answered
            self._beat()
            words = self._store.multi_get([str(other) for other in self._others])
            answered = time.monotonic()
            for other, word in zip(self._others, words, strict=True):
                if said.get(other) != word:
                    said[other], since[other] = word, answered

        with self._every_few_seconds(listen):
            while not self._done(work):
                now = time.monotonic()
                silent = min(self._others, key=since.__getitem__)
                if now - since[silent] > self._timeout_s:
                    what = f"rank {silent} has said nothing"
                    if now - answered > self._timeout_s:
                        what = "the host of the ranks' store (rank 0's launcher) has not answered"
                    raise LostRank(f"{what} for {self._timeout_s:g} s (--ddp_timeout)")
                if now - since[silent] < 3 * self._every_s:
                    self._heard("waiting for the other ranks")

    def busy(self) -> AbstractContextManager[None]:
        """Sends heartbeats from a thread while open."""
        return self._every_few_seconds(self._beat)

    @contextmanager
    def _every_few_seconds(self, work: Callable[[], None]) -> Iterator[None]:
        """Calls `work` in a thread: a store whose host was stopped never answers."""
        ended = threading.Event()

        def repeat() -> None:
            try:
                work()
                while not ended.wait(self._every_s):
                    work()
            except RuntimeError as error:  # the next collective raises too, where it can be handled
                logger.warning("the other ranks cannot be told that this one is alive: %s", error)

        thread = threading.Thread(target=repeat, name="presence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(self._every_s)

    def _beat(self) -> None:
        self._store.add(str(self._rank), 1)

    def _done(self, work: dist.Work) -> bool:
        """Says whether it is done, after waiting a moment."""
        try:
            work.wait(timedelta(seconds=self._every_s))
        except RuntimeError:
            # gloo's timeout is a plain RuntimeError.
            if work.is_completed():
                raise
            return False
        return True


@dataclass(frozen=True)
class Ranks:
    """This process's place among the training processes.

    `group` is a gloo group for control messages (also beside nccl), None where there is one process. It has no time
    limit of its own: `presence` knows which ranks are alive. With `--sequence_parallel_size` the ranks of a `sequence`
    group have the same completions: they are one data-parallel rank.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None
    presence: Presence | None = None
    sequence: SequenceGroup | None = None

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def data_parallel_size(self) -> int:
        """Returns how many parts the completions of an optimizer step are split into."""
        return self.world_size // (self.sequence.size if self.sequence is not None else 1)

    @property
    def data_parallel_rank(self) -> int:
        """Returns which of these parts this rank has."""
        return self.rank // (self.sequence.size if self.sequence is not None else 1)

    def busy(self) -> AbstractContextManager[None]:
        """Shows the ranks that wait that this one is alive while it works for long. The work needs a deadline of its
        own, or `--step_timeout`."""
        return nullcontext() if self.presence is None else self.presence.busy()

    def takes(self, number: int) -> bool:
        """Says whether it is this rank's turn, where the ranks take turns."""
        return number % self.world_size == self.rank

    def broadcast(self, tensors: Sequence[Tensor] | None) -> list[Tensor]:
        """Returns rank 0's 1-D int64, float32 and uint8 tensors, on every rank (CPU).

        Rank 0 passes them, the others pass None. Raises ValueError on another dtype.
        """
        if self.group is None:
            assert tensors is not None
            return list(tensors)
        kinds = [[one.numel(), _DTYPES.index(one.dtype)] for one in tensors or ()]
        count = torch.tensor([len(kinds)])
        self._wait(dist.broadcast, count, 0)
        header = (
            torch.zeros(int(count), 2, dtype=torch.long) if tensors is None else torch.tensor(kinds)
        )
        self._wait(dist.broadcast, header, 0)
        received = []
        for number, (size, kind) in enumerate(header.tolist()):
            tensor = (
                torch.empty(size, dtype=_DTYPES[kind])
                if tensors is None
                else tensors[number].contiguous()
            )
            self._wait(dist.broadcast, tensor, 0)
            received.append(tensor)
        return received

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """Returns every rank's 1-D tensor (of any length, one dtype) on rank 0, None elsewhere."""
        if self.group is None:
            return [tensor]
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.world_size)]
        self._wait(dist.all_gather, sizes, torch.tensor([tensor.numel()]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=tensor.dtype)
        padded[: tensor.numel()] = tensor
        received = [torch.zeros_like(padded) for _ in sizes] if self.is_rank0 else None
        self._wait(dist.gather, padded, received, 0)
        if received is None:
            return None
        return [part[: int(size)] for part, size in zip(received, sizes, strict=True)]

    def gather_data(self, tensor: Tensor) -> list[Tensor] | None:
        """Gathers tensors of the completions that a rank has, once for each data-parallel rank."""
        everyones = self.gather(tensor if self._speaks else tensor[:0])
        return (
            None if everyones is None else everyones[:: self.world_size // self.data_parallel_size]
        )

    def sum_data(self, tensor: Tensor) -> Tensor:
        """Returns the elementwise sum over data-parallel ranks, on every rank (CPU, same dtype)."""
        total = tensor.detach().cpu().clone()
        if not self._speaks:
            total.zero_()
        self._wait(dist.all_reduce, total)
        return total

    @property
    def _speaks(self) -> bool:
        """Says whether this rank stands for its data-parallel rank."""
        return self.sequence is None or self.sequence.rank == 0

    def max(self, value: float) -> float:
        """Returns the largest of all ranks' values, on every rank."""
        largest = torch.tensor([float(value)])
        self._wait(dist.all_reduce, largest, dist.ReduceOp.MAX)
        return largest.item()

    def barrier(self) -> None:
        """Waits for all ranks, before a collective of another group, which waits for no rank longer than
        `--ddp_timeout`."""
        self._wait(dist.barrier)

    def _wait(self, collective: Callable[..., dist.Work | None], *arguments: Any) -> None:
        """Does it, where there are several processes; raises as `Presence.wait`."""
        if self.group is not None:
            work = collective(*arguments, group=self.group, async_op=True)
            assert work is not None and self.presence is not None
            self.presence.wait(work)

    def use_device(self) -> None:
        """Notes that this process holds its GPU, and so does what is forked from it."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(
    timeout_s: float,
    distributed: bool,
    heard: Callable[[str], None] = lambda _doing: None,
    *,
    backend: str | None = None,
    sequence_parallel_size: int = 1,
) -> Ranks:
    """Joins the process group that the launcher's environment describes (RANK, WORLD_SIZE, LOCAL_RANK, ...). Nothing is
    on the GPU yet, so that processes may be forked after it; `Ranks.use_device` comes then.

    Args:
        timeout_s: how long any rank waits for a silent one (`--ddp_timeout`).
        distributed: join a group even if this is its only process (DeepSpeed needs one).
        heard: see `Presence`.
        backend: what exchanges gradients and weights, `nccl` or `gloo`; None: nccl between GPUs, else gloo.
        sequence_parallel_size: divides the number of ranks.

    Raises UsageError: nccl without a GPU, a GPU that torch cannot use, or fewer GPUs than processes.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            raise UsageError(
                f"process {local_rank} of this machine has no GPU: torch sees {gpus}, so NPROC_PER_NODE may be {gpus} "
                "at most (or CUDA_VISIBLE_DEVICES hides some)"
            )
        device = torch.device("cuda", local_rank)
    elif names := hardware(os.environ)["gpus"]:
        raise UsageError(
            f"this machine has a GPU ({names[0]}) that torch {torch.__version__} cannot use: it is built without CUDA, "
            "or for a newer driver (nvidia-smi). --use_cpu true trains on the CPU"
        )
    else:
        device = torch.device("cpu")
    if backend == "nccl" and device.type == "cpu":
        raise UsageError(
            "--ddp_backend nccl needs GPUs, and torch finds none: leave it out, or --ddp_backend gloo"
        )
    if not distributed and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(0, 1, device, None)
    timeout = timedelta(seconds=timeout_s)
    # DeepSpeed makes groups without a time limit: they get torch's default.
    distributed_c10d.default_pg_timeout = timeout
    store: Store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not exported to mypy
    rank = 0
    world_size = 1
    if "MASTER_ADDR" in os.environ:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    # A connection of its own: heartbeats of a thread must not wait for other questions to the store.
    own = dist.PrefixStore("presence", store.clone())  # type: ignore[attr-defined]  # as above
    presence = Presence(own, rank, world_size, timeout_s, heard)
    # Making the group has a time limit; collectives in it have none, since `presence` decides.
    group = dist.new_group(backend="gloo", timeout=timeout)
    distributed_c10d._set_pg_timeout(_NEVER, group)
    sequence = (
        join_sequence_group(sequence_parallel_size, timeout) if sequence_parallel_size > 1 else None
    )
    return Ranks(rank, world_size, device, group, presence, sequence)


_LOST_PEER = re.compile(
    "Connection closed by peer|Connection reset by peer|Timed out waiting|Broken pipe|gloo/transport"
)


def peer_fault(error: BaseException) -> str:
    """Returns what the collective says, without gloo's source file and advice."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error).splitlines()[0]).partition(". ")[0]


def lost_peer(error: BaseException) -> bool:
    """Says whether `error` is what a collective raises when another rank is gone or does not come.

    gloo raises plain RuntimeErrors, which only their text tells apart.
    """
    if isinstance(error, LostRank | dist.DistError):
        return True
    return type(error) is RuntimeError and _LOST_PEER.search(str(error)) is not None
