"""From a row with answers to tokens, and which of them are learned (`swift sft`).

Nothing is looked for in rendered text: an answer stands behind its own prompt, as the model would see that, so where it
begins and ends is known. Where a template renders earlier answers otherwise than it did when they were given (Qwen3 and
R1 leave their thinking out), later ones do not continue that text, and begin a sequence of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from swift_r1.data.images import ImageFile, images_of, in_parts
from swift_r1.data.preprocessors import Row
from swift_r1.data.prompt_templates import (
    PLAIN_TURN,
    TurnEnd,
    closed_thought,
    common_beginning,
    end_of_turn,
    is_empty_thought,
    opens_thought,
    plain,
    rewritten_beginning,
)
from swift_r1.data.prompts import Prompt, PromptEncoder, Wording, data_columns
from swift_r1.data.vision import VisionProcessor
from swift_r1.errors import UsageError

LOSS_SCALES = ("default", "last_round", "all")


class AnsweredTokens(NamedTuple):
    """Tokens, and which of them are learned; the first is not, since nothing predicts it."""

    token_ids: tuple[int, ...]
    learned: tuple[bool, ...]
    images: int = 0  # how many of the row's, its first ones, are in it

    @property
    def begin(self) -> int:
        """Returns the place of the first learned token; of the last token, where none is learned."""
        return self.learned.index(True) if True in self.learned else len(self.learned) - 1


@dataclass(frozen=True, slots=True)
class Conversation(Prompt):
    """A row with its answers. `text` and `token_ids` are those of the first sequence."""

    sequences: tuple[AnsweredTokens, ...] = ()
    rejected: tuple[AnsweredTokens, ...] = ()  # of the answer that is preferred less


@dataclass
class _Sequence:
    """A sequence as it grows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    images: int = 0

    def answered(self, *learned: bool) -> AnsweredTokens:
        return AnsweredTokens(tuple(self.token_ids), learned, self.images)


