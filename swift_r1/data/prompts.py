"""From a row to the prompt exactly as the model sees it: chat template, response prefix, then token ids, once."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

from swift_r1.data.images import ImageFile, images_of, in_parts, rewards_column
from swift_r1.data.preprocessors import Row
from swift_r1.data.prompt_templates import (
    CALLING_TURN,
    PLAIN_TURN,
    THOUGHTS,
    TurnEnd,
    check_read,
    end_of_turn,
    has_tools,
    opening_of,
    pieces,
    plain,
    prompt_template,
    rendered,
    template_arguments,
    templates_of,
    token_ids,
    tool_template,
    turn_end,
    with_own_words,
)
from swift_r1.data.rows import RESERVED, content_bytes
from swift_r1.data.store import Rows
from swift_r1.data.vision import VisionProcessor
from swift_r1.errors import UsageError, one_line

_logger = logging.getLogger("swift_r1.data")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, exactly as the model will see it.

    Attributes:
        prompt_id: stable within a run: `"<dataset>:<row index>"`.
        dataset: the registered dataset name or file stem the row came from.
        messages: the chat messages given to the prompt template.
        text: the rendered template; decoding `token_ids` gives the same text.
        token_ids: the prompt tokens, the only thing the engine and the trainer ever use.
        columns: every other column of the row, handed to the rewards (`nums`, `target`, ...).
        response_prefix: the end of `text` with which the model's turn begins; the rewards see it before the completion.
        turn_end: the token that ends the model's turn in the template, where one does.
        row: the number of its row; 0 where rows are streamed.
        tools: OpenAI's descriptions of the tools that the template renders.
        images: those that the messages' `<image>` tags stand for, in order.
        unexpanded_ids: with images, the tokens with one placeholder for each; `token_ids` has one for each feature.
        task: the name of the task that it is of (`--mixture`); empty where a run has one.
    """

    prompt_id: str
    dataset: str
    messages: tuple[Mapping[str, Any], ...]
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    response_prefix: str = ""
    turn_end: int | None = None
    row: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    images: tuple[ImageFile, ...] = ()
    unexpanded_ids: tuple[int, ...] = ()
    task: str = ""


def data_columns(row: Row) -> dict[str, Any]:
    """Returns the columns of a row that rewards get."""
    columns = {
        key: value for key, value in row.items() if key not in RESERVED and key != "messages"
    }
    return columns | rewards_column(images_of(row))


