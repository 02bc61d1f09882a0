"""From a row to the prompt exactly as the model sees it: chat template, then token ids, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from swift_r1.data.rows import RESERVED, Row
from swift_r1.data.types import Prompt
from swift_r1.errors import UsageError

_logger = logging.getLogger("swift_r1.data")


class PromptEncoder:
    """Renders and tokenises prompts with the tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer.
        system: put first where a row has no system message.
        max_length: longest prompt in tokens.

    Raises:
        UsageError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, system: str | None = None, max_length: int | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError("the model's tokenizer has no chat template: use a model folder that has one")
        self.tokenizer = tokenizer
        self._system = system
        self._max_length = max_length
        # Bytes that the template adds to a message, measured; what is short enough in bytes is so in tokens.
        self._overhead = len(self.render([{"role": "user", "content": "x"}]).encode()) if max_length else 0

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt's text, up to and with the start of the model's turn."""
        return self.tokenizer.apply_chat_template(
            self._with_system(messages), tokenize=False, add_generation_prompt=True
        )

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of rendered text; nothing is put before or behind them."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(self, row: Row) -> Prompt | None:
        """The prompt of a row of `load_rows`; None when it is longer than `max_length`."""
        messages = self._with_system(row["messages"])
        text = self.render(row["messages"])
        token_ids = self.tokenize(text)
        if self._max_length is not None and len(token_ids) > self._max_length:
            return None
        columns = {key: value for key, value in row.items() if key not in RESERVED and key != "messages"}
        return Prompt(
            prompt_id=row["prompt_id"],
            dataset=row["dataset"],
            messages=tuple(messages),
            text=text,
            token_ids=token_ids,
            columns=columns,
        )

    def fitting(self, rows: Sequence[Row], what: str = "training") -> list[Row]:
        """The rows whose prompts are at most `max_length` tokens; what is left out is logged.

        Only rows that are long in bytes are tokenised here, so a million short rows cost little.

        Raises:
            UsageError: no row is left.
        """
        if self._max_length is None or not rows:
            return list(rows)
        kept = [row for row in rows if self._surely_fits(row) or self.encode(row) is not None]
        if not kept:
            raise UsageError(f"all {len(rows)} {what} prompts are longer than --max_length {self._max_length} tokens")
        if len(kept) < len(rows):
            left_out = len(rows) - len(kept)
            _logger.warning(
                "%d of %d %s prompts left out: longer than --max_length %d tokens",
                *(left_out, len(rows), what, self._max_length),
            )
        return kept

    def _surely_fits(self, row: Row) -> bool:
        assert self._max_length is not None
        size = sum(len(message["content"].encode()) + self._overhead for message in row["messages"])
        return size + self._overhead <= self._max_length

    def _with_system(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        own = [dict(message) for message in messages]
        if self._system is not None and own[0]["role"] != "system":
            own.insert(0, {"role": "system", "content": self._system})
        return own
