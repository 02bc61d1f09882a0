"""A model's weights as every user of the model except the optimizer sees them: names, whole values, which are frozen.

The name is the Hugging Face one; adapters are merged in, 4-bit weights are the numbers that they stand for, and under
ZeRO-3 shape and dtype are those of the whole weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swift_r1.errors import UsageError
from swift_r1.flags.training import ModelArguments
from swift_r1.models.expected import adapter_name, parts_of
from swift_r1.models.multimodal import part_of_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

ADAPTER = "default"  # peft's name for the adapter that is trained
# peft's name for a module's copy that is trained in its place
_SAVED = f".modules_to_save.{ADAPTER}."


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the policy, by its place in the model: FSDP2 puts the whole one there while it is gathered."""

    name: str  # its Hugging Face name, without adapters
    owner: nn.Module  # the module whose own it is
    kind: str  # its attribute there
    # None, or peft's `LoraLayer` whose adapter is to be merged: it knows `scaling * B A` in the base's layout
    layer: Any = None

    @property
    def _magnitude(self) -> Any:
        """Returns peft's module with the length of each output's weights, of a DoRA adapter (arXiv 2402.09353); else
        None."""
        return None if self.layer is None else dict(self.layer.lora_magnitude_vector).get(ADAPTER)

    @property
    def base(self) -> Tensor:
        """The model's own parameter, or persistent buffer."""
        tensor: Tensor = getattr(self.owner, self.kind)
        return tensor

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """What must be gathered before `value` under ZeRO-3 and FSDP2."""
        if not isinstance(self.base, nn.Parameter):
            return ()
        if self.layer is None:
            return (self.base,)
        more = () if self._magnitude is None else (self._magnitude.weight,)
        return (
            self.base,
            self.layer.lora_A[ADAPTER].weight,
            self.layer.lora_B[ADAPTER].weight,
            *more,
        )

    @property
    def nbytes(self) -> int:
        return whole_shape(self.base).numel() * whole_dtype(self.base).itemsize

    @torch.no_grad()
    def value(self) -> Tensor:
        """Returns the weight in the dtype that it is computed in. A plain parameter is not copied.

        An adapter is merged in float32: `W + D`, of DoRA `m (W + D) / |W + D|` for each output.
        """
        base = self.base.detach()
        state = _quant_state(self.base)
        if state is not None:
            from bitsandbytes.functional import dequantize_4bit

            base = dequantize_4bit(base, state)
        if self.layer is None:
            return base
        delta: Tensor = self.layer.get_delta_weight(ADAPTER)
        merged = base.float() + delta.float()
        dora = self._magnitude
        if dora is not None:
            flip = self.layer.fan_in_fan_out
            # rounded as in the forward pass
            norm = dora.get_weight_norm(base, delta.T if flip else delta, scaling=1)
            factor = (dora.weight / norm).float()
            merged *= factor if flip else factor[:, None]
        return merged.to(base.dtype)


def _quant_state(parameter: Tensor) -> Any:
    """Returns the state of bitsandbytes' 4-bit parameters; None for any other."""
    return getattr(parameter, "quant_state", None)


