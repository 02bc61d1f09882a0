"""Text of models, runs and servers on its way to a terminal or a page: nothing in it is a command to either."""

from __future__ import annotations

import logging
import re
import sys
from typing import TextIO

# C0 without tab and line feed; DEL; C1; soft hyphen; zero-width space and bidi controls; line and paragraph separator;
# invisible operators; BOM; half surrogates (which UTF-8 cannot hold); noncharacters and tags.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)
_PASSWORD = re.compile(r"(?<=://)[^/\s@]*@")


def visible(text: str) -> str:
    """Returns the text with a sign for each character that cannot be seen: `␀`, `␛`, `U+202E`; not escaped."""
    return UNSEEN.sub(_sign, text)


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"U+{code:04X}"


def harmless(text: str) -> str:
    """Returns a message of ours or of a library, which may quote what a user, a model or a server wrote: without
    control characters, and with `***` for what addresses have before an `@`."""
    return _PASSWORD.sub("***@", visible(text))


def log_visibly(level: int, form: str = "%(who)s%(message)s") -> None:
    """Sets up logging for a process; what is logged may hold what a model wrote. `who` in the form is the module of a
    library, `warning: ` or `error: ` of ours, and nothing for what we merely say."""
    handler = _StandardError()
    handler.setFormatter(_Visible(form))
    logging.basicConfig(level=level, handlers=[handler])


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to standard error as it is at the time: while bars are drawn, what writes above them."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.who = f"{record.name}: "
        if record.name.partition(".")[0] == "swift_r1":
            record.who = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        return harmless(super().format(record))
