"""Looking at a run changes nothing in its folder, and needs no permission to write there."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.runs.made import make_run, write_rows

pytest.importorskip("duckdb")

LOOK = """
import sys
from pathlib import Path
from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.record.folder import find_runs
from swift_r1.lab.runs.query import CompletionQuery
from swift_r1.lab.runs.timeline import Timeline
from swift_r1.record.token_reader import TokenRecord
from swift_r1.lab.view.text import show_text

runs = find_runs(sys.argv[1:])
try:
    (runs[0].path / "new").touch()
    raise SystemExit("the folder can be written")
except PermissionError:
    pass
assert [run.status for run in runs] == ["killed"]
for name in ("completions", "eval_completions"):
    with CompletionTable(runs[0].path / f"{name}.jsonl") as table:
        assert table.refresh() > 0
        assert table.page(CompletionQuery(text="make", order_by="target", where=[("nums", "!=", 5)]))
        assert table.failure_classes() and table.prompts("c")[1]
        assert table.problems == []
record = TokenRecord(runs[0].path)
assert record.probes_at(record.probe_steps()[-1]) and record.text(record.completions(1)[0].token_ids or [65])
timeline = Timeline(runs[0].path)
timeline.refresh()
assert timeline.marks
assert show_text(runs, None) == 0
"""


def obey_modes() -> None:
    """The program that is run next may not write to read-only files, though it be root's."""
    for capability in (1, 2, 3):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
        ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP


def state(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        own = path.stat()
        found[str(path)] = (
            own.st_mtime_ns,
            own.st_ctime_ns,
            own.st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
    return found


def test_a_run_is_only_read(tmp_path):
    run = make_run(tmp_path / "run", exit_code=None)
    (run / ".lock").touch()
    (tmp_path / "closed").mkdir(mode=0)  # another's, beside it
    (run / "spans").mkdir()
    write_rows(
        run / "spans" / "rank-0.jsonl", [{"start": 1.0, "end": 2.0, "name": "train", "step": 1}]
    )
    for path in [run, *run.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = state(run)
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOOK, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=obey_modes,
        )
        assert done.returncode == 0, done.stderr
        assert state(run) == before
    finally:
        for path in [run, *run.rglob("*")]:
            path.chmod(0o755)
