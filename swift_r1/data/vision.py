"""What a multimodal model's processor makes of a prompt with images: token ids with placeholders, and pixels.

It is transformers' own processor, asked in one place for both. A prompt's ids have a placeholder for each feature that the
model's tower makes of an image; the engine and the trainer get the same ids, and pixels made from the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from swift_r1.data.images import decoded
from swift_r1.data.prompt_templates import token_ids
from swift_r1.errors import UsageError, one_line

if TYPE_CHECKING:
    from torch import Tensor

Pixels = dict[str, "Tensor"]
"""What a model's `get_image_features` takes, by its names, for the images of one prompt (`pixel_values`, ...)."""


class VisionProcessor:
    """Expands the placeholders of prompts and makes pixels of images, for one model.

    Args:
        processor: transformers' one, with the run's tokenizer.
        token_id: the placeholder that stands for a feature of an image.
    """

    def __init__(self, processor: Any, token_id: int) -> None:
        self._processor = processor
        self.token_id = token_id
        self._lengths: dict[tuple[int, int], int] = {}  # of images by their sizes

    @classmethod
    def load(cls, path: str, tokenizer: Any) -> VisionProcessor:
        """Loads the processor of the model in `path` (a folder or id). Raises UsageError: there is none for images."""
        from transformers import AutoConfig
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            base = PROCESSOR_MAPPING[type(config)]
            processor = _for_images(base).from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
            raise UsageError(
                f"rows have images, and there is no processor for them in --model {path}: {one_line(error)}"
            ) from error
        # The prompts' own tokenizer, and nothing of the run's template: prompts are rendered before.
        processor.tokenizer = tokenizer
        return cls(processor, config.image_token_id)

    @property
    def placeholder(self) -> str:
        """Returns the text that stands for an image in a rendered prompt."""
        return str(self._processor.image_token)  # of some processors an AddedToken

    @property
    def unexpanded(self) -> tuple[int, ...]:
        """Returns the token ids of that text alone."""
        return token_ids(self._processor.tokenizer, self.placeholder)

    def expand(self, text: str, images: Sequence[bytes]) -> tuple[int, ...]:
        """Returns the token ids of a rendered prompt, each image's placeholder expanded to all of its tokens. Raises
        ValueError: the processor refuses an image, or their number."""
        made = self._processor(images=[[decoded(one) for one in images]], text=[text], **_COUNTED)
        return tuple(made["input_ids"][0])

    def tokens_of(self, width: int, height: int) -> int:
        """Returns how many tokens an image of so many pixels becomes, without looking at one. Raises ValueError: the
        processor refuses it."""
        if self._beside is None:
            return self._expanded_length(width, height)
        return self._by_formula(width, height) + self._beside

    @cached_property
    def _beside(self) -> int | None:
        """Returns how many tokens of an image the processor's own formula does not count; None where it has no formula,
        or one that does not hold."""
        try:
            missed = {self._expanded_length(*size) - self._by_formula(*size) for size in _PROBED}
        except (AttributeError, NotImplementedError):
            return None
        return missed.pop() if len(missed) == 1 else None

    def _by_formula(self, width: int, height: int) -> int:
        found = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(found.num_image_tokens[0])

    def _expanded_length(self, width: int, height: int) -> int:
        from PIL import Image

        size = (width, height)
        if size not in self._lengths:
            blank = Image.new("RGB", size)
            made = self._processor(images=[[blank]], text=[self.placeholder], **_COUNTED)
            self._lengths[size] = len(made["input_ids"][0])
        return self._lengths[size]

    def pixels(self, images: Sequence[bytes]) -> Pixels:
        """Returns what the model's tower reads of the images of a prompt, in order."""
        texts = [self.placeholder * len(images)]
        made = self._processor(
            images=[[decoded(one) for one in images]],
            text=texts,
            return_tensors="pt",
            **_NOTHING_ADDED,
        )
        return {name: value for name, value in made.items() if name not in _OF_TEXT}


_NOTHING_ADDED = {"add_special_tokens": False}
_COUNTED = {**_NOTHING_ADDED, "do_rescale": False, "do_normalize": False}  # half the time
_PROBED = ((64, 64), (256, 64))  # sizes of images that show whether a formula holds
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@cache
def _for_images(base: Any) -> Any:
    """Returns transformers' processor `base` without what reads videos, which asks for packages that a run with images
    does not need."""

    class Images(base):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

    Images.__name__ = base.__name__
    Images.__qualname__ = base.__qualname__
    Images.__module__ = base.__module__
    return Images
