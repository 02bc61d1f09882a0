"""What runs are called beside one another, and the flags that tell them apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift_r1.lab.runs.names import different_flags, names_of
from swift_r1.record.folder import find_runs


def run(folder: Path, *words: str, **args: Any) -> Path:
    folder.mkdir(parents=True)
    content = {"args": args, "command": ["swift", "rlhf", *words], "started": 1.0}
    (folder / "args.json").write_text(json.dumps(content))
    return folder


def names(*folders: Path) -> list[str]:
    found = {one.path: one for one in find_runs(folders)}
    return names_of([found[folder] for folder in folders])


def test_a_run_is_called_by_its_name_or_its_folder(tmp_path: Path) -> None:
    one, two = (run(tmp_path / "out" / f"v{n}", run_name="with code", seed=n) for n in range(2))
    assert names(one, two) == ["with code · v0", "with code · v1"]
    assert names(run(tmp_path / "plain", run_name=None), one) == ["plain", "with code"]


def test_the_flags_that_were_given_and_differ(tmp_path: Path) -> None:
    one = run(
        tmp_path / "one",
        *("--learning_rate", "1e-6", "--model", "hub/a", "--beta=0"),
        **{"learning_rate": 1e-6, "model": "hub/a", "soft_max_length": 8, "beta": 0.0},
    )
    two = run(
        tmp_path / "two",
        *("--learning_rate=1e-5", "--model", "hub/b"),
        **{"learning_rate": 1e-5, "model": "hub/b", "soft_max_length": 9, "beta": 0.0},
    )
    assert different_flags(find_runs([one, two])) == {
        "learning_rate": ["1e-06", "1e-05"],
        "model": ["hub/a", "hub/b"],
    }
