"""Questions that a random model can be asked, and `swift eval` in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_r1.flags.evaluation import EvalArguments
from swift_r1.flags.parser import parse_arguments


@pytest.fixture
def gsm8k_file(tmp_path: Path) -> Path:
    """Twelve questions with GSM8K's columns; a random model's digits are right now and then."""
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def swift_eval(tmp_path: Path) -> Callable[..., Path]:
    """`swift_eval(model, **flags) -> folder`: runs `swift eval` to its end."""

    def evaluate(model: Any, **flags: Any) -> Path:
        from swift_r1.lab.evaluation.run import run

        folder = Path(flags.pop("output_dir", tmp_path / "eval"))
        words = eval_words(model, output_dir=folder, **flags)
        assert run(parse_arguments(EvalArguments, words, {}), ["swift", "eval", *words]) == 0
        return folder

    return evaluate


def eval_words(model: Any, **flags: Any) -> list[str]:
    """The words of a command, with defaults for a tiny model."""
    defaults = {"max_completion_length": 8, "n": 2, "instruction": "", "reward_isolation": "inline"}
    if not str(model).startswith("http"):
        defaults |= {"infer_backend": "transformers"}
    words = ["--model", str(model)]
    for name, value in (defaults | flags).items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The completions, in the order of the questions."""
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    return sorted(
        rows,
        key=lambda row: (row["benchmark"], int(row["prompt_id"].rpartition(":")[2]), row["index"]),
    )
