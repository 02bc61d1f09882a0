"""Nine plugin files in the style of each API generation, run as a run does: loaded, then in worker processes."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_r1.data.loading import load_dataset
from swift_r1.data.prompts import data_columns
from swift_r1.errors import UsageError
from swift_r1.plugins import LoadedPlugin, load_plugins
from swift_r1.plugins.protocol import (
    rm_plugins,
)
from swift_r1.rewards.pool import RewardPool
from swift_r1.rewards.types import RewardBatch, RewardColumn
from swift_r1.rollout.scoring import reward_metrics

FILES = Path(__file__).parent / "files"
_POOL = {
    "reward_timeout": 2.0,
    "reward_num_workers": 1,
    "reward_memory_limit": 2.0,
    "reward_env": [],
}
ARGS = SimpleNamespace(temperature=0.5, max_completion_length=10, **_POOL)


def load(name: str) -> LoadedPlugin:
    return load_plugins([str(FILES / f"{name}.py")])[0]


def score(
    file: str, names: list[str], completions: list[str], group_size: int = 2, **columns: Any
) -> dict[str, RewardColumn]:
    """In real worker processes."""
    count = len(completions)
    given = {
        "messages": [[{"role": "assistant", "content": text}] for text in completions],
        "prompt_id": ["p"] * count,
        "request_id": ["r"] * count,
        "finish_reason": ["stop"] * count,
        "is_truncated": [False] * count,
        "response_token_ids": [[1, 2]] * count,
        "dataset": ["d"] * count,
    }
    batch = RewardBatch(
        completions, given | columns, group_size, {"global_step": 1, "max_steps": 2}
    )
    with RewardPool(ARGS, names, partial(load_plugins, [str(FILES / f"{file}.py")])) as pool:
        found = {column.name: column for column in pool.score(batch)}
    assert all(not column.invalid for column in found.values()), found
    assert list(found) == names
    return found


def test_v3_class() -> None:
    plugin = load("v3_class")
    assert plugin.orms == ("v3_boxed",)
    assert plugin.rm_plugins == ("v3_judge",) and plugin.others == ("v3_steps",)
    column = score(
        "v3_class", ["v3_boxed"], [r"\boxed{4}", "4", r"\boxed{5}", ""], solution=["4"] * 4
    )["v3_boxed"]
    assert column.values == (1.0, 0.0, 0.0, 0.0)
    metrics = reward_metrics([], [column])
    assert metrics["rewards/v3_boxed/mean"] == 0.25  # by the registered name, not the class's
    assert rm_plugins["v3_judge"]("model", None).model == "model"


def test_v3_named_parameters_and_imports_while_it_runs() -> None:
    assert score("v3_named", ["v3_short"], ["", "x" * 25, "x" * 50, "x" * 500])[
        "v3_short"
    ].values == (1, 0.5, 0, 0)


def test_v4_args_and_everything_a_call_gets() -> None:
    assert score("v4_args", ["v4_everything"], ["a", "b"], solution=["1", "2"])[
        "v4_everything"
    ].values == (0.5, 0.5)


def test_plain_functions() -> None:
    found = score("plain_function", ["mentions", "half"], ["a word", "b"], word=["word", "word"])
    assert found["mentions"].values == (1.0, 0.0)
    assert found["half"].values == (0.5, 0.5)


def test_async_calls_run_together() -> None:
    # two groups a call, as in a run
    column = score("async_reward", ["meeting"], ["a", "b"] * 16)["meeting"]
    assert column.values == (1.0,) * 32


def test_dataset_with_subsets() -> None:
    assert load("dataset_subset").datasets == ("reach",)
    rows, _ = load_dataset("reach:sum")
    assert rows[0]["messages"] == [{"role": "user", "content": "Using [2, 3], reach 5."}]
    assert rows[0]["target"] == 5
    both, _ = load_dataset("reach:all")
    assert [row["messages"][-1]["content"].endswith("Multiply.") for row in both] == [
        False,
        False,
        True,
        True,
    ]
    with pytest.raises(UsageError, match="no subset middle; reach has sum, product"):
        load_dataset("reach:middle")


def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_R1_CACHE", str(tmp_path))
    plugin = load("seeing")
    assert (plugin.orms, plugin.datasets) == (("counted", "measured"), ("counting",))
    rows, _ = load_dataset("counting")
    asked = "<image>How many? Answer in <answer> </answer>."
    assert [row["messages"][0]["content"] for row in rows] == [asked, asked]
    columns = [data_columns(row) for row in rows for _ in range(2)]
    given = {name: [row[name] for row in columns] for name in ("solution", "images")}
    found = score(
        "seeing", ["counted"], ["<answer>0</answer>", "1", "<answer> 1</answer>", "1"], **given
    )
    assert found["counted"].values == (1.0, 0.0, 1.0, 1.0)
    found = score("seeing", ["measured"], ["10", "11", "10", "11"], **given)
    assert found["measured"].values == (1.0, 0.0, 0.0, 1.0)


def test_nothing_of_it_is_left_for_other_code() -> None:
    for file in FILES.glob("*.py"):
        load(file.stem)
    assert not [name for name in sys.modules if name.partition(".")[0] == "swift"]
    with pytest.raises(ModuleNotFoundError, match="No module named 'swift'"):
        __import__("swift.rewards")
