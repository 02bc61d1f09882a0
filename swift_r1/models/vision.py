"""Images in a multimodal model: its tower reads each prompt's images once, and their features stand where the prompts of a
micro-batch have placeholders, however often a prompt stands there.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from swift_r1.data.vision import Pixels, VisionProcessor
from swift_r1.errors import UsageError
from swift_r1.models.multimodal import part_of_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KEPT_BYTES = 2**29  # of pixels, that are wanted again by the next pass over a round


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The images of a micro-batch.

    Example: a prompt whose image makes four features, in a row of its own for each of two completions:
        pixels [{"pixel_values": ..., "image_grid_thw": ...}], features [0, 1, 2, 3, 0, 1, 2, 3]
    """

    # of the different prompts with images, those of the same form together
    pixels: Sequence[Pixels]
    # int64 `[P]`: which feature, of those of all `pixels` one after another, each placeholder of the rows stands for, in
    # order; empty where the rows have none, and the tower is run since other ranks run it
    features: Tensor


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive tokens of a micro-batch's rows: a prompt, or what stands behind one, or both."""

    prompt: int  # the number of its prompt; -1: none, these are padding
    start: int  # where the first token stands behind the prompt's first one
    tokens: int


@dataclass(frozen=True, slots=True)
class PromptWithImages:
    """A prompt of a round: its tokens, and the bytes of its images."""

    token_ids: tuple[int, ...]
    images: tuple[bytes, ...]


class Vision:
    """What batching and engines need of a multimodal model and its processor.

    Args:
        model: transformers' whole one; nothing is computed with its weights here.
        together: other ranks run the tower in the same passes, with the weights that this one has a part of.

    Raises UsageError: images of this architecture cannot be read here.
    """

    def __init__(
        self, processor: VisionProcessor, model: PreTrainedModel, together: bool = False
    ) -> None:
        inner: Any = model.base_model
        if "mm_encoder_outputs" not in inspect.signature(inner.forward).parameters:
            raise UsageError(f"{type(model).__name__} cannot be trained on images: only on text")
        unknown = [name for name, _ in towers_of(model) if part_of_model(f"{name}.") == "llm"]
        if unknown:
            raise UsageError(
                f"{type(model).__name__} has parts that are not known: {', '.join(unknown)}"
            )
        self.processor = processor
        self.together = together
        # of three axes (Qwen2-VL, arXiv 2409.12191, section 2.1), where the architecture has them
        self._positions = getattr(inner, "get_rope_index", None)
        self._kept: OrderedDict[bytes, Pixels] = OrderedDict()
        self._bytes = 0

    def pixels(self, images: Sequence[bytes]) -> Pixels:
        """Returns what the tower reads of a prompt's images."""
        name = b"".join(hashlib.sha256(one).digest() for one in images)
        found = self._kept.get(name)
        if found is None:
            with torch.inference_mode(False):  # an engine's prompts are trained on, too
                found = self.processor.pixels(images)
            self._kept[name] = found
            self._bytes += _nbytes(found)
        self._kept.move_to_end(name)
        while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= _nbytes(self._kept.popitem(last=False)[1])
        return found

    def positions(self, prompt: PromptWithImages) -> Tensor | None:
        """Returns int64 `[3, S]` of a prompt, by the axes of its images; None where positions count the tokens."""
        if self._positions is None:
            return None
        ids = torch.tensor(prompt.token_ids)[None]
        if not prompt.images:
            return torch.arange(ids.shape[1]).expand(3, -1)
        types = (ids == self.processor.token_id).int()
        grid = self.pixels(prompt.images)["image_grid_thw"]
        positions: Tensor = self._positions(ids, mm_token_type_ids=types, image_grid_thw=grid)[0]
        return positions[:, 0]

    def position_ids(
        self, prompts: Sequence[PromptWithImages], spans: Sequence[PromptSpan], rows: int
    ) -> Tensor | None:
        """Returns the positions of `rows` rows of equal length, `[4, R, S]`: those that count the tokens of a sample,
        and the three axes. A text goes on behind the largest position of its prompt. None as in `positions`."""
        if self._positions is None:
            return None
        of_prompts = [self.positions(prompt) for prompt in prompts]
        parts = []
        for span in spans:
            places = torch.arange(span.tokens) + span.start
            axes = places.expand(3, -1)
            if span.prompt >= 0:
                of_prompt = cast(Tensor, of_prompts[span.prompt])
                length = of_prompt.shape[1]
                behind = places - length + of_prompt.max() + 1
                axes = torch.where(
                    places < length, of_prompt[:, places.clamp(max=length - 1)], behind
                )
            parts.append(torch.cat([places[None], axes]))
        return torch.cat(parts, 1).view(4, rows, -1)

    def inputs(
        self,
        prompts: Sequence[PromptWithImages],
        spans: Sequence[PromptSpan],
        device: torch.device,
        idle: PromptWithImages | None = None,
    ) -> ImageInputs | None:
        """Returns the images of the rows that these spans make up; None without any.

        Args:
            idle: whose images go through the tower where the rows have none.
        """
        standing = [
            one.prompt
            for one in spans
            if one.prompt >= 0 and one.start == 0 and prompts[one.prompt].images
        ]
        if not standing and idle is None:
            return None
        pixels = {number: self.pixels(prompts[number].images) for number in set(standing)}
        different = sorted(pixels, key=lambda number: (_form(pixels[number]), number))
        together = [
            [pixels[number] for number in alike]
            for _, alike in groupby(different, key=lambda number: _form(pixels[number]))
        ]
        if not together and idle is not None:
            together = [[self.pixels(idle.images)]]
        counts = torch.tensor(
            [prompts[number].token_ids.count(self.processor.token_id) for number in different],
            dtype=torch.long,
        )
        starts = counts.cumsum(0) - counts
        order = [different.index(number) for number in standing]
        features = [torch.arange(int(counts[one])) + starts[one] for one in order]
        return ImageInputs(
            [
                {name: torch.cat([one[name] for one in alike]).to(device) for name in alike[0]}
                for alike in together
            ],
            torch.cat([torch.zeros(0, dtype=torch.long), *features]).to(device),
        )


