"""Tokens of an expression in LaTeX or plain text."""

from __future__ import annotations

import re

from swift_r1.rewards.graders.bounded import Unreadable

MAX_LENGTH = 400  # characters

_TOKEN = re.compile(
    r"\s+|(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<command>\\[A-Za-z]+|\\[{}|])|(?P<symbol>[-+*/^_!()\[\]{}|'])"
    r"|(?P<letter>[A-Za-z])"
)
# Written without the backslash, as plain text has them.
_NAME = re.compile(
    r"(?<![A-Za-z\\])(sqrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|exp|ln|log|pi)(?![A-Za-z])"
)


def tokens(text: str) -> list[str]:
    r"""Numbers, commands such as `\frac` (also where they are written without the backslash), symbols and letters.

    Raises:
        Unreadable: too long, or a character that no expression has.
    """
    if len(text) > MAX_LENGTH:
        raise Unreadable("too long")
    text = _NAME.sub(r"\\\1 ", text)
    found, position = [], 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise Unreadable(f"unexpected {text[position]!r}")
        if token.lastgroup:
            found.append(token[0])
        position = token.end()
    return found
