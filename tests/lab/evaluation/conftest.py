"""Questions that a random model can be asked, and `swift eval` in this process, of a model that is served."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_r1.flags.evaluation import EvalArguments
from swift_r1.flags.parser import parse_arguments
from tests.conftest import ServerProcess, start_tiny_server, wait_until_serving


@pytest.fixture
def gsm8k_file(tmp_path: Path) -> Path:
    """Twelve questions with GSM8K's columns; a random model's digits are right now and then."""
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """`served(folder, **config) -> url`: the real server over the small engine, one for each model folder."""
    running: dict[Path, ServerProcess] = {}

    def serve(model: Path, **config: Any) -> str:
        if model not in running:
            folder = tmp_path_factory.mktemp("served")
            running[model] = start_tiny_server(folder, model, **config)
            wait_until_serving(running[model])
        return running[model].url

    yield serve
    for server in running.values():
        server.stop()


@pytest.fixture
def swift_eval(tmp_path: Path, served: Callable[..., str]) -> Callable[..., Path]:
    """`swift_eval(model, **flags) -> folder`: runs `swift eval` to its end. A model's folder is served by `served`,
    without `own_server=True`."""

    def evaluate(model: Path | str, own_server: bool = False, **flags: Any) -> Path:
        from swift_r1.lab.evaluation.run import run

        folder = Path(flags.pop("output_dir", tmp_path / "eval"))
        name = model if own_server or isinstance(model, str) else served(model)
        words = eval_words(name, output_dir=folder, **flags)
        assert run(parse_arguments(EvalArguments, words, {}), ["swift", "eval", *words]) == 0
        return folder

    return evaluate


def eval_words(model: Any, **flags: Any) -> list[str]:
    """The words of a command, with defaults for a tiny model."""
    defaults = {"max_completion_length": 8, "n": 2, "instruction": "", "reward_isolation": "inline"}
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