class ConversationEncoder(PromptEncoder):
    """Renders and tokenises conversations.

    Args:
        max_length: most tokens of a sequence; the arguments before and behind are those of `PromptEncoder`.
        truncation: of longer ones: `delete` leaves the row out, `left` cuts off their beginning, `right` their end.
        loss_scale: what is learned: `default` all answers, `last_round` those behind the last message of the user,
            `all` every token, also of prompts. A message's own `loss` comes before the first two.
    """

    noun = "rows"
    bound = "--max_length, or the model's context"

    def __init__(
        self,
        tokenizer: Any,
        wording: Wording | None = None,
        max_length: int | None = None,
        truncation: str = "delete",
        loss_scale: str = "default",
        vision: Callable[[], VisionProcessor] | None = None,
    ) -> None:
        super().__init__(tokenizer, wording, max_length, truncation, vision)
        self._loss_scale = loss_scale
        longest = self._rendered(PLAIN_TURN, False) + self.plain_end.written
        self._overhead = len(longest.encode())

    def encode(self, row: Row) -> Conversation | None:
        """Returns the conversation of a row; None where it is longer than `max_length` and is not to be cut."""
        sequences = self.sequences(row)
        if self._max_length is not None and self._longest(sequences) > self._max_length:
            if not self._cuts(row):
                return None
            left = self.truncation == "left"
            kept = slice(-self._max_length, None) if left else slice(self._max_length)
            cut = [AnsweredTokens(one.token_ids[kept], one.learned[kept]) for one in sequences]
            # nothing predicts what stands first now
            sequences = [one._replace(learned=(False, *one.learned[1:])) for one in cut]
        first = sequences[0].token_ids
        return Conversation(
            prompt_id=row["prompt_id"],
            dataset=row["dataset"],
            messages=tuple(self._with_system(row["messages"])),
            text=self.tokenizer.decode(first),
            token_ids=first,
            columns=data_columns(row),
            tools=tuple(self.tools_of(row)),
            images=images_of(row),
            sequences=tuple(sequences),
        )

    def sequences(self, row: Row) -> list[AnsweredTokens]:
        """Returns the tokens of a row before they are cut: one sequence, or several where the template rewrites earlier
        answers. Raises UsageError, which names the row, where the template refuses the messages, or does not render
        all of an answer behind its prompt."""
        try:
            return self._sequences(row)
        except UsageError as error:
            raise UsageError(f"{row['prompt_id']}: {error}") from error

    def _sequences(self, row: Row) -> list[AnsweredTokens]:
        images = images_of(row)
        own = self._with_system(row["messages"])
        if images:
            own = [in_parts(one) for one in own]
        learns = [one.pop("loss", None) for one in own]
        tools = self.tools_of(row)
        answers = [place for place, one in enumerate(own) if one["role"] == "assistant"]
        if self._loss_scale == "all":
            ends = [self._end_of(own[: place + 1], tools) for place in answers]
            whole = _Sequence()
            text = self._rendered(own, False, tools).removesuffix(ends[-1].shown)
            self._extend(whole, text + ends[-1].written, True, images)
            return [whole.answered(False, *whole.learned[1:])]
        found: list[_Sequence] = []
        last_asked = max(
            (place for place, one in enumerate(own) if one["role"] == "user"), default=-1
        )
        for place in answers:
            by_strategy = self._loss_scale == "default" or place > last_asked
            learned = by_strategy if learns[place] is None else learns[place]
            if not learned and (found or place != answers[-1]):
                continue  # it is part of the prompt of a later one, or behind all that is learned
            prompt = self.render(own[:place], tools)
            if not found or not prompt.startswith(found[-1].text):
                found.append(_Sequence())
            answer = self._answer(own[: place + 1], prompt, tools)
            self._extend(found[-1], prompt[len(found[-1].text) :], False, images)
            self._extend(found[-1], answer, learned, images)
        return [one.answered(*one.learned) for one in found]

    def _extend(
        self, sequence: _Sequence, text: str, learned: bool, images: Sequence[ImageFile]
    ) -> None:
        ids = self.tokenize(text)
        shown = None
        if images:
            ids = self._expanded(text, images[sequence.images :])
            sequence.images += text.count(self.vision.placeholder)
            shown = self.vision.token_id
        sequence.text += text
        sequence.token_ids += ids
        sequence.learned += [learned and one != shown for one in ids]

    def _answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        """Returns what the model would write behind `prompt` to give the last message: as the template renders it, up to
        the token that ends a turn; where the template leaves out a thought that its text begins with, that text. Raises
        UsageError where the template leaves out more, or does not render it behind the prompt."""
        end = self._end_of(messages, tools)
        whole = self._rendered(messages, False, tools)
        prefix = self.response_prefix
        before = prompt.removesuffix(prefix)
        begun = next(filter(whole.startswith, (prompt, before)), "")
        if not begun:
            render = partial(self._rendered, tools=tools)
            begun = rewritten_beginning(render, messages, prompt)
            if begun and whole.startswith(begun):
                prompt = begun
            else:
                begun = common_beginning(prompt, whole)
        only_here = prompt.removeprefix(begun)  # and not in a longer conversation
        opened = opens_thought(only_here)
        content = str(messages[-1]["content"])
        text = next(
            content.removeprefix(one)
            for one in (prefix, prefix.strip(), "")
            if content.startswith(one)
        )
        thought = closed_thought(text)
        thinks = bool(thought or messages[-1].get("reasoning_content"))
        behind = whole.removeprefix(begun)
        said = behind.removesuffix(end.shown)
        if behind.endswith(end.shown):
            shown = _squeezed(plain(said))
            left_out = is_empty_thought(only_here) or (only_here == prefix and not opened)
            if (not only_here or (left_out and not thinks)) and _squeezed(text) in shown:
                return said + end.written
            answer = _squeezed(text.removeprefix(thought))
            if thought and end is self.plain_end and only_here in ("", prefix) and answer in shown:
                return text + end.written
        if opened and not thinks:
            raise UsageError(
                f"the prompt opens a thought ({only_here!r}) that the answer does not close: give answers with their "
                "thought, or take a template that opens none (--enable_thinking false, where it reads that)"
            )
        raise UsageError(
            "the chat template does not render the whole answer behind its prompt: take another --prompt_template, or "
            "leave such rows out"
        )

    def _end_of(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> TurnEnd:
        """Returns how the last message, an answer, ends. Raises UsageError where the template leaves a part of it out."""
        own = messages[-1]
        if not own.get("tool_calls") and not own.get("reasoning_content"):
            return self.plain_end
        render = partial(self._rendered, tools=tools)
        return self.ended(end_of_turn(render, self.tokenizer, messages, self.plain_end.token))

    def _length(self, row: Row) -> int:
        return self._longest(self.sequences(row))

    def _longest(self, sequences: Sequence[AnsweredTokens]) -> int:
        return max(len(one.token_ids) for one in sequences)


class PreferenceEncoder(ConversationEncoder):
    """Renders and tokenises rows with a rejected answer (`rejected_messages`). Both are cut, or the row is left out."""

    def encode(self, row: Row) -> Conversation | None:
        chosen = super().encode(row)
        rejected = super().encode(_with_rejected(row))
        if chosen is None or rejected is None:
            return None
        return replace(chosen, rejected=rejected.sequences)

    def _is_too_long(self, row: Row) -> bool:
        return super()._is_too_long(row) or super()._is_too_long(_with_rejected(row))


def _with_rejected(row: Row) -> Row:
    return row | {"messages": row["rejected_messages"]}


def _squeezed(text: str) -> str:
    """Returns text without white space, which templates change."""
    return "".join(text.split())
