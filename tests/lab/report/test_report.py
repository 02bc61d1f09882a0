"""`swift report` of runs that were made up: the same bytes from everywhere, and something to read of any folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from swift_r1.cli.main import main
from swift_r1.lab.report.blocks import Block, Figures, Note, Report, Table
from swift_r1.lab.report.build import build
from swift_r1.lab.report.html import html
from swift_r1.record.folder import find_runs
from tests.lab.diagnosis.recorded import run_folder
from tests.lab.runs.made import make_run, write_rows
from tests.lab.runs.timed import write_events, write_spans

ROOT = Path(__file__).parents[3]
SECTIONS = [
    "Curves",
    "The same prompts over time",
    "What fails",
    "Best completions",
    "Worst completions",
    "What was run",
]


def section(report: Report, title: str) -> Sequence[Block]:
    [found] = [one.blocks for one in report.sections if one.title == title]
    return found


def notes(report: Report, title: str) -> list[str]:
    return [block.text for block in section(report, title) if isinstance(block, Note)]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.long
def test_the_same_file_from_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here and in another process, place, time zone and locale, of a copy without times."""
    run = make_run(tmp_path / "here" / "v0-run", steps=6)
    before = contents(run)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run)]) == 0
    copy = tmp_path / "there" / "v0-run"
    shutil.copytree(run, copy, copy_function=shutil.copyfile)
    other = {
        "TZ": "Asia/Kathmandu",
        "LC_ALL": "C",
        "LANG": "tr_TR.UTF-8",
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "swift_r1", "report", str(copy), "-o"]
    for name in ("other.html", "other.md"):
        done = subprocess.run(
            [*command, name], cwd=copy, env={**os.environ, **other}, timeout=120, check=False
        )
        assert done.returncode == 0
    assert (tmp_path / "report-v0-run.html").read_bytes() == (copy / "other.html").read_bytes()
    assert main(["report", str(run), "-o", "other.md"]) == 0
    assert (tmp_path / "other.md").read_bytes() == (copy / "other.md").read_bytes()
    pictures = sorted((tmp_path / "other_files").iterdir())
    assert [path.read_bytes() for path in pictures] == [
        (copy / "other_files" / path.name).read_bytes() for path in pictures
    ]
    assert (
        len(pictures) > 2
        and f"](other_files/{pictures[-1].name})" in (tmp_path / "other.md").read_text()
    )
    assert contents(run) == before


@pytest.mark.parametrize(
    "how",
    [
        *("ended", "killed", "no step", "logging alone", "args alone"),
        *(pytest.param(how, marks=pytest.mark.long) for how in ("failed", "one step")),
    ],
)
def test_a_report_of_any_run(tmp_path: Path, how: str) -> None:
    run = make_run(
        tmp_path / "v0-run",
        steps={"one step": 1, "no step": 0}.get(how, 4),
        exit_code={"killed": None, "no step": None, "failed": 5}.get(how, 0),
    )
    for path in list(run.iterdir()) if how.endswith("alone") else ():
        if not path.name.startswith(how.split()[0]):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    report = build(find_runs([run]))
    titles = [section.title for section in report.sections]
    if how in ("ended", "killed", "failed", "one step"):
        assert [title for title in titles if title in SECTIONS] == SECTIONS
        assert report.problems == []
    [line] = report.summary
    assert re.match(r"(reward|no verdict)\b.* · \d steps\b", line)
    assert titles[-1] == "What was run"
    [table, *_] = section(report, "What was run")
    assert isinstance(table, Table)
    state = dict(table.rows)["state"]
    assert state.startswith(
        {"killed": "killed", "no step": "killed", "failed": "failed"}.get(how, state)
    )


def test_the_result_comes_first_with_its_interval_and_why(tmp_path: Path) -> None:
    healthy = run_folder(tmp_path / "healthy", "demo, seed 0")
    alone = build(find_runs([healthy]))
    [first] = alone.summary
    others = notes(alone, "Verdict")
    found = re.match(r"reward (is solved|rises): 0\.\d+ to 0\.\d+, \+0\.\d+ \(95 %: \+", first)
    assert found and not any(line.startswith("Why") for line in others)
    assert re.search(r" · no signs of trouble \(\d+ of \d+ looked for\)$", first)
    assert f'<p class="result">{first[:20]}' in html(alone)
    assert [line.split()[:2] for line in others[:2]] == [
        ["reward", "countdown"],
        ["reward", "format"],
    ]

    run_folder(tmp_path / "silent", "impossible problems")
    both = build(find_runs([tmp_path]))
    assert [line[: line.find(":") + 8] for line in both.summary] == [
        "healthy: reward",
        "silent: reward",
    ]
    assert " · signs of trouble: no signal" in both.summary[1]
    whys = [line for line in notes(both, "Verdict") if ": Why: no signal: 100%" in line]
    assert len(whys) == 1 and whys[0].startswith("silent: ")


def test_paths_are_without_the_folder_of_this_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "v0-run", steps=0)
    content = json.loads((run / "args.json").read_text())
    content["command"] = [
        "swift",
        "rlhf",
        "--model",
        "/home/me/x/models/m",
        "--output_dir",
        "/home/me/x/out",
    ]
    content["args"]["model"] = "/home/me/x/models/m"
    (run / "args.json").write_text(json.dumps(content))
    page = html(build(find_runs([run])))
    assert "/home/me" not in page and "--model models/m" in page and "<td>models/m</td>" in page
    content["command"] += ["--external_plugins", "/opt/x/y/z/plugin.py"]
    (run / "args.json").write_text(json.dumps(content))
    page = html(build(find_runs([run])))
    assert "--model .../models/m" in page and "--external_plugins .../z/plugin.py" in page


