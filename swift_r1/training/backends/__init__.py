"""What holds a model and its optimizer during training, and the one place that chooses: plain torch or DeepSpeed ZeRO.

A new backend is one module beside these, with a `Backend` and a `CriticBackend` (`base.py`), and a branch here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from swift_r1.arguments import RlhfArguments
    from swift_r1.runtime.ranks import Ranks
    from swift_r1.training.backends.base import Backend, CriticBackend
    from swift_r1.training.optimizer import OptimizerConfig

    Load = Callable[[], PreTrainedModel]


def open_policy(args: RlhfArguments, load: Load, optimizer: OptimizerConfig, ranks: Ranks) -> Backend:
    """The policy that `load` makes; it is called once more for a reference. Collective."""
    if args.deepspeed is not None:
        from swift_r1.training.backends import deepspeed
        from swift_r1.training.backends.deepspeed_config import read_config

        dtype, config = _dtype(args, args.model), read_config(args.deepspeed)
        return deepspeed.DeepSpeedBackend(load, dtype, optimizer, config, ranks, bool(args.quant_bits))
    from swift_r1.training.backends.local import LocalBackend

    return LocalBackend(load(), optimizer, ranks.device)


def open_critic(args: RlhfArguments, load: Load, optimizer: OptimizerConfig, ranks: Ranks) -> CriticBackend:
    """The critic that `load` makes. Collective."""
    if args.deepspeed is not None:
        from swift_r1.training.backends import deepspeed
        from swift_r1.training.backends.deepspeed_config import read_config

        dtype, config = _dtype(args, str(args.critic_model)), read_config(args.deepspeed)
        return deepspeed.DeepSpeedCritic(load, dtype, optimizer, config, ranks)
    from swift_r1.training.backends.local import LocalCritic

    return LocalCritic(load(), optimizer, ranks.device)


def _dtype(args: RlhfArguments, path: str) -> torch.dtype:
    """Of the weights: `--torch_dtype`, else as the model's config says."""
    import torch
    from transformers import AutoConfig

    dtype: torch.dtype = getattr(torch, args.torch_dtype or "", None) or AutoConfig.from_pretrained(path).dtype
    return dtype or torch.float32
