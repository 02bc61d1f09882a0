"""Which parts of a model that reads images are trained, and how fast; the gradient of its tower by finite differences."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_r1.data.conversations import ConversationEncoder
from swift_r1.data.vision import VisionProcessor
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.models.loading import load_model, load_tokenizer
from swift_r1.models.multimodal import part_of_model
from swift_r1.models.policy import ModelInputs
from swift_r1.models.vision import Vision
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, collate, round_batch, split_step
from swift_r1.training.micro_batches import Form
from swift_r1.training.objectives.answers import LearnedAnswers
from swift_r1.training.objectives.base import batch_of, of_answers
from swift_r1.training.optimizer import OptimizerConfig
from tests.vision import image_file, picture, write_tiny

RATE = 1e-3
LORA = {"train_type": "lora", "lora_rank": 4, "target_modules": ["all-linear"]}
ALL = {"freeze_vit": False, "freeze_aligner": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: Any) -> Path:
    return write_tiny("qwen2_5_vl", tmp_path_factory.mktemp("models") / "qwen2_5_vl")


def opened(
    folder: Path,
    flags: dict[str, Any],
    vit_lr: float | None = None,
    aligner_lr: float | None = None,
) -> tuple[LocalBackend, ModelInputs]:
    """A model, and an answer to a question about an image."""
    model = load_model(folder, "float32", False, AdapterArguments(**flags), towers=True)
    config = OptimizerConfig(
        RATE, 0, 0.9, 0.95, 1e-12, 1e9, vit_lr=vit_lr, aligner_lr=aligner_lr, optim="adamw_torch"
    )
    processor = VisionProcessor.load(str(folder), load_tokenizer(str(folder)))
    image = image_file(folder, picture(40, 28), (40, 28))
    ids = processor.expand(f"a{processor.placeholder}b", [image.read()])
    own = (10, 20, 30, 40, 50)
    row = TokenSequence(ids, own, (0.0,) * 5, (True,) * 5, images=[image])
    batch = round_batch([row], [0.0])
    vision = Vision(processor, model)
    micro = collate(batch, [(0,)], Form(), torch.device("cpu"), vision=vision)
    return LocalBackend(model, config), micro.inputs


@pytest.mark.parametrize(
    ("flags", "rates", "moved"),
    [
        ({}, {}, {"llm": RATE}),
        pytest.param(ALL, {}, {"llm": RATE, "vit": RATE, "aligner": RATE}, marks=pytest.mark.long),
        (
            ALL,
            {"vit_lr": 1e-5, "aligner_lr": 1e-4},
            {"llm": RATE, "vit": 1e-5, "aligner": 1e-4},
        ),
        ({"freeze_llm": True, "freeze_vit": False}, {"vit_lr": 2e-4}, {"vit": 2e-4}),
        (LORA, {}, {"llm": RATE}),
        (LORA | ALL, {"vit_lr": 1e-5}, {"llm": RATE, "vit": 1e-5, "aligner": RATE}),
    ],
)
def test_each_part_moves_by_its_own_rate(
    tiny: Path, flags: dict[str, Any], rates: dict[str, float], moved: dict[str, float]
) -> None:
    """The first step of Adam moves what has a gradient by the learning rate."""
    backend, inputs = opened(tiny, flags, **rates)
    before = {name: one.detach().clone() for name, one in backend.model.named_parameters()}
    backend.backward(-backend.logprobs(inputs, 1.0).logps.mean(), last=True)
    backend.step(RATE)
    found: dict[str, float] = defaultdict(float)
    for name, one in backend.model.named_parameters():
        change = (one.detach() - before[name]).abs().max().item()
        part = part_of_model(name)
        found[part] = max(found[part], change)
    assert {part: value for part, value in found.items() if value} == {
        part: pytest.approx(rate, rel=0.02) for part, rate in moved.items()
    }


ASKED = "<image>what?"
TALK = [
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": "red"},
    {"role": "user", "content": f"{ASKED} {ASKED}"},
    {"role": "assistant", "content": "blue"},
    {"role": "user", "content": "so?"},
    {"role": "assistant", "content": "both"},
]


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("internvl", marks=pytest.mark.long)])
def test_images_behind_what_is_learned(tmp_path: Path, family: str) -> None:
    """Rows with images in any turn, and one without, beside transformers' own forward pass of each."""
    folder = write_tiny(family, tmp_path / family)
    tokenizer = load_tokenizer(str(folder))
    processor = VisionProcessor.load(str(folder), tokenizer)
    sizes = [(28, 28), (40, 28), (28, 56)]
    images = [image_file(tmp_path, picture(*size, seed=sum(size)), size) for size in sizes]
    rows = [
        {"messages": TALK, "images": [one.stored() for one in images]},
        {"messages": TALK[:2], "images": [images[1].stored()]},
        {"messages": TALK[4:]},
    ]
    model = load_model(folder, "float32", False, AdapterArguments(**ALL), towers=True)
    vision = Vision(processor, model)
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    backend = LocalBackend(model, OptimizerConfig(RATE, 0, 0.9, 0.95, 1e-8, 1.0))
    for scale in ("default", "all"):
        encoder = ConversationEncoder(tokenizer, loss_scale=scale, vision=lambda: processor)
        found = [encoder.encode(row | {"prompt_id": "d:0", "dataset": "d"}) for row in rows]
        conversations = [one for one in found if one is not None]
        sums = torch.zeros(2, dtype=torch.float64)
        for one in conversations:
            [sequence] = one.sequences
            ids = torch.tensor([sequence.token_ids])
            shown = processor.pixels([image.read() for image in one.images]) if one.images else {}
            kinds = {"mm_token_type_ids": (ids == processor.token_id).int()}
            more = shown | (kinds if family == "qwen2_5_vl" else {})
            with torch.no_grad():
                logps = model(input_ids=ids, **more).logits[0, :-1].log_softmax(-1)
            mask = torch.tensor(sequence.learned[1:])
            assert not (ids[0, 1:][mask] == processor.token_id).any()
            own = logps.gather(1, ids[0, 1:, None])[mask]
            sums += torch.tensor([-own.double().sum(), own.numel()])
        objective = LearnedAnswers(backend, ranks)
        batch = batch_of(objective, conversations)
        for form in (Form(), Form(packed=True)):
            own = Batching(form, 1, 8, max_tokens=10_000, share_from=0.0, vision=vision)
            batching = of_answers(own, 1)
            micros = split_step(batch, range(len(batch)), batching, ranks)
            metrics = objective.step(batch, micros, 0.0)
            assert metrics["loss"] == pytest.approx((sums[0] / sums[1]).item(), rel=2e-6)


def test_a_frozen_language_model_learns_nothing_from_text(tiny: Path) -> None:
    """Micro-batches without images add no gradient, and those with some do."""
    backend, inputs = opened(tiny, {"freeze_llm": True, "freeze_vit": False})
    text = ModelInputs(
        torch.tensor([[1, 2, 3]]), positions=torch.tensor([1]), targets=torch.tensor([3])
    )
    for norm, one in ((False, text), (True, inputs)):
        backend.backward(-backend.logprobs(one, 1.0).logps.mean(), last=True)
        assert (backend.step(RATE) > 0) == norm
