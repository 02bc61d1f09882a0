"""Which weights make a model whole: names and shapes as transformers (and so the trainer) has them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from swift_r1.rollout.refusals import Refused
from swift_r1.rollout.weights.header import FLOAT_BYTES, TensorEntry

Shapes = Mapping[str, tuple[int, ...]]


def expected_weights(model: str, trust_remote_code: bool = False) -> dict[str, tuple[int, ...]]:
    """Every parameter of the causal LM in the folder (or of the name) `model`, without loading a weight.

    A tied output head is left out: it is the embedding, and travels once.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    shapes = {name: tuple(weight.shape) for name, weight in skeleton.named_parameters()}
    if config.get_text_config().tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def most_bytes(expected: Shapes) -> int:
    """Of all weights, in whichever dtype they come."""
    return sum(map(prod, expected.values())) * max(FLOAT_BYTES.values())


def check_bucket(tensors: Mapping[str, TensorEntry], expected: Shapes, already: set[str]) -> None:
    """Every tensor of a bucket is one of the model's, has its shape, and comes for the first time.

    Raises:
        Refused: 422, naming the tensor.
    """
    for name, entry in tensors.items():
        if name not in expected:
            tied = name == "lm_head.weight"
            hint = "it is tied to the embedding, which is sent alone" if tied else "the served model has no such weight"
            raise Refused(422, f"unexpected weight {name}: {hint}")
        if entry.shape != expected[name]:
            raise Refused(422, f"{name} has shape {list(entry.shape)}, the model's is {list(expected[name])}")
        if name in already:
            raise Refused(422, f"{name} was sent twice in one version")


def check_complete(sent: set[str], expected: Shapes) -> None:
    """Raises Refused (422) naming weights of the model that no bucket held."""
    missing = sorted(set(expected) - sent)
    if missing:
        shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise Refused(422, f"{len(missing)} of {len(expected)} weights were not sent: {shown}")
