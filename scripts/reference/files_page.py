"""docs/files.md: what runs write, and the exit codes."""

from __future__ import annotations

import contextlib
import io
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from text import MADE, table

from swift_r1.cli.main import main
from swift_r1.errors import EXIT_CODES, SwiftError
from swift_r1.rewards.monitor import InvalidRewardMonitor
from swift_r1.rewards.types import InvalidReward, RewardBatch, RewardColumn
from swift_r1.serving.server import bind
from swift_r1.wire.client import RolloutClient

_INTRODUCTION = f"""{MADE}
# Files and exit codes

What a run writes, and what its exit code means. Everything about a run can be read from its folder, during training
or later, here or on another machine: see [seeing-a-run.md](seeing-a-run.md).

- [The folder of a run](#the-folder-of-a-run)
- [A checkpoint](#a-checkpoint)
- [An evaluation](#an-evaluation)
- [Rollout servers](#rollout-servers)
- [Exit codes](#exit-codes)

## The folder of a run

`--output_dir D` creates `D/vN-YYYYmmdd-HHMMSS/`; with `--add_version false` the folder is `D` itself. Each line of a
JSON Lines file is one object; numbers that are not finite are `null`. The last line of a killed run may be
incomplete; resuming truncates the logs to the checkpoint.
"""
_CHECKPOINT = """## A checkpoint

`checkpoint-N` is written under another name, synced, hashed and then renamed, so a checkpoint that exists is complete
([checkpoints.md](checkpoints.md)).
"""
_EVALUATION = """## An evaluation

`swift eval` writes to `--output_dir` (default: `output/eval/<model>`); see [evaluation.md](evaluation.md).
"""
_SERVERS = """## Rollout servers

`swift rollout` leaves nothing behind. While it runs, it keeps weights and sockets in its own folders below `/dev/shm`
and `TMPDIR`, and with `--adapters` a merged model below `TMPDIR`. It removes them when it ends; the next start
removes what a killed server left.
"""
_CODES = """## Exit codes

These are the exit codes of all `swift` commands. An error is one line on standard error, `swift COMMAND: ...`; several
wrong flags give several lines. 1 is a bug in swift-r1 and comes with a traceback.
"""
_NOTES = {
    130: "the current step is finished and a checkpoint saved; a second Ctrl-C ends it at once",
    143: "the same",
}


def page() -> str:
    files = tomllib.loads(Path(__file__).with_name("files.toml").read_text(encoding="utf-8"))
    parts = [_INTRODUCTION, _files(files["run"]), "", *_fields(files["run"]), _CHECKPOINT]
    parts += [_files(files["checkpoint"]), "", _EVALUATION, _files(files["evaluation"]), ""]
    rows = ((str(code), why, _said(code)) for code, why in EXIT_CODES.items())
    return "\n".join(
        [*parts, _SERVERS, _CODES, table(("code", "meaning", "for example"), rows), ""]
    )


def _files(files: Sequence[Mapping[str, Any]]) -> str:
    rows = (
        (f"`{one['path']}`", one["about"], one.get("form", ""), one.get("readers", ""))
        for one in files
    )
    return table(("file", "what it is", "format", "read by"), rows)


def _fields(files: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = []
    for one in files:
        if "fields" in one:
            rows = ((f"`{name}`", about) for name, about in one["fields"].items())
            parts += [
                f"### {one['path'].replace('<', '').replace('>', '')}",
                "",
                table(("field", "what it is"), rows),
                "",
            ]
    return parts


def _said(code: int) -> str:
    return f"`{_EXAMPLES[code]()}`" if code in _EXAMPLES else _NOTES.get(code, "")


def _bad_flag() -> str:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        main(["rlhf", "--learning_rat", "1e-6"])
    return errors.getvalue().splitlines()[0]


def _no_server() -> str:
    try:
        RolloutClient("http://127.0.0.1:9").wait_until_ready(0.2, lambda _line: None)
    except SwiftError as error:
        return f"swift rlhf: {error}".replace(":9 ", ":8000 ").replace("0.2 s", "240 s")
    raise AssertionError("somebody serves on port 9")


def _taken() -> str:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        try:
            bind("127.0.0.1", port)
        except SwiftError as error:
            return f"swift rollout: {error}".replace(str(port), "8000")
    raise AssertionError("a port was given twice")


def _invalid() -> str:
    cause = "ZeroDivisionError: division by zero (plugin.py:12)"
    bad = tuple(InvalidReward(place, cause, "exception") for place in range(64))
    column = RewardColumn("last_number", (float("nan"),) * 64, bad, 0.0)
    batch = RewardBatch(["The sum is 58"] * 64, _columns(), 8, {"global_step": 3})
    try:
        InvalidRewardMonitor(0.2).update([column] * 5, batch)
    except SwiftError as error:
        return f"swift rlhf: {error}"
    raise AssertionError("these rewards are invalid")


def _columns() -> Mapping[str, Sequence[str]]:
    return {}


_EXAMPLES = {2: _bad_flag, 3: _no_server, 4: _taken, 5: _invalid}
