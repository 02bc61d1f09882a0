"""The task that docs/first-hour.md ends with: its rows, its reward and its commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_r1.plugins import load_plugins
from swift_r1.rewards import orms
from tests import forks
from tests.conftest import save_tiny_model
from tests.docs.shown import commands, fences, files

pytestmark = pytest.mark.long
PAGE = "docs/first-hour.md"
SHOWN = [one for fence in fences(PAGE) if fence.language == "bash" for one in commands(fence)]
OF_THE_TASK = [one for one in SHOWN if "shop" in str(one) or "--compare" in one.words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the file that the page shows, and a tiny model under every name of one."""
    folder = tmp_path_factory.mktemp("first-hour")
    (folder / "shop.py").write_text(files(PAGE)["shop.py"])
    (folder / "models").mkdir()
    save_tiny_model(folder / "models" / "smollm2-135m", kind="qwen2", max_position_embeddings=4096)
    return folder


@pytest.fixture(scope="module")
def plugin(folder: Path) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        [loaded] = load_plugins(["shop.py"])
        yield vars(loaded.module)


def test_the_reward_tells_right_queries_from_all_others(plugin: dict[str, Any]) -> None:
    rows = [*plugin["questions"]("eval")][::9]
    reward = orms["same_rows"]()
    answers = [row["answer"] for row in rows]
    assert reward(answers, answer=answers) == [1.0] * len(rows)
    assert reward([f"\n{one};" for one in answers], answer=answers) == [1.0] * len(rows)
    assert not any(reward([*answers[1:], answers[0]], answer=answers))
    nearly = [re.sub(" > ", " >= ", re.sub(" < ", " <= ", one)) for one in answers]
    assert not any(
        value
        for value, one, other in zip(reward(nearly, answer=answers), answers, nearly, strict=True)
        if one != other
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_commands_follow_one_another(folder: Path) -> None:
    """As they stand, but for a tiny model and fewer steps, questions and tokens: each finds what those before it left."""
    fewer = {
        "--max_steps": "2",
        "--max_completion_length": "8",
        "--per_device_train_batch_size": "8",
    }
    for command in OF_THE_TASK:
        words = [re.sub(r"checkpoint-\d+", "checkpoint-2", word) for word in command.words[1:]]
        for flag, value in fewer.items():
            if flag in words:
                words[words.index(flag) + 1] = value
        if words[0] == "eval" and "--compare" not in words:
            words += ["--eval_limit", "4"]
        done = forks.run(
            ["-m", "swift_r1", *words], cwd=folder, environ={"OMP_NUM_THREADS": "1"}, timeout=600
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert (folder / "output" / "rlhf" / "checkpoint-2" / "model.safetensors").exists()
