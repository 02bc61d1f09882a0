"""Data parallelism in plain torch: a whole model on every rank, and gradients that the ranks add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swift_r1.models.policy import Critic, Policy
from swift_r1.models.weights import bucketed
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.optimizer import OptimizerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUCKET_NUMBERS = 25 * 2**20 // 4  # float32 gradients that are sent together; torch's own size


@dataclass(slots=True)
class _Bucket:
    """Neighbouring parameters, and one flat float32 tensor that all their gradients lie in."""

    parameters: Sequence[nn.Parameter]
    gradients: Tensor
    missing: int = 0  # gradients of the step's last backward pass that are not there yet


class DdpBackend(LocalBackend):
    """Replicas that stay equal: the same weights at the start, the same summed gradient for each update.

    torch's DistributedDataParallel is not used: it sends gradients in the weights' dtype, and here micro-batches are
    added up in float32 before ranks are, once a step. As there, a bucket is sent as soon as it is complete, while the
    backward pass goes on. A parameter without a gradient counts as zero.
    """

    replicated = True

    def __init__(
        self,
        model: PreTrainedModel,
        config: OptimizerConfig,
        ranks: Ranks,
        wrap: type[Policy] | type[Critic] = Policy,
    ) -> None:
        super().__init__(model, config, ranks.device, wrap)
        self.ranks = ranks
        ranks.barrier()  # one may have loaded for longer than another
        with torch.no_grad():
            for parameter, master in self._master_of.items():
                dist.broadcast(master, 0)
                parameter.copy_(master)
        # A backward pass begins with the last parameters.
        found = bucketed(list(self._master_of)[::-1], Tensor.numel, BUCKET_NUMBERS)
        self._buckets = [_Bucket(parameters, self._flat(parameters)) for parameters in found]
        for bucket in self._buckets:
            for one in bucket.parameters:
                # Called after the hook that adds it to the float32 sum.
                hook: Any = one.register_post_accumulate_grad_hook
                hook(partial(self._arrived, bucket))
        self._sums = False  # whether this backward pass is the step's last
        self._sent: list[dist.Work] = []

    def _flat(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Zeros, which the gradients of these are views of from now on."""
        masters = [self._master_of[parameter] for parameter in parameters]
        flat = torch.zeros(sum(master.numel() for master in masters), device=self.device)
        for master, part in zip(
            masters, torch.split(flat, [one.numel() for one in masters]), strict=True
        ):
            master.grad = part.view_as(master)
        return flat

    def backward(self, loss: Tensor, last: bool) -> None:
        self._sums = last
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        super().backward(loss, last)
        if last:
            self._send(everything=True)
            for work in self._sent:
                work.wait()
            self._sent = []

    def _arrived(self, bucket: _Bucket, _parameter: Tensor) -> None:
        bucket.missing -= 1
        if self._sums:
            self._send()

    def _send(self, everything: bool = False) -> None:
        """Sends all buckets that are complete, in the same order on every rank."""
        for bucket in self._buckets[len(self._sent) :]:
            if bucket.missing and not everything:
                return
            work = dist.all_reduce(bucket.gradients, async_op=True)
            assert work is not None
            self._sent.append(work)

    @property
    def _kind(self) -> str:
        return f"data parallel in plain torch (DDP), {self.ranks.world_size} ranks"
