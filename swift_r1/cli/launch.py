"""`swift launch`: the servers and the trainer of a run, on this machine or on many, from one file."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from swift_r1.cli.files import naming
from swift_r1.errors import EXIT_OK, UsageError
from swift_r1.flags.fields import from_words, spellings
from swift_r1.flags.output import LAST
from swift_r1.flags.parser import (
    API_KEY_VARIABLE,
    flags_with_values,
    is_flag,
    parse_arguments,
    spelling,
    unknown_flag,
    without_flag,
)
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.sft import SftArguments
from swift_r1.flags.world import World
from swift_r1.fleet.backends import BACKENDS
from swift_r1.fleet.commands import shared_variables
from swift_r1.fleet.dry_run import dry_run
from swift_r1.fleet.flags import LaunchArguments
from swift_r1.fleet.run_file import RunFile, kept_in, read_run_file
from swift_r1.launch.run_folder import holds_run, make_run_folder, run_folder_faults
from swift_r1.record.folder import WARM_START, RunFolder, newest_version
from swift_r1.runtime.processes import run_folder_held, say

_USAGE = f"""swift launch RUN.yaml [--on {"|".join(BACKENDS)}] [--dry_run] [--flag value ...]

Starts a run's rollout servers, judge and teacher and its trainer, gives them keys and addresses, watches them, restarts
what fails, and ends everything with the run. RUN.yaml has flags and a table of roles (docs/launch.md):

  sft: {{...}}                                                  # flags of swift sft: a warm start before, or none
  rlhf: {{rlhf_type: grpo, model: models/smollm2-135m, ...}}    # flags of swift rlhf
  rollout: {{vllm_max_model_len: 1024}}                         # flags of swift rollout
  roles:
    train: {{nodes: 1, gpus: 2}}
    rollout: {{replicas: 2, gpus: 1}}

Flags that are not the launch's own are those of swift rlhf, and win over the file. The launch's own:"""
_EXAMPLES = """
swift launch examples/smollm2_countdown/run.yaml
swift launch run.yaml --dry_run
swift launch run.yaml --on ssh --learning_rate 2e-6
swift launch run.yaml --resume_from_checkpoint last
"""
HELP = (_USAGE, LaunchArguments, _EXAMPLES)


def run(words: Sequence[str]) -> int:
    """Runs the command.

    Raises:
        UsageError: bad flags or file; nodes that cannot be reached or have too little; another launch in the folder.
        RunFailed: a server cannot be started.
    """
    if not words or is_flag(words[0]):
        raise UsageError("name the file first: swift launch run.yaml")
    args, overrides = _read_flags(words[1:])
    run_file = read_run_file(words[0], overrides)
    module = importlib.import_module(BACKENDS[args.on])
    if hasattr(module, "hand_over"):
        code = module.hand_over(run_file, without_flag(words, "dry_run"), args.dry_run)
        if code is not None:
            return int(code)
    key = os.environ.get(API_KEY_VARIABLE) or secrets.token_hex(16)
    environ = shared_variables(run_file, key, os.environ)
    if args.dry_run:
        planned = getattr(module, "planned", module.open_backend)
        nodes = planned(run_file, args.silence_timeout)
        for part, own in run_file.parts(str(run_file.args.output_dir)):
            print(dry_run(part, own, nodes, environ))
        return EXIT_OK
    faults = run_folder_faults(run_file.args, World())
    if faults:
        raise UsageError(*faults)
    backend = module.open_backend(run_file, args.silence_timeout)
    resume = run_file.args.resume_from_checkpoint == LAST
    run_folder = _folder(run_file, resume)
    launched = partial(_launched, backend, args, environ, run_folder / "launch", resume)
    code = EXIT_OK
    for part, own in run_file.parts(str(run_folder)):
        folder = Path(own)
        warms = part.command == SftArguments.command
        done = resume and warms and RunFolder(folder, folder.name).status == "ended"
        code = EXIT_OK if done else launched(part, folder)
        if code != EXIT_OK:
            break
        if warms:
            _say_kept(part, folder)
    output_dir = Path(str(run_file.args.output_dir))
    return (
        int(module.after(code, folder, output_dir, args.max_restarts))
        if hasattr(module, "after")
        else code
    )


def _say_kept(part: RunFile, folder: Path) -> None:
    """Says which checkpoint of a warm start the run begins with."""
    best = part.args.metric_for_best_model
    which = "its last checkpoint" if best is None else f"its best checkpoint by {best}"
    kept = os.path.relpath(os.path.realpath(kept_in(part, str(folder))))
    say(f"sft has ended; rlhf begins with {which}, {kept}", "launch")


def _read_flags(words: Sequence[str]) -> tuple[LaunchArguments, dict[str, Any]]:
    """Returns the launch's own flags, and those of `swift rlhf` with their values. Raises UsageError."""
    own = spellings(LaunchArguments)
    others = spellings(RlhfArguments)
    kept: list[str] = []
    overrides: dict[str, Any] = {}
    faults: list[str] = []
    for written, values in flags_with_values(LaunchArguments, words, faults):
        name = spelling(written)
        if name in others:
            try:
                overrides[name] = from_words(others[name], values)
            except (ValueError, UsageError) as error:
                faults += error.faults if isinstance(error, UsageError) else [f"{written} {error}"]
        elif name in own or difflib.get_close_matches(name, own, n=1):
            kept += [written, *values]
        else:
            faults.append(unknown_flag(RlhfArguments, written))
    try:
        args = parse_arguments(LaunchArguments, kept)
    except UsageError as error:
        raise UsageError(*faults, *error.faults) from error
    if faults:
        raise UsageError(*faults)
    return args, overrides


def _folder(run_file: RunFile, resume: bool) -> Path:
    """Returns the run's folder, made here; that of the newest run in `--output_dir` where it resumes."""
    base = Path(str(run_file.args.output_dir))
    if resume and run_file.args.add_version:
        newest = newest_version(base)[1]
        if newest is not None and (holds_run(newest) or holds_run(newest / WARM_START)):
            return base / newest.name
        say(f"there is no run in {newest or base} yet: starting from the beginning", "launch")
    made = make_run_folder(run_file.args)
    return base / made.name if run_file.args.add_version else base


@contextmanager
def _closed_allowed(stream: TextIO) -> Iterator[None]:
    """Silences the stream from then on if nobody can read it any more: a terminal that is closed, or a pipe that nobody
    reads, ends what is shown, not the run."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def _say(text: str) -> None:
    """Prints a line about the launch."""
    with _closed_allowed(sys.stderr):
        say(text, "launch")


def _show(text: str) -> None:
    """Shows what the trainer says, whole lines of it."""
    with _closed_allowed(sys.stdout):
        print(text, end="", flush=True)


def _launched(
    backend: Any,
    args: LaunchArguments,
    environ: dict[str, str],
    logs: Path,
    resume: bool,
    run_file: RunFile,
    folder: Path,
) -> int:
    """Starts a part of the run and returns its exit code once it has ended."""
    from swift_r1.fleet.driver import Driver

    with naming(str(logs)):
        logs.mkdir(exist_ok=True)
    with run_folder_held(logs, wait_s=1):
        _say(f"run folder: {folder}")
        driver = Driver(
            run_file,
            backend,
            args,
            environ,
            str(folder),
            logs,
            resume,
            _say,
            _show,
        )
        try:
            return driver.run()
        except UsageError:
            run_folder = logs.parent
            begun = holds_run(run_folder) or any(logs.glob("*.log"))
            if run_file.args.add_version and not begun:
                # `--resume_from_checkpoint last` would take it for the newest run
                shutil.rmtree(run_folder)
            raise
