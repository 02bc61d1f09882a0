"""The experts of all tokens that a wave of the embedded engine reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swift_r1.models.routing import routing_of
from swift_r1.models.vision import PromptWithImages
from swift_r1.wire.protocol import Routes, RoutesAsked
from swift_r1.wire.routes import packed


class WaveRoutes:
    """Takes what the model's routers have chosen after each of its calls, while `Routing.noting` is open. A token has
    its experts once it was read: the last of a completion never is.

    Args:
        prompts: of the wave's rows, equal ones being neighbours.
        longest: tokens of a completion at most.
    """

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[PromptWithImages], longest: int
    ) -> None:
        self._routing = routing_of(model)
        self._prompts = prompts
        layers, chosen, _ = self._routing.shape
        size = (len(prompts), longest, layers, chosen)
        self._written = torch.zeros(size, dtype=self._routing.shape.dtype, device=model.device)
        self._read: dict[PromptWithImages, Tensor] = {}

    def read(self) -> None:
        """Takes those of the prompts, each of which was read once, padded on the left."""
        different = list(dict.fromkeys(self._prompts))
        noted = self._routing.noted()
        of_prompts = noted.view(len(different), -1, *noted.shape[1:])
        for prompt, routes in zip(different, of_prompts, strict=True):
            self._read[prompt] = routes[len(routes) - len(prompt.token_ids) :]

    def wrote(self, rows: Tensor, step: int) -> None:
        """Takes those of token `step` of these rows."""
        self._written[rows, step] = self._routing.noted()

    def of(self, row: int, length: int, asked: RoutesAsked | None) -> Routes | None:
        """Returns those of a row's prompt and of its completion of `length` tokens without the last."""
        if asked is None:
            return None
        whole = torch.cat([self._read[self._prompts[row]], self._written[row, : length - 1]])
        return packed(whole[asked.first :].cpu().numpy(), asked)
