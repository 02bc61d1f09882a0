"""From a row to the prompt exactly as the model sees it: chat template, response prefix, then token ids, once."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from swift_r1.data.model_turn import opening_of, rendered, turn_end
from swift_r1.data.prompt_templates import prompt_template, with_own_words
from swift_r1.data.rows import RESERVED, Row
from swift_r1.data.types import Prompt
from swift_r1.data.view import Rows
from swift_r1.errors import UsageError

_logger = logging.getLogger("swift_r1.data")


@dataclass(frozen=True, slots=True)
class Wording:
    """How messages become text.

    Attributes:
        system: put first where a row has no system message.
        template: `--prompt_template`; None for the tokenizer's own chat template.
        response_prefix: what the model's turn begins with; it goes on from there.
        enable_thinking: handed to the template where it is not None.
    """

    system: str | None = None
    template: str | None = None
    response_prefix: str = ""
    enable_thinking: bool | None = None

    @classmethod
    def of(cls, args: Any) -> Wording:
        """As the flags of that name say."""
        return cls(args.system, args.prompt_template, args.response_prefix, args.enable_thinking)


def tokenizer_of_run(tokenizer: Any, wording: Wording) -> Any:
    """The tokenizer as a checkpoint keeps it: its chat template renders the prompts that the run trained on."""
    own = tokenizer.chat_template if wording.template is None else prompt_template(wording.template)
    if not isinstance(own, str):  # several templates by name: they stay as they are
        return tokenizer
    kept = copy.copy(tokenizer)
    kept.chat_template = with_own_words(own, wording.system, wording.response_prefix)
    return kept


class PromptEncoder:
    """Renders and tokenises prompts.

    Args:
        tokenizer: a transformers tokenizer.
        system: as a wording's, where none is given.
        max_length: longest prompt in tokens.
        wording: how messages become text.
        truncation: of prompts that are longer: `delete` leaves them out, `left` cuts their beginning off.

    Raises:
        UsageError: there is no chat template, or `--prompt_template` is none.
    """

    def __init__(
        self,
        tokenizer: Any,
        system: str | None = None,
        max_length: int | None = None,
        wording: Wording | None = None,
        truncation: str = "delete",
    ) -> None:
        self.tokenizer, self.truncation = tokenizer, truncation
        self._wording = wording or Wording(system)
        self._max_length = max_length
        self._given: dict[str, Any] = {}
        if self._wording.template is not None:
            self._given["chat_template"] = prompt_template(self._wording.template)
        elif not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                "the model's tokenizer has no chat template: give --prompt_template (r1, qwen_math, no or a Jinja file)"
            )
        if self._wording.enable_thinking is not None:
            self._given["enable_thinking"] = self._wording.enable_thinking
        self._opening = opening_of(self._rendered)
        prefix = self._wording.response_prefix
        if self._opening and not self._rendered([{"role": "user", "content": "x"}], True).endswith(prefix):
            raise UsageError(
                f"--response_prefix {prefix!r}: the chat template begins the model's turn with {self._opening!r} "
                "itself: leave the flag out, or write that"
            )
        # Bytes that the template adds to a message, measured; what is short enough in bytes is so in tokens.
        self._overhead = len(self.render([{"role": "user", "content": "x"}]).encode()) if max_length else 0

    @property
    def response_prefix(self) -> str:
        """What each turn of the model begins with: `--response_prefix`, or the tags that the template opens itself."""
        return self._wording.response_prefix or self._opening

    @cached_property
    def turn_end(self) -> int | None:
        """The token that ends the model's turn in the template; None where none does."""
        return turn_end(self._rendered, self.tokenizer)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt's text, up to and with the start of the model's turn.

        Raises:
            UsageError: the template refuses the messages.
        """
        text = self._rendered(messages, True)
        # A template may open the turn by itself, as that of a checkpoint does.
        return text if text.endswith(self._wording.response_prefix) else text + self._wording.response_prefix

    def _rendered(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        return rendered(self.tokenizer, self._with_system(messages), add_generation_prompt, **self._given)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of rendered text; nothing is put before or behind them."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(self, row: Row) -> Prompt | None:
        """The prompt of a row of `load_rows`; None when it is longer than `max_length` and not to be cut."""
        messages = self._with_system(row["messages"])
        text = self.render(row["messages"])
        token_ids = self.tokenize(text)
        if self._max_length is not None and len(token_ids) > self._max_length:
            if self.truncation == "delete":
                return None
            token_ids = token_ids[-self._max_length :]
            text = self.tokenizer.decode(token_ids)
        columns = {key: value for key, value in row.items() if key not in RESERVED and key != "messages"}
        return Prompt(
            prompt_id=row["prompt_id"],
            dataset=row["dataset"],
            messages=tuple(messages),
            text=text,
            token_ids=token_ids,
            columns=columns,
            response_prefix=self.response_prefix,
            turn_end=self.turn_end,
        )

    def fitting(self, rows: Sequence[Row], what: str = "training") -> Sequence[Row]:
        """The rows whose prompts are at most `max_length` tokens, or are cut to it; what is left out or cut is logged.

        Only rows that are long in bytes are tokenised here, so a million short rows cost little.

        Raises:
            UsageError: no row is left.
        """
        if self._max_length is None or not len(rows):
            return rows
        unsure = [place for place, surely in enumerate(self._surely_fit(rows)) if not surely]
        too_long = {place for place in unsure if self._is_too_long(rows[place])}
        if not too_long:
            return rows
        if self.truncation != "delete":
            _logger.warning(
                "%d of %d %s prompts cut to their last --max_length %d tokens",
                *(len(too_long), len(rows), what, self._max_length),
            )
            return rows
        if len(too_long) == len(rows):
            raise UsageError(f"all {len(rows)} {what} prompts are longer than --max_length {self._max_length} tokens")
        _logger.warning(
            "%d of %d %s prompts left out: longer than --max_length %d tokens",
            *(len(too_long), len(rows), what, self._max_length),
        )
        kept = [place for place in range(len(rows)) if place not in too_long]
        return rows.chosen(kept) if isinstance(rows, Rows) else [rows[place] for place in kept]

    def fits(self, row: Row) -> bool:
        """Whether a row's prompt is short enough, or is cut."""
        return self.truncation != "delete" or self._max_length is None or not self._is_too_long(row)

    def _is_too_long(self, row: Row) -> bool:
        assert self._max_length is not None
        return len(self.tokenize(self.render(row["messages"]))) > self._max_length

    def _surely_fit(self, rows: Sequence[Row]) -> list[bool]:
        assert self._max_length is not None
        if isinstance(rows, Rows):
            sizes = rows.sizes()
        else:
            sizes = (
                (sum(len(message["content"].encode()) for message in row["messages"]), len(row["messages"]))
                for row in rows
            )
        return [size + (turns + 1) * self._overhead <= self._max_length for size, turns in sizes]

    def _with_system(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        own = [dict(message) for message in messages]
        if self._wording.system is not None and own[0]["role"] != "system":
            own.insert(0, {"role": "system", "content": self._wording.system})
        return own
