"""How far a policy has moved is measured on what it wrote, behind the prompts as it saw them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swift_r1.data.vision import VisionProcessor
from swift_r1.models.loading import load_model, load_tokenizer
from swift_r1.models.vision import Vision
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, RoundBatch, round_batch
from swift_r1.training.micro_batches import Form
from swift_r1.training.movement import Movement, logprobs_of
from swift_r1.training.optimizer import OptimizerConfig
from tests.vision import image_file, picture, write_tiny

ALONE = Ranks(0, 1, torch.device("cpu"), None)
BATCHING = Batching(Form(), 1, 2)
SETTINGS = OptimizerConfig(1e-3, 0.0, 0.9, 0.95, 1e-8, 1.0)


def backend_of(model: Path, towers: bool = False) -> LocalBackend:
    return LocalBackend(load_model(str(model), "float32", False, towers=towers), SETTINGS)


def row(prompt: list[int], mask: list[bool], seed: int = 0) -> TokenSequence:
    ids = torch.randint(5, 90, (len(mask),), generator=torch.Generator().manual_seed(seed)).tolist()
    return TokenSequence(prompt, ids, [0.0] * len(ids), mask)


def whole(batch: RoundBatch, backend: LocalBackend, batching: Batching = BATCHING) -> Tensor:
    """Returns the log-probs of all that the policy wrote."""
    return logprobs_of(batch, backend, batching, ALONE, 1.0)


def restored(movement: Movement) -> Movement:
    found = Movement.restored(json.loads(json.dumps(asdict(movement))))
    assert found is not None
    return found


def test_the_whole_prompt_is_read_and_only_the_policy_s_tokens_count(tiny_model: Path) -> None:
    backend = backend_of(tiny_model)
    prompt = [7 + place % 80 for place in range(150)]
    turns = [True] * 3 + [False] * 20 + [True] * 5  # the environment's between the policy's
    # of the last one the model wrote nothing
    rows = [row(prompt, turns), row(prompt[::-1], [True] * 9, 1), row([7], [False])]
    batch = round_batch(rows, [0.0] * 3)
    movement = Movement.of_round(batch, backend, BATCHING, ALONE)
    assert len(movement.logps) == 8 + 9
    before = torch.tensor(movement.logps)
    torch.testing.assert_close(before, whole(batch, backend).float())
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.mul_(1.01)
    change = whole(batch, backend) - before
    metrics = restored(movement).metrics(backend, BATCHING, ALONE)
    assert metrics["policy/moved"] == pytest.approx(change.abs().mean().item(), rel=1e-4)


def test_the_prompt_s_images_are_seen_after_a_resume_too(tmp_path: Path) -> None:
    folder = write_tiny("qwen2_5_vl", tmp_path / "model")
    backend = backend_of(folder, towers=True)
    processor = VisionProcessor.load(str(folder), load_tokenizer(str(folder)))
    batching = Batching(Form(), 1, 2, vision=Vision(processor, backend.model))
    rows = []
    for seed, size in enumerate([(40, 28), (56, 28)]):
        image = image_file(tmp_path, picture(*size), size)
        prompt = processor.expand(f"a{processor.placeholder}b", [image.read()])
        own = row(list(prompt), [True] * 4, seed)
        rows.append(
            TokenSequence(prompt, own.token_ids, own.logprobs, own.loss_mask, images=[image])
        )
    batch = round_batch(rows, [0.0, 0.0])
    movement = Movement.of_round(batch, backend, batching, ALONE)
    torch.testing.assert_close(
        torch.tensor(movement.logps), whole(batch, backend, batching).float()
    )
    for path in tmp_path.glob("*.png"):
        path.unlink()
    assert restored(movement).metrics(backend, batching, ALONE)["policy/moved"] == 0.0
    blind = Movement.of_round(
        round_batch([row(list(one.prompt_token_ids), [True] * 4, n) for n, one in enumerate(rows)], [0.0] * 2),
        backend, batching, ALONE,
    )  # fmt: skip
    assert blind.logps != movement.logps
