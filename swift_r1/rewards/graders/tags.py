"""Finding `<answer>` blocks, in time linear in the text whatever it holds."""

from __future__ import annotations

from collections.abc import Iterator

OPEN, CLOSE = "<answer>", "</answer>"


def answers(text: str) -> Iterator[str]:
    """The contents of the answer blocks from left to right, each up to the nearest closing tag; any lines."""
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        start += len(OPEN)
        end = text.find(CLOSE, start)
        if end < 0:
            return
        yield text[start:end]
        position = end + len(CLOSE)


def first_answer(text: str) -> str | None:
    """The first answer block's contents."""
    return next(answers(text), None)


def last_answer(text: str) -> str | None:
    """The last answer block's contents."""
    return next(iter([*answers(text)][-1:]), None)
