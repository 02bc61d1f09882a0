"""The flags of `swift view`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from swift_r1.flags.fields import Scope, flag, scope_faults
from swift_r1.flags.parser import API_KEY_VARIABLE, Command
from swift_r1.flags.world import World

DEFAULT_PORT = 7860
_PAGE = Scope(lambda args: not args.text and args.trace is None, "without the page (--text, --trace)")
_TEXT = Scope(lambda args: args.text, "without --text")


@dataclass(frozen=True, kw_only=True)
class ViewArguments(Command):
    """View."""

    command: ClassVar[str] = "view"
    runs: list[str] = flag([], "folders of runs, or that hold runs (default: output)", positional=True)
    host: str = flag("127.0.0.1", "address of the page; any except loopback needs --api_key", _PAGE)
    port: int = flag(DEFAULT_PORT, "port of the page", _PAGE, at_least=1, at_most=65535)
    api_key: str | None = flag(
        None, "key of the page (better: in SWIFT_API_KEY): once as ?key=..., or in a header", secret=API_KEY_VARIABLE
    )
    open: bool = flag(False, "open the page in this machine's browser", _PAGE)
    text: bool = flag(False, "overview and groups in the terminal, instead of the page")
    step: int | None = flag(None, "the step whose groups are shown (default: the last)", _TEXT, at_least=0)
    prompt: str | None = flag(None, "show the groups of this prompt, by its prompt_id", _TEXT)
    trace: str | None = flag(None, "write what every process did when to this file, for ui.perfetto.dev")

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from scope_faults(self, given)
        if self.text and self.trace is not None:
            yield "--text and --trace are two things to make: give one of them"