def part_of(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor that FSDP2 has sharded, in the same memory; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def whole_shape(parameter: Tensor) -> torch.Size:
    """Returns the shape of the weight itself, however it is stored or partitioned."""
    state = _quant_state(parameter)
    if state is not None:
        return torch.Size(state.shape)
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def whole_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype that the weight is computed in."""
    state = _quant_state(parameter)
    dtype: torch.dtype = parameter.dtype if state is None else state.dtype
    return dtype


def output_head(model: PreTrainedModel) -> nn.Module:
    untyped: Any = model  # transformers has no types here
    head: nn.Module = untyped.get_output_embeddings()
    return head


def has_adapters(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def policy_weights(model: PreTrainedModel) -> list[Weight]:
    """Returns the model's weights, tied ones once, each with its adapter, or the one that is trained in its place
    (`--modules_to_save`); then its persistent buffers, which belong to a checkpoint as weights do."""
    lasting = model.state_dict(keep_vars=True)
    buffers = [_weight_at(model, name) for name, _ in model.named_buffers() if name in lasting]
    adapted = {}
    if has_adapters(model):
        from peft.tuners.lora import LoraLayer

        adapted = {
            name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
        }
    weights = []
    for name, _ in model.named_parameters():
        owner, _, kind = name.rpartition(".base_layer.")
        layer = adapted.get(owner)
        if layer:
            adapter = layer if kind == "weight" else None
            weights.append(replace(_weight_at(model, name), name=f"{owner}.{kind}", layer=adapter))
        elif ".lora_" not in name and ".original_module." not in name:
            weights.append(replace(_weight_at(model, name), name=name.replace(_SAVED, ".")))

    return weights + buffers


def pushed_weights(model: PreTrainedModel) -> list[Weight]:
    """Returns the weights that an engine gets: those of the language model, and of each part beside it that is
    trained."""
    parts = trained_parts(model)
    return [weight for weight in policy_weights(model) if part_of_model(weight.name) in parts]


def trained_parts(model: PreTrainedModel) -> set[str]:
    """Returns the parts of a multimodal model that are trained, or have adapters, and the language model."""
    return parts_of(name for name, weight in model.named_parameters() if weight.requires_grad)


def _weight_at(model: nn.Module, name: str) -> Weight:
    owner, _, kind = name.rpartition(".")
    return Weight(name, model.get_submodule(owner), kind)


def added_weights(model: PreTrainedModel, adapter: str = ADAPTER) -> list[Weight]:
    """Returns the adapters and `--modules_to_save` alone, by the names that they have in `model`, tied ones once."""
    return [
        _weight_at(model, name) for name, _ in model.named_parameters() if f".{adapter}." in name
    ]


def adapter_weights(model: PreTrainedModel) -> list[Weight]:
    """Returns the adapters alone, by the names that they have in peft's files."""
    return [
        replace(weight, name=adapter_name(weight.name, ADAPTER)) for weight in added_weights(model)
    ]


def parameters_of(weights: Sequence[Weight]) -> list[nn.Parameter]:
    return [parameter for weight in weights for parameter in weight.parameters]


def bucketed(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yields consecutive items whose sizes add up to at most `limit` (a larger one goes alone)."""
    bucket: list[T] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if bucket and filled + size > limit:
            yield bucket
            bucket = []
            filled = 0
        bucket.append(item)
        filled += size

    if bucket:
        yield bucket


def trained_share(model: nn.Module) -> str:
    """Says for the log how many of the model's parameters are trained."""
    sizes = [(whole_shape(p).numel(), p.requires_grad) for p in model.parameters()]
    trained = sum(n for n, on in sizes if on)
    whole = sum(n for n, _ in sizes)
    return f"{trained:,} of {whole:,} parameters are trained ({trained / whole:.2%})"


def frozen_names(sizes: Sequence[tuple[str, int]], args: ModelArguments) -> set[str]:
    """Returns the names of the weights that full training leaves as they are.

    The ratio is of all numbers in the model, from its first weight on: a weight is frozen where it ends within it.
    `trainable_parameters` and its pattern have the last word.

    Args:
        sizes: every weight's name and how many numbers it holds, in the model's order.

    Raises UsageError: a prefix or pattern matches no weight, or none is left to train.
    """
    names = [name for name, _ in sizes]

    def matching(flag: str) -> set[str]:
        """Returns the names that a flag and its pattern (`<flag>_regex`) stand for."""
        matched: set[str] = set()
        for prefix in getattr(args, flag):
            begin_so = {name for name in names if name.startswith(prefix)}
            if not begin_so:
                raise UsageError(
                    f"--{flag} {prefix}: no weight's name begins so; the first is {names[0]}"
                )
            matched |= begin_so

        pattern = getattr(args, f"{flag}_regex")
        if pattern is not None:
            match = {name for name in names if re.search(pattern, name)}
            if not match:
                raise UsageError(f"--{flag}_regex {pattern}: no weight's name matches")
            matched |= match
        return matched

    frozen = matching("freeze_parameters")
    frozen |= {name for name in names if part_of_model(name) in args.frozen_parts}
    trainable = matching("trainable_parameters")
    budget = args.freeze_parameters_ratio * sum(size for _, size in sizes)
    for name, size in sizes:
        budget -= size
        if budget < 0:
            break
        frozen.add(name)

    frozen -= trainable
    if len(frozen) == len(names):
        raise UsageError(
            "nothing is left to train: --freeze_parameters, --freeze_llm and their like freeze every weight"
        )
    return frozen


def freeze(model: nn.Module, args: ModelArguments) -> None:
    """Freezes in place the weights that `frozen_names` returns, and raises as it does."""
    sizes = [(name, whole_shape(parameter).numel()) for name, parameter in model.named_parameters()]
    for name in frozen_names(sizes, args):
        model.get_parameter(name).requires_grad_(False)
