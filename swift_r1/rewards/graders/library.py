"""math_verify, kept from what it cannot bear: it computes exactly and without bounds."""

from __future__ import annotations

import logging
import threading
from typing import Any

from swift_r1.rewards.graders.size import bearable

LIBRARY_SECONDS = 5  # of one call, where it runs in the main thread


def library_equal(found: str, given: str, right: str) -> bool:
    """math_verify's verdict on an answer (as `found`, and tidied) and a tidied gold answer; what explodes is wrong."""
    if len(given) > 400 or len(right) > 400 or not given:
        return False
    return verified(parsed(f"\\boxed{{{right}}}"), parsed(f"\\boxed{{{found}}}"))


def parsed(text: str, **how: Any) -> list[Any]:
    """What the library reads in a text: sympy objects, not yet evaluated, and strings; empty where it reads nothing."""
    from math_verify import parse

    _without_warnings()
    return parse(text, parsing_timeout=_time_limit(), raise_on_error=False, **how)


def verified(gold: list[Any], answer: list[Any]) -> bool:
    """Whether the library takes two things it has read as equal; an answer that explodes, or takes long, is not."""
    from math_verify import verify

    if not gold or not all(isinstance(item, str) or bearable(item) for item in answer):
        return False
    return bool(verify(gold, answer, timeout_seconds=_time_limit(), raise_on_error=False))


def _without_warnings() -> None:
    """An answer that takes too long is wrong, which is no news: not a line on standard error for each."""
    logger = logging.getLogger("math_verify")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)


def _time_limit() -> int | None:
    """Of one call. The library's time-outs are alarm signals, which only the main thread can have."""
    return LIBRARY_SECONDS if threading.current_thread() is threading.main_thread() else None
