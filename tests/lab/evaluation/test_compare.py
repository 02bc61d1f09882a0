"""`swift eval --compare`: the same questions, whatever the order in which they were answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_r1.cli.main import main
from swift_r1.errors import UsageError
from swift_r1.lab.evaluation.report import compare

Evaluate = Callable[..., Path]


@pytest.fixture
def runs(swift_eval: Evaluate, tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> list[Path]:
    """Two evaluations; the rewards of the second are made better by hand."""
    folders = [
        swift_eval(tiny_model, benchmarks=[f"gsm8k={gsm8k_file}"], output_dir=tmp_path / name)
        for name in ("a", "b")
    ]
    path = folders[1] / "completions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["reward"] = float(row["index"] == 0)
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    return folders


def test_the_difference_and_its_table(
    runs: list[Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = compare(*runs, seed=1)["gsm8k"]
    assert found.second == 0.5 and found.difference.value == pytest.approx(0.5 - found.first)
    assert found.difference.questions == 12 and found.difference.p_value < 0.01
    assert (
        main(
            [
                "eval",
                "--compare",
                *map(str, runs),
                "--seed",
                "1",
                "--output_dir",
                str(tmp_path / "c"),
            ]
        )
        == 0
    )
    assert "gsm8k" in capsys.readouterr().out
    written = json.loads((tmp_path / "c" / "compare.json").read_text())["benchmarks"]["gsm8k"]
    assert written["difference"]["low"] == found.difference.low


def test_other_questions_are_refused(
    runs: list[Path], swift_eval: Evaluate, tiny_model: Path, gsm8k_file: Path, tmp_path: Path
) -> None:
    fewer = swift_eval(
        tiny_model, benchmarks=[f"gsm8k={gsm8k_file}#5"], output_dir=tmp_path / "fewer"
    )
    with pytest.raises(UsageError, match="the runs were asked 12 and 5 questions, 5 shared"):
        compare(runs[0], fewer, seed=1)
    gsm8k_file.write_text(gsm8k_file.read_text().replace('"2"', '"3"'))
    other = swift_eval(
        tiny_model, benchmarks=[f"gsm8k={gsm8k_file}"], output_dir=tmp_path / "other"
    )
    with pytest.raises(UsageError, match="gold answers, are not the same"):
        compare(runs[0], other, seed=1)
    # Another prompt form, sampling or number of completions is what one may want to compare.
    more = swift_eval(
        tiny_model,
        benchmarks=[f"gsm8k={gsm8k_file}"],
        output_dir=tmp_path / "more",
        n=4,
        instruction="Say it.",
    )
    assert compare(other, more, seed=1)["gsm8k"].difference.questions == 12


def test_an_unfinished_run_is_not_compared(runs: list[Path], tmp_path: Path) -> None:
    (runs[1] / "report.json").unlink()
    with pytest.raises(UsageError, match="is not finished: give its command again"):
        compare(*runs, seed=1)
    with pytest.raises(UsageError, match="is not the folder of an evaluation"):
        compare(runs[0], tmp_path / "nowhere", seed=1)
