"""Models that read images: log-probs, gradients and completions against transformers' own forward, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForMultimodalLM

from swift_r1.data.vision import VisionProcessor
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.models.loading import load_model, load_tokenizer
from swift_r1.models.multimodal import part_of_model, placeholders
from swift_r1.models.vision import Vision, packs_images
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import collate, round_batch
from swift_r1.training.micro_batches import SHARED, Form
from swift_r1.training.model_checks import why_not_packed
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.protocol import RolloutRequest, SamplingParams
from tests.vision import SIGHTS, image_file, picture, write_tiny

CPU = torch.device("cpu")
PACKED = Form(packed=True)
NOISE = 1e-4
TRAINED = AdapterArguments(freeze_vit=False, freeze_aligner=False)
GENERATOR = torch.Generator().manual_seed(0)
COMPLETIONS = [
    torch.randint(3, 100, (length,), generator=GENERATOR).tolist() for length in (5, 20, 11, 3, 17)
]


@dataclass(frozen=True)
class Seeing:
    """A tiny model, and prompts with one image, with two of other sizes and with none, as rows of two groups."""

    name: str
    backend: LocalBackend
    vision: Vision
    plain: Any
    rows: list[TokenSequence]
    contents: dict[str, bytes]

    def plain_logprobs(self, row: TokenSequence) -> torch.Tensor:
        """By transformers' forward, which gets pixels and makes positions itself."""
        ids = torch.tensor([[*row.prompt_token_ids, *row.token_ids]])
        more: dict[str, Any] = {}
        if row.images:
            more |= self.vision.processor.pixels([one.read() for one in row.images])
            types = (ids == self.plain.config.image_token_id).long()
            name = "mm_token_type_ids" if packs_images(self.plain) else "token_type_ids"
            takes = "qwen" in self.name or name == "token_type_ids"
            more |= {name: types} if takes else {}
        logits = self.plain(ids, **more).logits[0, len(row.prompt_token_ids) - 1 : -1]
        never = torch.tensor(placeholders(self.plain.config), dtype=torch.long)
        logps = logits.index_fill(-1, never, float("-inf")).log_softmax(-1)
        return logps.gather(-1, torch.tensor(row.token_ids)[:, None]).squeeze(-1)


@pytest.fixture(scope="module", params=SIGHTS)
def seeing(request: Any, tmp_path_factory: Any) -> Seeing:
    folder = write_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)
    model = load_model(folder, "float32", False, TRAINED, towers=True)
    backend = LocalBackend(model, OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0))
    processor = VisionProcessor.load(str(folder), load_tokenizer(str(folder)))
    plain = AutoModelForMultimodalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    images = [
        image_file(folder, picture(*size, seed), size)
        for seed, size in enumerate([(28, 28), (40, 16), (28, 48)])
    ]
    template = SIGHTS[request.param].template
    text = processor.placeholder
    prompts = []
    for start, own in ((f"a{text}b", images[:1]), (f"{text}to{text}", images[1:]), ("abc", [])):
        ids = processor.expand(start, [one.read() for one in own]) if own else (10, 11, 12)
        prompts.append((ids, tuple(own)))
    assert "image" in template
    numbers = (0, 0, 1, 1, 2)
    rows = [
        TokenSequence(
            prompts[number][0],
            completion,
            logprobs=(0.0,) * len(completion),
            loss_mask=(True,) * len(completion),
            images=prompts[number][1],
        )
        for number, completion in zip(numbers, COMPLETIONS, strict=True)
    ]
    contents = {one.sha256: one.read() for one in images}
    return Seeing(request.param, backend, Vision(processor, model), plain, rows, contents)


def test_logprobs_and_gradients_are_the_models_own(seeing: Seeing) -> None:
    """Padded, packed and with shared prompts; of one image, of two of other sizes, of none. The tower learns too."""
    own = torch.cat([seeing.plain_logprobs(row) for row in seeing.rows])
    own.sum().backward()
    expected = {name: parameter.grad for name, parameter in seeing.plain.named_parameters()}
    largest = max(gradient.abs().max() for gradient in expected.values() if gradient is not None)
    moved = [name for name, one in expected.items() if part_of_model(name) == "vit"]
    assert any(expected[name] is not None and expected[name].abs().max() > 0 for name in moved)
    batch = round_batch(seeing.rows, [0.0] * 5)
    packs = packs_images(seeing.backend.model)
    for form, units in (
        (Form(), [(i,) for i in range(5)]),
        (PACKED, [(i,) for i in range(5)]),
        (SHARED, [(0, 1), (2, 3), (4,)]),
    ):
        if form.packed and (not packs or why_not_packed(seeing.backend, form)):
            continue
        seeing.backend.optimizer.zero_grad(set_to_none=False)
        inputs = collate(batch, units, form, CPU, vision=seeing.vision).inputs
        assert inputs.images is not None
        logps = seeing.backend.logprobs(inputs, 1.0).logps
        torch.testing.assert_close(logps, own, atol=NOISE, rtol=0)
        logps.sum().backward()
        for name, parameter in seeing.backend.model.named_parameters():
            if expected[name] is None:
                continue
            scale = expected[name].abs().max() + 1e-3 * largest
            torch.testing.assert_close(
                parameter.grad / scale, expected[name] / scale, atol=1e-3, rtol=0
            )


def test_the_embedded_engine_samples_what_the_trainer_scores(seeing: Seeing) -> None:
    """Each prompt is read once, shorter ones padded; a text goes on behind the positions of its images."""
    engine = TransformersEngine(seeing.backend.model, None, (2,), 0, seeing.vision)
    requests = [
        RolloutRequest(
            request_id=str(number),
            prompt_token_ids=tuple(row.prompt_token_ids),
            n=2,
            seeds=(number, 9 + number),
            sampling=SamplingParams(max_tokens=12),
            images=tuple(one.sha256 for one in row.images),
        )
        for number, row in enumerate(seeing.rows[::2])
    ]
    outputs = engine.generate(requests, 0, images=seeing.contents)
    rows = []
    logprobs = []
    for row, output in zip(seeing.rows[::2], outputs, strict=True):
        for completion in output.completions:
            assert not set(completion.token_ids) & set(placeholders(seeing.plain.config))
            logprobs += completion.logprobs
            rows.append(
                TokenSequence(
                    row.prompt_token_ids,
                    completion.token_ids,
                    completion.logprobs,
                    (True,) * len(completion.token_ids),
                    images=row.images,
                )
            )
    batch = round_batch(rows, [0.0] * 6)
    inputs = collate(batch, [(i,) for i in range(6)], Form(), CPU, vision=seeing.vision).inputs
    with torch.no_grad():
        scored = seeing.backend.logprobs(inputs, 1.0).logps
    torch.testing.assert_close(torch.tensor(logprobs), scored, atol=NOISE, rtol=0)
