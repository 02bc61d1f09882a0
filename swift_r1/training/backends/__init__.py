"""What holds a model and its optimizer during training, and the one place that chooses: plain torch (in one process,
or in several: DDP), FSDP2 or DeepSpeed ZeRO.

A new backend is one module beside these, with a child of `Backend` (`base.py`), and a branch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swift_r1.flags import RunFlags
    from swift_r1.models.policy import Critic, Policy
    from swift_r1.runtime.ranks import Ranks
    from swift_r1.training.backends.base import Backend


def open_backend(
    args: RunFlags,
    path: str,
    load: Callable[[], PreTrainedModel],
    learning_rate: float,
    ranks: Ranks,
    wrap: type[Policy] | type[Critic],
) -> Backend:
    """The policy or critic in `path`, which `load` makes (a policy once more for a reference). Collective."""
    from swift_r1.algorithms.rewards import from_flags
    from swift_r1.training.optimizer import OptimizerConfig

    optimizer = replace(from_flags(OptimizerConfig, args), learning_rate=learning_rate)
    if args.fsdp is not None:
        from swift_r1.training.backends.fsdp import FsdpBackend

        return FsdpBackend(load, optimizer, ranks, wrap)
    if args.deepspeed is None and ranks.world_size > 1:
        from swift_r1.training.backends.ddp import DdpBackend

        return DdpBackend(load(), optimizer, ranks, wrap)
    if args.deepspeed is None:
        from swift_r1.training.backends.local import LocalBackend

        return LocalBackend(load(), optimizer, ranks.device, wrap)
    import torch

    from swift_r1.models.policy import Policy
    from swift_r1.models.shape import transformers_config
    from swift_r1.training.backends.deepspeed import DeepSpeedBackend
    from swift_r1.training.backends.deepspeed_config import read_config

    dtype = (
        getattr(torch, args.torch_dtype or "", None)
        or transformers_config(path).dtype
        or torch.float32
    )
    quantized = bool(args.quant_bits) and wrap is Policy
    gpu = ranks.device.type == "cuda"
    config = read_config(args.deepspeed, args.zero_hpz_partition_size, gpu)
    return DeepSpeedBackend(load, dtype, optimizer, config, ranks, quantized, wrap)
