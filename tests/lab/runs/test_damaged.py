"""Whatever bytes of a run's files are lost or changed: what can be shown is shown, and never a traceback."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.lab.report.parts import facts
from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.progress import progress_of
from swift_r1.lab.runs.query import CompletionQuery
from swift_r1.lab.runs.timeline import Timeline
from swift_r1.record.folder import find_runs
from swift_r1.record.metric_log import MetricLog
from swift_r1.record.token_reader import TokenRecord
from tests.lab.runs.made import make_run, write_rows

pytest.importorskip("duckdb")

FILES = (
    *(
        "args.json",
        "summary.json",
        "logging.jsonl",
        "completions.jsonl",
        "eval_completions.jsonl",
        "events.jsonl",
    ),
    *(
        "spans/rank-0.jsonl",
        "tokens/step-000001.parquet",
        "tokens/vocabulary.parquet",
    ),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(
        tmp_path_factory.mktemp("whole") / "run", steps=2, groups=2, per_group=2, words=3
    )
    (run / "spans").mkdir()
    spans = [{"start": 1.0 + at, "end": 1.5 + at, "name": "train", "step": at} for at in range(4)]
    write_rows(run / "spans" / "rank-0.jsonl", spans)
    return run


def look(run: Path) -> list[str]:
    """Everything that is shown of a run; returns what is said to be wrong."""
    [found] = find_runs([run])
    problems = []
    for name in ("completions", "eval_completions"):
        with CompletionTable(run / f"{name}.jsonl") as table:
            table.refresh()
            for order in ("reward", "target"):
                table.page(CompletionQuery(order_by=order, where=[("target", ">", 0)]))
            table.page(CompletionQuery(text="the"))
            for step in table.steps():
                table.group(step, 0)
            for row in table.failure_classes():
                assert sum(value for name, value in row.items() if name != "step") > 0
            problems += table.problems
    record = TokenRecord(run)
    for step in record.steps():
        for one in record.completions(step):
            for row in record.completion(one.round_step, one.request_id, one.number):
                record.pieces(row.token_ids or [])
    log, timeline = MetricLog(run), Timeline(run)
    log.refresh()
    timeline.refresh()
    for lane in timeline.lanes:
        timeline.totals(lane)
    assert timeline.marks is not None
    assert progress_of(found, log)
    assert facts(found) is not None
    problems += [*found.problems, *record.problems, *log.problems, *timeline.problems]
    assert all(problem and "\n" not in problem for problem in problems)
    return problems


def test_a_whole_run_has_no_problems(whole):
    assert look(whole) == []


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_cut_or_changed_at_any_byte(whole, tmp_path_factory, data):
    run = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(whole, run)
    for name in data.draw(st.lists(st.sampled_from(FILES), min_size=1, max_size=3, unique=True)):
        content = bytearray((run / name).read_bytes())
        if data.draw(st.booleans(), f"cut {name}"):
            del content[data.draw(st.integers(0, len(content) - 1), f"{name} ends at") :]
        else:
            for _ in range(data.draw(st.integers(1, 4))):
                place = data.draw(st.integers(0, len(content) - 1), f"{name} at")
                content[place] = data.draw(st.integers(0, 255), f"{name} is")
        (run / name).write_bytes(content)
    look(run)
    shutil.rmtree(run.parent)


@pytest.mark.parametrize("names", [FILES[:1], FILES[1:]])
def test_pipes_and_devices_stop_nothing(whole, tmp_path, names):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for place, name in enumerate(names):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name) if place % 2 else (run / name).symlink_to("/dev/zero")
    problems = look(run)
    assert len(set(problems)) == len(set(names))
    assert all(problem.endswith("not a regular file") for problem in problems)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_ends_in_the_middle(whole, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: len(content) // 2 - 7])
    [problem] = look(run)
    assert problem.startswith(("tokens/" if name.startswith("tokens") else "") + Path(name).name)
