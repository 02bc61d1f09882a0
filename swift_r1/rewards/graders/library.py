"""math_verify, kept from what it cannot bear: it computes exactly and without bounds."""

from __future__ import annotations

import re
import threading
from typing import Any

LIBRARY_SECONDS = 5  # of one call, where it runs in the main thread
# What makes the library's exact arithmetic explode: towers of powers, huge exponents and factorials.
EXPLOSIVE = re.compile(
    r"(?:\^|\*\*)[^+]{0,40}?(?:\^|\*\*)|(?:\^|\*\*)\s*[{(]*\s*-?[0-9.]*[0-9]{4}|[0-9]{3}\s*\)?\s*!|!\s*!"
)


def library_equal(found: str, given: str, right: str) -> bool:
    """math_verify's verdict on an answer (as `found`, and tidied) and a tidied gold answer; what explodes is wrong."""
    from math_verify import parse, verify

    if len(given) > 400 or len(right) > 400 or EXPLOSIVE.search(given) or not given:
        return False
    limit = time_limit()
    parsed = parse(f"\\boxed{{{found}}}", parsing_timeout=limit, raise_on_error=False)
    expected = _library_gold(right)
    if not parsed or not expected:
        return False
    return bool(verify(expected, parsed, timeout_seconds=limit, raise_on_error=False))


def _library_gold(right: str) -> Any:
    from math_verify import parse

    return parse(f"\\boxed{{{right}}}", parsing_timeout=time_limit(), raise_on_error=False)


def time_limit() -> int | None:
    """Of one call. The library's time-outs are alarm signals, which only the main thread can have."""
    return LIBRARY_SECONDS if threading.current_thread() is threading.main_thread() else None
