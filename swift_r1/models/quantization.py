"""Frozen weights of 4 bits under trained adapters (QLoRA, arXiv 2305.14314), by bitsandbytes."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swift_r1.errors import UsageError


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of linear layers, but for the output head, are stored.

    Attributes:
        kind: `--bnb_4bit_quant_type`: nf4 or fp4.
        double: `--bnb_4bit_use_double_quant`: the blocks' scales are stored in 8 bits too.
    """

    kind: str = "nf4"
    double: bool = True

    def config(self, dtype: torch.dtype) -> Any:
        """For transformers' `from_pretrained`; matrix products are computed in `dtype`.

        Raises:
            UsageError: bitsandbytes is not installed.
        """
        from transformers import BitsAndBytesConfig

        if importlib.util.find_spec("bitsandbytes") is None:
            raise UsageError("weights of 4 bits (--train_type qlora) need bitsandbytes: pip install bitsandbytes")
        # On a CPU it looks for a compiled kernel that inference alone would use, and warns.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.kind,
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=dtype,
        )


def settle(model: nn.Module) -> None:
    """Keeps quantised weights in the form that training needs: on a CPU bitsandbytes would repack them for good when
    the model generates."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantized(parameter: Tensor) -> bool:
    """Whether it is one of bitsandbytes' 4-bit parameters."""
    return getattr(parameter, "quant_state", None) is not None


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of the weight itself, whatever its storage or partition is."""
    if is_quantized(parameter):
        return torch.Size(parameter.quant_state.shape)
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def whole_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype that the weight is computed in."""
    dtype: torch.dtype = parameter.quant_state.dtype if is_quantized(parameter) else parameter.dtype
    return dtype


def plain_value(parameter: Tensor) -> Tensor:
    """The weight as numbers: of 4-bit ones what they stand for, in the model's dtype; else the parameter itself."""
    if not is_quantized(parameter):
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    value: Tensor = dequantize_4bit(parameter.detach(), parameter.quant_state)
    return value
