"""The typed ends of the data package: what a dataset row becomes before it is rolled out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    """

    prompt_id: str
    dataset: str
    messages: tuple[Mapping[str, str], ...]
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    response_prefix: str = ""
    turn_end: int | None = None