def _form(pixels: Pixels) -> list[tuple[str, tuple[int, ...]]]:
    """Returns what is equal for pixels of prompts that go through the tower together."""
    return sorted((name, tuple(value.shape[1:])) for name, value in pixels.items())


def _nbytes(pixels: Pixels) -> int:
    return sum(value.nbytes for value in pixels.values())


def packs_images(model: PreTrainedModel) -> bool:
    """Returns whether rows with images can be packed: not where the tokens of an image see each other in both
    directions, by a mask that transformers makes of their types (Gemma 3)."""
    return "token_type_ids" not in inspect.signature(model.base_model.forward).parameters


def towers_of(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Returns the modules beside the language model, by name: towers, and what joins them to it."""
    inner: Any = model.base_model
    language = inner.get_decoder()
    prefix = f"{model.base_model_prefix}."
    return [
        (prefix + name, module)
        for name, module in inner.named_children()
        if module is not language and any(True for _ in module.parameters())
    ]


def states_with_images(
    model: PreTrainedModel, token_ids: Tensor, images: ImageInputs, **arguments: Any
) -> Tensor:
    """Returns the last hidden states `[R, S, H]` of rows that have the placeholders of these images. Where they have
    none, the tower is run all the same, and none of its features are taken."""
    arguments |= image_arguments(model, token_ids, images)
    found = model.base_model(input_ids=token_ids, use_cache=False, **arguments)
    return cast(Tensor, found.last_hidden_state)


def image_arguments(
    model: PreTrainedModel, token_ids: Tensor, images: ImageInputs
) -> dict[str, Any]:
    """Returns what the forward of a whole model, or of the one under its head, takes beside token ids that have the
    placeholders of these images."""
    arguments: dict[str, Any] = {"mm_encoder_outputs": {"image": _features(model, images)}}
    if not packs_images(model):
        arguments["token_type_ids"] = (token_ids == model.config.image_token_id).long()
    return arguments


def _features(model: PreTrainedModel, images: ImageInputs) -> Any:
    """Returns the output of the model's tower, with the features in the places of `images.features`."""
    inner: Any = model.base_model
    trained = any(one.requires_grad for _, tower in towers_of(model) for one in tower.parameters())
    with nullcontext() if trained else torch.no_grad():
        outputs = [inner.get_image_features(**one, return_dict=True) for one in images.pixels]
    found = outputs[0]
    found.pooler_output = _placed([one.pooler_output for one in outputs], images.features)
    if getattr(found, "deepstack_features", None) is not None:  # Qwen3-VL, of several layers
        of_layers = zip(*(one.deepstack_features for one in outputs), strict=True)
        found.deepstack_features = [_placed(one, images.features) for one in of_layers]
    return found


def _placed(of_prompts: Sequence[Any], features: Tensor) -> Any:
    """Returns the features `[P, H]` of these places, in the form that the first prompt's have: of each image
    `[F, H]`, or of all of them `[I, F, H]`."""
    flat = []
    for of_images in of_prompts:
        whole = of_images if isinstance(of_images, Tensor) else torch.cat(tuple(of_images))
        flat.append(whole.reshape(-1, whole.shape[-1]))
    chosen = torch.cat(flat).index_select(0, features)
    return chosen[None] if isinstance(of_prompts[0], Tensor) else (chosen,)
