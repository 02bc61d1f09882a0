"""Rows that contradict one another: counted, and three of them named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift_r1.data.doubles import contradictions
from swift_r1.data.loading import load_rows
from swift_r1.data.store import Rows
from tests import forks
from tests.data.test_builtin import arguments


def loaded(*files: Path | str) -> Rows:
    rows = load_rows(arguments(dataset=[str(file) for file in files], dataset_shuffle=False)).train
    assert isinstance(rows, Rows)
    return rows


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"question": f"{n} + 1?", "solution": str(n + 1), **more} for n in range(count)]


def test_one_prompt_with_two_answers(tmp_path: Path) -> None:
    wrong = [{"question": f"{n} + 1?", "solution": "7"} for n in range(4)]
    file = written(tmp_path / "a.jsonl", [*sums(9), *sums(2), *wrong])
    named = "a:0 and a:11 (solution); a:1 and a:12 (solution); a:2 and a:13 (solution); ..."
    assert contradictions(loaded(file)) == [f"prompts with more than one answer: 4, {named}"]
    assert contradictions(loaded(f"{file}#9")) == []
    other = written(tmp_path / "b.jsonl", [{"question": "8 + 1?", "solution": "10"}])
    assert contradictions(loaded(f"{file}#9", other)) == [
        "prompts with more than one answer: 1, a:8 and b:0 (solution)"
    ]


def test_what_a_reward_compares_is_an_answer(tmp_path: Path) -> None:
    rows = [{"question": "q", "solution": "a", "tests": number} for number in (1, 2)]
    file = written(tmp_path / "a.jsonl", rows)
    assert contradictions(loaded(file)) == []
    assert contradictions(loaded(file), ["tests"]) == [
        "prompts with more than one answer: 1, a:0 and a:1 (tests)"
    ]


def test_equal_ids_in_one_dataset(tmp_path: Path) -> None:
    rows = [
        row | {"id": number // 2 if number < 4 else number} for number, row in enumerate(sums(9))
    ]
    first, second = (
        written(tmp_path / "a.jsonl", rows),
        written(tmp_path / "b.jsonl", sums(3, id=None)),
    )
    said = "ids of more than one row: 2, a:0 and a:1; a:2 and a:3"
    assert contradictions(loaded(first, second)) == [said]
    assert contradictions(loaded(f"{first}#20")) == [said], "a repeated row is no other row"


def test_both_commands_say_it(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", [*sums(3), {"question": "1 + 1?", "solution": "3"}])
    words = ["--dataset", str(file), "--reward_funcs", "gsm8k"]
    said = "prompts with more than one answer: 1, a:1 and a:3 (solution)"
    done = forks.run(["-m", "swift_r1", "check", *words, "--json"], cwd=tmp_path, timeout=120)
    assert json.loads(done.stdout)["notes"] == [said]
    run = ["--rlhf_type", "grpo", "--model", "./gone", "--per_device_train_batch_size", "8"]
    assert (
        said
        in forks.run(["-m", "swift_r1", "rlhf", *run, *words], cwd=tmp_path, timeout=120).stderr
    )
