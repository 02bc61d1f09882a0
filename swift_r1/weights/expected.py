"""Which weights make a model whole, by the names and shapes that its checkpoint has them in."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from swift_r1.weights.header import FLOAT_BYTES, TensorEntry
from swift_r1.wire.http_errors import HTTPError

if TYPE_CHECKING:
    from torch import Tensor, nn

Shapes = Mapping[str, tuple[int, ...]]


def expected_weights(model: str, trust_remote_code: bool = False) -> dict[str, tuple[int, ...]]:
    """Every weight and persistent buffer of the causal LM in the folder (or of the name) `model`, by the names that its
    checkpoint has for them, without loading one.

    A tied output head is left out: it is the embedding, and travels once.
    """
    import torch

    empty = skeleton(model, trust_remote_code)
    own = {name: torch.empty(shape, device="meta") for name, shape in own_weights(empty).items()}
    return {name: tuple(weight.shape) for name, weight in as_in_checkpoint(empty, own).items()}


def skeleton(model: str, trust_remote_code: bool = False) -> nn.Module:
    """The causal LM in the folder (or of the name) `model` without a single number in memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        empty: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return empty


def own_weights(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights and persistent buffers by the names that the model itself has for them, tied ones once."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    if model.config.get_text_config().tie_word_embeddings:
        shapes.pop("lm_head.weight", None)  # in a skeleton it is not tied yet
    lasting = model.state_dict(keep_vars=True)
    return shapes | {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in lasting}


def use_checkpoint_form(model: nn.Module) -> None:
    """From now on `model` is saved and sent in the form of its family's checkpoints, whichever its own file was in: the
    server, which has not loaded it, knows no other. Else transformers repeats what it did when it loaded the file."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [one for one in conversions if not isinstance(one, PrefixChange)]


def as_in_checkpoint(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of `model` as its checkpoint has them, which is how vLLM loads them: transformers keeps a layer's experts
    in one tensor, and has names of its own for some modules."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return converted


def most_bytes(expected: Shapes) -> int:
    """Of all weights, in whichever dtype they come."""
    return sum(map(prod, expected.values())) * max(FLOAT_BYTES.values())


def check_bucket(tensors: Mapping[str, TensorEntry], expected: Shapes, already: set[str]) -> None:
    """Every tensor of a bucket is one of the model's, has its shape, and comes for the first time.

    Raises:
        HTTPError: 422, naming the tensor.
    """
    for name, entry in tensors.items():
        if name not in expected:
            tied = name == "lm_head.weight"
            hint = "it is tied to the embedding, which is sent alone" if tied else "the served model has no such weight"
            raise HTTPError(422, f"unexpected weight {name}: {hint}")
        if entry.shape != expected[name]:
            raise HTTPError(422, f"{name} has shape {list(entry.shape)}, the model's is {list(expected[name])}")
        if name in already:
            raise HTTPError(422, f"{name} was sent twice in one version")


def check_complete(sent: set[str], expected: Shapes) -> None:
    """Raises HTTPError (422) naming weights of the model that no bucket held."""
    missing = sorted(set(expected) - sent)
    if missing:
        shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise HTTPError(422, f"{len(missing)} of {len(expected)} weights were not sent: {shown}")