class PromptFlags(Protocol):
    """The flags that decide how messages become text."""

    @property
    def system(self) -> str | None: ...
    @property
    def prompt_template(self) -> str | None: ...
    @property
    def response_prefix(self) -> str: ...
    @property
    def enable_thinking(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]: ...
    @property
    def agent_template(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Wording:
    """How messages become text.

    Attributes:
        system: put first where a row has no system message.
        template: `--prompt_template`; None for the tokenizer's own chat template.
        response_prefix: what the model's turn begins with.
        arguments: passed to the template.
        agent_template: None where the template renders a row's tools, which are in its system message otherwise.
    """

    system: str | None = None
    template: str | None = None
    response_prefix: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    agent_template: str | None = None

    @classmethod
    def of(cls, args: PromptFlags) -> Wording:
        arguments = template_arguments(args.enable_thinking, args.chat_template_kwargs)
        return cls(
            args.system, args.prompt_template, args.response_prefix, arguments, args.agent_template
        )


def tokenizer_of_run(tokenizer: Any, wording: Wording) -> Any:
    """Returns the tokenizer as a checkpoint keeps it: its chat template renders the prompts that the run trained on."""
    own = tokenizer.chat_template if wording.template is None else prompt_template(wording.template)
    words = wording.system, wording.response_prefix, wording.arguments
    kept = copy.copy(tokenizer)
    if isinstance(own, str):
        kept.chat_template = with_own_words(own, *words)
    elif own is not None:  # several by name
        kept.chat_template = {name: with_own_words(text, *words) for name, text in own.items()}
    return kept


class PromptEncoder:
    """Renders and tokenises prompts.

    Args:
        tokenizer: a transformers tokenizer.
        max_length: longest prompt in tokens, by `--max_length` or by the model's context.
        truncation: of longer prompts: `delete` leaves them out, `left` cuts off their beginning. Those with images are
            never cut.
        vision: loads the model's processor, when the first image comes.

    Raises UsageError where there is no chat template, `--prompt_template` is none, or it reads an argument nowhere.
    """

    noun = "prompts"
    bound = "--max_length, or the model's context less --max_completion_length"

    def __init__(
        self,
        tokenizer: Any,
        wording: Wording | None = None,
        max_length: int | None = None,
        truncation: str = "delete",
        vision: Callable[[], VisionProcessor] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.truncation = truncation
        self._load_vision = vision
        self._wording = wording or Wording()
        self._max_length = max_length
        self._given: dict[str, Any] = dict(self._wording.arguments)
        if self._wording.template is not None:
            self._given["chat_template"] = prompt_template(self._wording.template)
        elif not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                "the model's tokenizer has no chat template: give --prompt_template (r1, qwen_math, no or a Jinja file)"
            )
        own = self._given.get("chat_template")
        check_read(self._wording.arguments, templates_of(tokenizer) if own is None else [own])
        self._opening = opening_of(self._rendered)
        prefix = self._wording.response_prefix
        if self._opening and not self._rendered([{"role": "user", "content": "x"}], True).endswith(
            prefix
        ):
            raise UsageError(
                f"--response_prefix {prefix!r}: the chat template already begins the model's turn with "
                f"{self._opening!r}: leave the flag out, or set it to that"
            )
        # Bytes that the template adds to a message, measured: a prompt is never longer in tokens than in bytes.
        self._overhead = (
            len(self.render([{"role": "user", "content": "x"}]).encode()) if max_length else 0
        )

    @property
    def response_prefix(self) -> str:
        """Returns what each turn of the model begins with: `--response_prefix`, or the tags that the template opens
        itself."""
        return self._wording.response_prefix or self._opening

    @cached_property
    def turn_end(self) -> int | None:
        """Returns the token that ends the model's turn in the template; None where none does."""
        return turn_end(self._rendered, self.tokenizer)

    @cached_property
    def plain_end(self) -> TurnEnd:
        """Returns how a turn that calls no tool ends. Raises UsageError where the template has no turns of the model."""
        return self.ended(end_of_turn(self._rendered, self.tokenizer, PLAIN_TURN))

    def ended(self, found: TurnEnd) -> TurnEnd:
        """Returns how a turn ends, with the tokenizer's end where the template has none."""
        end = self.tokenizer.eos_token
        return found if found.token is not None else TurnEnd(end, found.shown, end)

    @cached_property
    def call_end(self) -> int | None:
        """Returns the token that ends a turn of the model that calls a tool; None where none does."""
        return turn_end(self._rendered, self.tokenizer, CALLING_TURN) if self.has_tools else None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Returns the prompt's text for `tokenize`, including the start of the model's turn. Contents may be lists of
        parts (`in_parts`). UsageError where the template refuses it, or has no place for tools."""
        if (
            tools or any(one["role"] == "tool" or "tool_calls" in one for one in messages)
        ) and not self.has_tools:
            raise UsageError(
                "a prompt has tools or calls of them, and the chat template has no place for these: take another "
                "--prompt_template, or --agent_template react_en, which describes tools in the system message"
            )
        text = self._rendered(messages, True, tools)
        # A template may open the turn by itself, as that of a checkpoint does.
        return (
            text
            if text.endswith(self._wording.response_prefix)
            else text + self._wording.response_prefix
        )

    @cached_property
    def template(self) -> str:
        """Returns the text of the template that renders tools."""
        return str(self._given.get("chat_template") or tool_template(self.tokenizer))

    @cached_property
    def has_tools(self) -> bool:
        """Returns whether the template renders tools."""
        return has_tools(self.template)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        given = self._given | ({"tools": [dict(one) for one in tools]} if tools else {})
        own = [
            dict.fromkeys(THOUGHTS, one["reasoning_content"]) | one
            if one.get("reasoning_content")
            else one
            for one in self._with_system(messages)
        ]
        return rendered(self.tokenizer, own, add_generation_prompt, **given)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of rendered text; no special tokens are added."""
        return token_ids(self.tokenizer, text)

    def encode(self, row: Row) -> Prompt | None:
        """Returns the prompt of a row of `load_rows`; None when it is longer than `max_length` and is not to be cut.
        Raises UsageError: the template refuses its messages, or has no place for its images."""
        tools = self.tools_of(row)
        images = images_of(row)
        text = self._text_of(row)
        unexpanded = self.tokenize(text)
        ids = self._expanded(text, images) if images else unexpanded
        if self._max_length is not None and len(ids) > self._max_length:
            if not self._cuts(row):
                return None
            ids = ids[-self._max_length :]
            text = self.tokenizer.decode(ids)
        return Prompt(
            prompt_id=row["prompt_id"],
            dataset=row["dataset"],
            messages=tuple(self._with_system(row["messages"])),
            text=plain(text),
            token_ids=ids,
            columns=data_columns(row),
            response_prefix=self.response_prefix,
            turn_end=self.turn_end,
            tools=tuple(tools),
            images=images,
            unexpanded_ids=unexpanded if images else (),
        )

    def _cuts(self, row: Row) -> bool:
        """Returns whether a prompt that is too long is cut; the placeholders of an image cannot be."""
        return self.truncation != "delete" and not images_of(row)

    def _text_of(self, row: Row) -> str:
        """Returns the rendered prompt of a row, with a placeholder for each image."""
        images = images_of(row)
        messages = map(in_parts, row["messages"]) if images else row["messages"]
        text = self.render(list(messages), self.tools_of(row))
        if images:
            places = text.count(self.vision.placeholder)
            if places != len(images):
                raise UsageError(
                    f"{row['prompt_id']}: the chat template has {places} places for {len(images)} images: take another "
                    "--prompt_template, with places for parts of type image"
                )
        return text

    @cached_property
    def vision(self) -> VisionProcessor:
        """Returns the model's processor of images. Raises UsageError: it has none, or nothing here reads images."""
        if self._load_vision is None:
            raise UsageError("rows have images, which are not read here")
        return self._load_vision()

    def _expanded(self, text: str, images: Sequence[ImageFile]) -> tuple[int, ...]:
        """Returns the token ids of a rendered prompt with all tokens of its images."""
        vision = self.vision
        coming = iter(images)
        ids: list[int] = []
        for piece in pieces(text):
            own = [image.read() for image in islice(coming, piece.count(vision.placeholder))]
            ids += vision.expand(piece, own) if own else self.tokenize(piece)
        return tuple(ids)

    def tools_of(self, row: Row) -> Sequence[Mapping[str, Any]]:
        """Returns the descriptions that the template renders."""
        return (row.get("tools") or ()) if self._wording.agent_template is None else ()

    @property
    def limit(self) -> str:
        """Returns the longest prompt, for messages."""
        return f"{self._max_length} tokens ({self.bound})"

    def fitting(self, rows: Sequence[Row], what: str = "training") -> Sequence[Row]:
        """Returns the rows that can be trained on, and logs what is not (`chosen`)."""
        kept, notes = self.chosen(rows, what)
        for note in notes:
            _logger.warning("%s", note)
        return kept

    def chosen(self, rows: Sequence[Row], what: str) -> tuple[Sequence[Row], list[str]]:
        """Returns the rows whose prompts are at most `max_length` tokens, or are cut to it, and whose images the model's
        processor takes; and what is said of those that are left out or cut. UsageError where no row is left. Only rows
        that are long in bytes are tokenised, so a million short ones cost little."""
        notes = []
        total = len(rows)
        refused = self.refused(rows)
        if refused:
            place, why = next(iter(refused.items()))
            about = f"images that the model's processor refuses, for example {rows[place]['prompt_id']}: {why}"
            if len(refused) == total:
                raise UsageError(f"all {total} {what} {self.noun} have {about}")
            notes.append(
                f"{len(refused):,} of {total:,} {what} {self.noun} left out: they have {about}"
            )
            rows = _without(rows, refused)
        too_long = self.too_long(rows)
        uncut = {place for place in too_long if not self._cuts(rows[place])}
        if uncut and len(uncut) == len(rows):
            raise UsageError(f"all {len(rows)} {what} {self.noun} are longer than {self.limit}")
        end = "last" if self.truncation == "left" else "first"
        done = {
            "left out: longer than": len(uncut),
            f"cut to their {end}": len(too_long) - len(uncut),
        }
        notes += [
            f"{count:,} of {total:,} {what} {self.noun} {action} {self.limit}"
            for action, count in done.items()
            if count
        ]
        return _without(rows, uncut) if uncut else rows, notes

    def refused(self, rows: Sequence[Row]) -> dict[int, str]:
        """Returns the places of rows with an image that the model's processor does not take, and why."""
        if isinstance(rows, Rows) and not rows.most_images():
            return {}
        whys = {place: self._why_refused(row) for place, row in enumerate(rows)}
        return {place: why for place, why in whys.items() if why is not None}

    def _why_refused(self, row: Row) -> str | None:
        for image in images_of(row):
            try:
                self.vision.tokens_of(image.width, image.height)
            except ValueError as error:
                return f"{image.width} x {image.height} pixels, {one_line(error, 200)}"
        return None

    def too_long(self, rows: Sequence[Row]) -> set[int]:
        """Returns the places of rows whose prompts are longer than `max_length`."""
        if self._max_length is None:
            return set()
        unsure: Iterable[int] = range(len(rows))
        if isinstance(rows, Rows):  # without reading them
            most = rows.column("size").astype(int) + (rows.column("turns") + 1) * self._overhead
            unsure = (most > self._max_length).nonzero()[0].tolist()
        return {place for place in unsure if self._is_too_long(rows[place])}

    def fits(self, row: Row) -> bool:
        """Returns whether the prompt is short enough, or is cut, and its images can be read."""
        return self._why_refused(row) is None and (self._cuts(row) or not self._is_too_long(row))

    def _is_too_long(self, row: Row) -> bool:
        if self._max_length is None:
            return False
        images = images_of(row)
        most = content_bytes(row) + (len(row["messages"]) + 1) * self._overhead
        most += self._image_tokens(images) + len(images) * self._image_overhead if images else 0
        return most > self._max_length and self._length(row) > self._max_length

    def _length(self, row: Row) -> int:
        """Returns the tokens of a row."""
        images = images_of(row)
        return len(self.tokenize(self._text_of(row))) + self._image_tokens(images) - len(images)

    def _image_tokens(self, images: Iterable[ImageFile]) -> int:
        return sum(self.vision.tokens_of(image.width, image.height) for image in images)

    @cached_property
    def _image_overhead(self) -> int:
        """Returns the bytes that the template puts around an image, with those of its placeholder."""
        parts = [{"type": "image"}, {"type": "text", "text": "x"}]
        return len(self.render([{"role": "user", "content": parts}]).encode())

    def _with_system(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        own = [dict(message) for message in messages]
        if self._wording.system is not None and own[0]["role"] != "system":
            own.insert(0, {"role": "system", "content": self._wording.system})
        return own


def _without(rows: Sequence[Row], places: Container[int]) -> Sequence[Row]:
    kept = (place for place in range(len(rows)) if place not in places)
    return rows.chosen(kept) if isinstance(rows, Rows) else [rows[place] for place in kept]