def test_damaged_files_cost_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "v0-run")
    write_rows(run / "logging.jsonl", [{"step": 4, "eval/rewards alone/reward": 0.5}, {"step": 5}])
    for name in ("logging.jsonl", "completions.jsonl"):
        data = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(
            b"".join([data[0], b"\xff{not json\n", *data[1:-1], data[-1][:-5]])
        )
    (run / "args.json").write_text('{"args": {"model":')
    (run / "summary.json").write_text("[]")
    write_rows(run / "events.jsonl", [{"time": 1.0, "step": 1, "kind": ["resumed"], "text": "so"}])
    assert main(["report", str(run), "-o", str(tmp_path / "out.html")]) == 0
    said = capsys.readouterr().err
    for name in ("args.json", "summary.json", "logging.jsonl", "completions.jsonl"):
        assert f"v0-run: {name}" in said
    assert "Traceback" not in said and "Worst completions" in (
        page := (tmp_path / "out.html").read_text()
    )
    assert "Evaluation: countdown" in page


def test_the_cost_is_that_of_processes_lost_steps_included(tmp_path: Path) -> None:
    run = make_run(tmp_path / "v0-run")
    write_spans(run, "rank-0", 3, length=600)  # two hours
    write_events(run, (0, 0, "started"), (20_000, 2, "resumed"), (20_000 + 3600, 4, "ended"))
    content = json.loads((run / "args.json").read_text())
    content |= {
        "hardware": {"cpu": "C", "cores": 8, "memory_gib": 9.5, "gpus": ["G", "G", "G"]},
        "plan": content["plan"] | {"world_size": 2},
    }
    (run / "args.json").write_text(json.dumps(content))
    report = build(find_runs([run]))
    [costs] = section(report, "Cost")
    assert (
        isinstance(costs, Table)
        and dict(zip(costs.head, costs.rows[0], strict=True))["hours"] == "3.00"
    )
    assert dict(zip(costs.head, costs.rows[0], strict=True))["GPU hours"] == "6.00"
    [facts, *_] = section(report, "What was run")
    assert isinstance(facts, Table)
    assert ["hardware", "2 processes, 3 x G, 8 cores of C, 9.5 GiB"] in facts.rows
    assert ["state", "ended at step 4 of 4 (resumed 1 x)"] in facts.rows


def test_seeds_are_one_curve_and_other_flags_another(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"v{seed}-run", seed=seed) for seed in range(3)]
    content = json.loads((runs[2] / "args.json").read_text())
    content["args"]["learning_rate"] = 1.0
    (runs[2] / "args.json").write_text(json.dumps(content))
    report = build(find_runs([tmp_path]))
    assert report.title == "Report: v0-run and 1 more (seeds 0, 1), v2-run"
    [table, *_] = section(report, "What was run")
    assert isinstance(table, Table) and ["seeds", "0 (v0-run), 1 (v1-run)", ""] in table.rows
    [curves, *_] = section(report, "Curves")
    assert isinstance(curves, Figures) and curves.figures[0].svg.count("fill-opacity: 0.2") == 1


def test_a_file_that_is_no_report_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "my  rün" / "v0", steps=0)
    mine = tmp_path / "report.html"
    mine.write_text("# see swift report\n")
    monkeypatch.chdir(tmp_path)
    wrong = [
        ([str(run), "-o", "report.html"], "report.html exists and is not a report"),
        ([str(run), "-o", "nowhere/out.html"], "there is no folder nowhere"),
        ([str(run), "-o", "/proc/out.html"], "cannot be written"),
        ([str(run), "-o", "out.pdf"], "ends in .pdf"),
        ([str(run), "-o", "train.py"], "ends in .py"),
        ([str(run / "args.json")], "args.json is a file"),
    ]
    for words, message in wrong:
        assert main(["report", *words]) == 2
        assert message in capsys.readouterr().err
    assert mine.read_text() == "# see swift report\n" and sorted(os.listdir(tmp_path)) == [
        "my  rün",
        "report.html",
    ]
    for _ in range(2):  # a report is made again over the one before
        assert main(["report", str(run), "-o", "."]) == 0
    assert (tmp_path / "report-v0.html").is_file()
    monkeypatch.chdir(run)
    assert main(["report", "."]) == 2
    assert "name a file with -o" in capsys.readouterr().err
    assert main(["report"]) == 2


def test_the_first_and_the_last_evaluation_stand_beside_each_other(tmp_path: Path) -> None:
    run = make_run(tmp_path / "v0-run", steps=4)
    names = ("accuracy", "avg@2", "avg@2/low", "avg@2/high")
    before = {"step": 0, **{f"eval/countdown/{name}": 0.25 for name in names}}
    log = run / "logging.jsonl"
    log.write_text(json.dumps(before) + "\n" + log.read_text())
    report = build(find_runs([run]))
    [table] = section(report, "Evaluation")
    assert isinstance(table, Table)
    ends = ["0.250 (step 0)", "0.500 (step 4)", "0.200 to 0.800"]
    assert table.rows == [["countdown", "v0-run", "accuracy", *ends]]
    assert " · accuracy on countdown 0.250 to 0.500 · " in report.summary[0]
