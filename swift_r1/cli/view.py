"""`swift view`: shows runs on a page, in the terminal, or as a trace file. Writes nothing in their folders."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from swift_r1.errors import EXIT_OK, UsageError
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.server import host_faults
from swift_r1.flags.view import ViewArguments

_USAGE = """swift view [RUN ...] [--flag value ...]

Shows runs on a page in your browser, while they train or later: curves, completions, tokens, groups, time. RUN is the
folder of a run, or one that holds runs (default: output; the newest is shown first). It only reads these folders."""
_EXAMPLES = """
swift view
swift view output/model/v0-20261121-120000 output/model/v1-20261121-130000 --port 7861
swift view --text output/model/v0-20261121-120000
swift view --trace out.pftrace output/model/v0-20261121-120000
SWIFT_API_KEY=secret swift view --host 0.0.0.0
"""
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
    if args.text:
        from swift_r1.lab.view.text import show_text

        return show_text(runs, args.step, args.prompt)
    if args.trace is not None:
        from swift_r1.lab.view.trace import write_trace

        write_trace(runs[-1], Path(args.trace))
        return EXIT_OK
    # Before the page's libraries are loaded, which takes a second or two.
    from swift_r1.serving.server import bind

    listener = bind(args.host, args.port)
    from swift_r1.lab.view.server import serve

    serve(listener, args.runs, args.api_key, open_browser=args.open)


def check_packages() -> None:
    """Raises UsageError: the extra `view` is not installed."""
    missing = [name for name in ("nicegui", "duckdb") if find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} not installed: pip install 'swift-r1[view]'")
