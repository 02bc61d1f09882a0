"""`swift view`: shows runs on a page, or writes what one did when as a trace file. Writes nothing in their folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from swift_r1.errors import EXIT_OK, UsageError
from swift_r1.flags.fields import Scope, flag, scope_faults
from swift_r1.flags.parser import API_KEY_VARIABLE, Command, parse_arguments
from swift_r1.flags.server import host_faults
from swift_r1.flags.world import World

_USAGE = """swift view [RUN ...] [--flag value ...]

Shows runs on a page in your browser, while they train or later: curves, completions, tokens, groups, time. RUN is the
folder of a run, or one that holds runs (default: output; the newest is shown first). It only reads these folders."""
_EXAMPLES = """
swift view
swift view output/model/v0-20261121-120000 output/model/v1-20261121-130000 --port 7861
swift view --trace out.pftrace output/model/v0-20261121-120000
SWIFT_API_KEY=secret swift view --host 0.0.0.0
"""

DEFAULT_PORT = 7860
_PAGE = Scope(lambda args: args.trace is None, "without the page (--trace)")


@dataclass(frozen=True, kw_only=True)
class ViewArguments(Command):
    """View."""

    command: ClassVar[str] = "view"
    runs: list[str] = flag(
        [], "folders of runs, or that hold runs (default: output)", positional=True
    )
    host: str = flag(
        "127.0.0.1", "host to listen on; anything but localhost requires --api_key", _PAGE
    )
    port: int = flag(DEFAULT_PORT, "port of the page", _PAGE, at_least=1, at_most=65535)
    api_key: str | None = flag(
        None,
        "key of the page (better: in SWIFT_API_KEY): once as ?key=..., or in a header",
        secret=API_KEY_VARIABLE,
    )
    trace: str | None = flag(
        None, "write what every process did when to this file, for ui.perfetto.dev"
    )

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from scope_faults(self, given)


HELP = (_USAGE, ViewArguments, _EXAMPLES)


def run(words: Sequence[str]) -> int:
    """Runs the command; does not come back where the page starts, which a signal ends.

    Raises:
        UsageError: bad flags or folders, or the extra is not installed.
        PortTaken: another process listens on the port.
    """
    args = parse_arguments(ViewArguments, words)
    faults = host_faults(args.host, args.api_key)
    if faults:
        raise UsageError(*faults)
    check_packages()
    from swift_r1.record.folder import find_runs

    runs = find_runs(args.runs)
    if args.trace is not None:
        from swift_r1.lab.view.trace import write_trace

        write_trace(runs[-1], Path(args.trace))
        return EXIT_OK
    # Before the page's libraries are loaded, which takes a second or two.
    from swift_r1.serving.server import bind

    listener = bind(args.host, args.port)
    from swift_r1.lab.view.server import serve

    serve(listener, args.runs, args.api_key)


def check_packages() -> None:
    """Raises UsageError: the extra `view` is not installed."""
    missing = [name for name in ("nicegui", "duckdb") if find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} not installed: pip install 'swift-r1[view]'")
