"""What runs are called beside one another, and the flags that tell them apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift_r1.lab.runs.names import different_flags, give_name, names_of, was_given
from swift_r1.record.folder import find_runs


def run(folder: Path, *words: str, **args: Any) -> Path:
    folder.mkdir(parents=True)
    content = {"args": args, "command": ["swift", "rlhf", *words], "started": 1.0}
    (folder / "args.json").write_text(json.dumps(content))
    return folder


def names(*folders: Path) -> list[str]:
    found = {one.path: one for one in find_runs(folders)}
    return names_of([found[folder] for folder in folders])


def test_a_name_is_the_folder_that_tells_a_run_apart_without_its_time(tmp_path: Path) -> None:
    col = run(tmp_path / "col" / "v0-20261124-121650", seed=0)
    emb = run(tmp_path / "emb" / "v0-20261124-131650", seed=0)
    assert names(col, emb) == ["col", "emb"]
    assert names(col) == ["col"]
    under = [run(tmp_path / kind / "seed-0") for kind in ("hot", "cold")]
    assert names(*under) == ["hot/seed-0", "cold/seed-0"]


def test_runs_of_a_folder_are_told_apart_by_the_flags_that_were_given(tmp_path: Path) -> None:
    one = run(
        tmp_path / "out" / "v0-20261124-121650",
        *("--learning_rate", "1e-6", "--model", "hub/a"),
        **{"learning_rate": 1e-6, "model": "hub/a", "soft_max_length": 8},
    )
    two = run(
        tmp_path / "out" / "v1-20261124-131650",
        *("--learning_rate=1e-5", "--model", "hub/b"),
        **{"learning_rate": 1e-5, "model": "hub/b", "soft_max_length": 9},
    )
    assert names(one, two) == ["learning_rate 1e-6 · model a", "learning_rate 1e-5 · model b"]
    runs = find_runs([one, two])
    assert different_flags(runs) == {
        "learning_rate": ["1e-06", "1e-05"],
        "model": ["hub/a", "hub/b"],
        "soft_max_length": ["8", "9"],
    }
    assert not was_given("soft_max_length", runs)
    copies = [run(tmp_path / "same" / f"v{n}-20261124-12165{n}", seed=0) for n in range(2)]
    assert names(*copies) == ["same · v0-20261124-121650", "same · v1-20261124-121651"]


def test_a_run_is_called_what_was_typed_as_its_name(tmp_path: Path) -> None:
    one, two = (
        run(tmp_path / "out" / f"v{n}-20261124-12165{n}", *words, run_name="with code", seed=n)
        for n, words in enumerate([("--run_name", "with code"), ("--seed", "1")])
    )
    assert names(one, two) == ["with code", "seed 1"]


def test_a_given_name_goes_with_the_folder(tmp_path: Path) -> None:
    path = run(tmp_path / "out" / "v0-20261124-121650")
    [found] = find_runs([path])
    give_name(found, "  the best\nof all ")
    assert names(path) == ["the best of all"]
    give_name(found, "")
    assert names(path) == ["out"] and not (path / "name.txt").exists()
