"""The weight check's prompt with an image: what engines write behind it tells whether they use the tower that they were
sent, which no text does."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from swift_r1.models.policy import ModelInputs
from swift_r1.models.vision import PromptSpan, PromptWithImages, Vision
from swift_r1.rollout.base import TrainedPolicy
from swift_r1.wire.protocol import RolloutRequest, SamplingParams

_SIDE = 64
_TOKENS = 16


class ImageProbe:
    """A prompt of nothing but an image of noise."""

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        self._image = noise()
        processor = vision.processor
        ids = processor.expand(processor.placeholder, [self._image])
        self._prompt = PromptWithImages(ids, (self._image,))

    def request(self, name: str) -> RolloutRequest:
        """Returns the request for a short completion, under this name."""
        return RolloutRequest(
            request_id=name,
            prompt_token_ids=self._prompt.token_ids,
            seeds=(0,),
            sampling=SamplingParams(max_tokens=_TOKENS, ignore_eos=True),
            images=(hashlib.sha256(self._image).hexdigest(),),
            unexpanded_token_ids=self._vision.processor.unexpanded,
        )

    def read_image(self, _name: str) -> bytes:
        return self._image

    @torch.no_grad()
    def logprobs(self, policy: TrainedPolicy, written: Tensor, device: torch.device) -> Tensor:
        """Returns the policy's log-probs of completions `[S, T]`, on the CPU. Collective."""
        count, length = written.shape
        prompt = torch.tensor(self._prompt.token_ids).expand(count, -1)
        token_ids = torch.cat([prompt, written], 1).to(device)
        width = token_ids.shape[1]
        first = torch.arange(count)[:, None] * width + width - length - 1
        spans = [PromptSpan(0, 0, width)] * count
        prompts = [self._prompt]
        places = self._vision.position_ids(prompts, spans, count)
        inputs = ModelInputs(
            token_ids,
            (first + torch.arange(length)).flatten().to(device),
            written.flatten().to(device),
            position_ids=None if places is None else places.to(device),
            images=self._vision.inputs(prompts, spans, device),
        )
        return policy.logprobs(inputs, 1.0).logps.float().view(count, length).cpu()


def noise() -> bytes:
    """Returns a PNG of noise, always the same."""
    colours = hashlib.shake_128(b"weight check").digest(_SIDE * _SIDE * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (_SIDE, _SIDE), colours).save(file, "PNG")
    return file.getvalue()


def largest_difference(own: Tensor, served: Tensor) -> float:
    """Returns the largest mean difference of a completion's log-probs, in nats."""
    return float((own - served).abs().mean(1).max())


def as_tensors(
    token_ids: Sequence[Sequence[int]], logps: Sequence[Sequence[float]]
) -> list[Tensor]:
    """Returns completions of one length, and their log-probs, for `Ranks.broadcast`."""
    return [
        torch.tensor([len(token_ids)]),
        torch.tensor(token_ids, dtype=torch.long).flatten(),
        torch.tensor(logps, dtype=torch.float32).flatten(),
    ]
