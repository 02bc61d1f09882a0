"""`swift sweep`: the runs of a file beside and after each other, and a report of all."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from swift_r1.cli.files import naming
from swift_r1.cli.report import write_report
from swift_r1.errors import EXIT_OK, EXIT_RUN_FAILED, RunFailed, UsageError
from swift_r1.flags.parser import is_flag, parse_arguments
from swift_r1.lab.sweep.flags import SweepArguments
from swift_r1.lab.sweep.places import RunSlot, find_places
from swift_r1.lab.sweep.points import PlannedRun, check_runs, plan_runs
from swift_r1.record.folder import find_runs
from swift_r1.runtime.processes import run_folder_held, say

_USAGE = """swift sweep FILE.yaml [--parallel N] [--dry_run] [--flag value ...]

Runs `swift rlhf` at each point of a grid or a list, with each seed, on this machine: one after another or several at
a time, each on its own GPUs or cores. All flags are checked before the first run starts. It ends with a table of the
points, a report of all runs, and sweep.json. After an interruption the same command continues. FILE has these flags:

  flags: {rlhf_type: grpo, model: models/smollm2-135m, ...}    # of `swift rlhf`, as in its own config files
  grid: {learning_rate: [1e-6, 3e-6], num_generations: [8, 16]}
  seeds: [0, 1, 2]"""
_EXAMPLES = """
swift sweep examples/countdown_demo/sweep.yaml
swift sweep sweep.yaml --dry_run
swift sweep sweep.yaml --parallel 1 --output_dir /data/sweep
"""
HELP = (_USAGE, SweepArguments, _EXAMPLES)


def run(words: Sequence[str]) -> int:
    """Runs the command.

    Raises:
        UsageError: bad flags, plugin, data or model of any run, or another sweep in the folder.
        RunFailed: sweep.json cannot be written.
    """
    if not words or is_flag(words[0]):
        raise UsageError("name the file first: swift sweep sweep.yaml")
    args = parse_arguments(SweepArguments, words)
    file = words[0]
    folder = Path(args.output_dir or f"output/{Path(file).stem}")
    planned = plan_runs(args, file, folder, os.environ)
    places = find_places(args.parallel, planned, os.environ)
    seeds = f" x {len(args.seeds)} seeds" if args.seeds else ""
    beside = f"{len(places)} beside each other" if len(places) > 1 else "one after another"
    points = len({planned_run.point for planned_run in planned})
    say(f"{points} points{seeds}: {len(planned)} runs, {beside}, in {folder}", "sweep")
    if args.dry_run:
        for number, planned_run in enumerate(planned):
            print(f"{places[number % len(places)]} swift rlhf {shlex.join(planned_run.words)}")
        return EXIT_OK
    with naming(f"--output_dir {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    with run_folder_held(folder, wait_s=1):
        return _sweep(args, file, folder, planned, places)


def _sweep(
    args: SweepArguments,
    file: str,
    folder: Path,
    planned: Sequence[PlannedRun],
    places: Sequence[RunSlot],
) -> int:
    from rich.live import Live

    from swift_r1.lab.sweep.record import ranked, read_stopped, write_record
    from swift_r1.lab.sweep.running import Sweep, SweepRun
    from swift_r1.lab.sweep.table import change, print_section, runs_table, section
    from swift_r1.runtime.terminal import Terminal

    console = Terminal(stderr=True)
    live = Live(console=console, auto_refresh=False)

    def changed(run: SweepRun) -> None:
        try:
            write_record(folder, file, sweep, ranked(sweep))
        except RunFailed as error:
            # no reason to end runs, which may have room elsewhere; at the end it is one to fail
            say(str(error), "sweep")
        if not console.is_terminal or run.why:  # which a table has no room for
            console.print(change(sweep, run), soft_wrap=True)

    def show() -> None:
        if console.is_terminal:
            live.update(runs_table(sweep), refresh=True)

    sweep = Sweep(args, planned, places, read_stopped(folder, args.settings), changed, show)
    done = sweep.count("ended", "stopped")
    if done < len(planned):
        check_runs(args, file, planned, os.environ)
    if done:
        say(f"{done} of {len(planned)} runs are done already", "sweep")
    try:
        with live:
            try:
                sweep.run()
            finally:
                live.update(runs_table(sweep))
    except BaseException:
        say("the same command continues from here", "sweep")
        raise
    order = ranked(sweep)
    write_record(folder, file, sweep, order)
    comparison = section(sweep, order)
    report = folder / "report.html"
    print_section(comparison, Terminal())
    try:
        for problem in write_report(find_runs([folder]), report, "html", [comparison]):
            say(problem, "sweep")
        print(f"report: {report}")
    except UsageError as error:
        say(f"no report: {error}", "sweep")
    return EXIT_OK if sweep.count("ended", "stopped") == len(planned) else EXIT_RUN_FAILED
