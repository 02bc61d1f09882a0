"""What a run that trains says of itself in its log: the verdict in rounds 8, 16, 32, ... and at its end."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from swift_r1.cli.main import main
from swift_r1.lab.diagnosis.watch import Diagnosis, LiveDiagnosis
from tests.lab.diagnosis.recorded import RUNS, rows_of, run_folder

HEALTHY = "demo, seed 0"


def train(watch: LiveDiagnosis, run: Path, name: str, first: int, last: int) -> None:
    """Logs lines `first + 1` to `last` of the recorded run."""
    [recorded] = [one for one in RUNS if one["name"] == name]
    for row in rows_of(recorded)[first:last]:
        with (run / "logging.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        watch.line()


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int, str]]:
    """Returns the level, the step and the text of each verdict."""
    found = []
    for record in caplog.records:
        line = re.fullmatch(r"step (\d+): (reward .*)", record.getMessage())
        if line:
            found.append((record.levelno, int(line[1]), line[2]))
    caplog.clear()
    return found


def test_a_replay_has_no_verdict_on_recorded_rewards_wherever_one_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log is that of a run whose reward rises; its policy has not moved, since --learning_rate is 0."""
    caplog.set_level(logging.INFO, "swift_r1.lab.diagnosis")
    run = run_folder(tmp_path / "again", HEALTHY, lines=0)
    args = json.loads((run / "args.json").read_text())
    (run / "args.json").write_text(json.dumps(args | {"replay": {"run": "/before"}}))
    watch = LiveDiagnosis(run)
    [recorded] = [one for one in RUNS if one["name"] == HEALTHY]
    with (run / "logging.jsonl").open("a") as file:
        for row in rows_of(recorded):
            moved = {"policy/moved": 0.0} if row["step"] > 1 else {}
            file.write(json.dumps(row | moved) + "\n")
            file.flush()
            watch.line()
    assert said(caplog) == []
    assert watch.end() == f"policy: moved 0; swift why {run}"
    moved = "its log-probs moved by 0 nats per token (policy/moved), first by 0"

    main(["why", str(run)])
    assert moved in capsys.readouterr().out
    main(["why", str(run), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["verdict"] is None
    main(["report", str(run), "--output", str(tmp_path / "report.html")])
    report = (tmp_path / "report.html").read_text()
    assert moved in report
    assert not any(said in report for said in ("rises", "is solved", "reward solved"))


def test_the_verdict_is_said_ever_more_rarely_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "swift_r1.lab.diagnosis")
    run = run_folder(tmp_path / "a run", HEALTHY, lines=0)
    watch = LiveDiagnosis(run)
    assert watch.end() is None  # nothing is known yet, and nothing said
    train(watch, run, HEALTHY, 0, 45)
    assert [step for _, step, _ in said(caplog)] == [8, 16, 32]
    before = sorted(run.iterdir())

    # resumed at step 40 or so, it does not say again what it has said
    watch = LiveDiagnosis(run)
    train(watch, run, HEALTHY, 45, 54)
    assert said(caplog) == []
    last = Diagnosis(run)
    last.refresh()
    verdict = last.verdict
    assert verdict is not None and verdict.reward.kind in ("rises", "solved")
    end = watch.end()
    assert end is not None and end.startswith(f"reward: {verdict.reward.kind}")
    assert end.endswith(f"; swift why '{run}'")
    assert said(caplog) == [(logging.INFO, last.last_step, verdict.line)]
    watch.end()  # nothing new since
    assert said(caplog) == []
    assert sorted(run.iterdir()) == before  # it is made of the log: no second file


def test_a_run_that_does_not_learn_warns_with_its_first_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "swift_r1.lab.diagnosis")
    run = run_folder(tmp_path, "impossible problems", lines=0)
    watch = LiveDiagnosis(run)
    train(watch, run, "impossible problems", 0, 12)
    [(level, step, text)] = said(caplog)
    assert (level, step) == (logging.WARNING, 8)
    assert "because: no signal: " in text and "; try: " in text
    end = watch.end()
    assert end is not None and end.startswith("reward: flat; ")


def test_a_verdict_that_fails_costs_a_line_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_folder(tmp_path, HEALTHY, lines=0)
    args = json.loads((run / "args.json").read_text())
    args["args"]["learning_rate"] = {"not": "a number"}
    (run / "args.json").write_text(json.dumps(args))
    [recorded] = [one for one in RUNS if one["name"] == HEALTHY]
    watch = LiveDiagnosis(run)
    for row in rows_of(recorded)[:20]:
        still = {"reward": 0.5, "policy/moved": 1e-9}
        with (run / "logging.jsonl").open("a") as file:
            file.write(json.dumps(row | still) + "\n")
        watch.line()
    assert watch.end() is None
    found = [
        line.getMessage() for line in caplog.records if "failed: TypeError" in line.getMessage()
    ]
    assert len(found) == 1 and found[0].startswith("the verdict failed: ")
