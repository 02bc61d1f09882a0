"""Datasets of the hubs: their real clients, against a local server of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swift_r1.data import registry
from swift_r1.data.hubs import default_hub, is_hub_id
from swift_r1.data.preprocessors import AutoPreprocessor
from swift_r1.data.resolve import open_sources
from swift_r1.errors import UsageError

HERE = Path(__file__).parent
REPO = HERE.parents[1]
CARD = """---
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: data/train.jsonl}
  - {split: test, path: data/test.jsonl}
- config_name: hard
  data_files:
  - {split: train, path: hard/train.jsonl}
  - {split: test, path: hard/test.jsonl}
---
"""


def lines(*numbers: int) -> str:
    return "".join(
        json.dumps({"question": f"{n}?", "answer": f"so\n#### {n}"}) + "\n" for n in numbers
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `hub_client.py` loaded."""
    folder = tmp_path_factory.mktemp("hub")
    for owner, name in (("org", "sums"), ("other", "sums"), ("modelscope", "gsm8k")):
        repo = folder / "repos" / owner / name
        for name in ("data", "hard"):
            (repo / name).mkdir(parents=True)
        (repo / "README.md").write_text(CARD)
        (repo / "data" / "train.jsonl").write_text(lines(1, 2, 3))
        (repo / "data" / "test.jsonl").write_text(lines(90, 91))
        (repo / "hard" / "train.jsonl").write_text(lines(10, 20))
        (repo / "hard" / "test.jsonl").write_text(lines(92))
    countdown = folder / "repos" / "zouxuhong" / "Countdown-Tasks-3to4"
    countdown.mkdir(parents=True)
    (countdown / "train.jsonl").write_text(
        '{"target": 98, "nums": [44, 19, 35]}\n{"target": 64, "nums": [63, 95, 96]}\n'
    )
    plain = folder / "repos" / "org" / "plain"
    plain.mkdir()
    (plain / "train.jsonl").write_text('{"question": "q", "solution": "s"}\n')
    done = subprocess.run(
        [sys.executable, str(HERE / "hub_client.py"), str(folder / "repos"), str(folder / "cache")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{REPO}:{HERE}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def solutions(rows: list[dict[str, Any]]) -> list[str]:
    return [row["solution"] for row in rows]


def test_both_hubs_give_the_rows(found: dict[str, Any]) -> None:
    assert solutions(found["hf"]["rows"]) == solutions(found["ms"]["rows"]) == ["1", "2", "3"]
    assert found["hf"]["rows"][0]["messages"] == [{"role": "user", "content": "1?"}]
    assert (
        found["hf"]["rows"][0]["dataset"] == "sums"
        and found["hf"]["rows"][0]["prompt_id"] == "sums:0"
    )
    assert len(found["use_hf"]["rows"]) == 2
    assert found["hf"]["asked"] == ["api", "datasets"] and found["ms"]["asked"] == ["api"]
    assert solutions(found["ms prefix"]["rows"]) == ["10", "20"]


def test_subsets_and_held_out_splits(found: dict[str, Any]) -> None:
    assert solutions(found["all"]["rows"]) == ["1", "2", "3", "10", "20"]
    assert sorted(solutions(found["all"]["eval"])) == ["90", "91", "92"]
    assert "name a subset, sums:SUBSET; there are easy, hard, all" in found["unnamed"]["fault"]


def test_an_evaluation_takes_the_held_out_split(found: dict[str, Any]) -> None:
    assert solutions(found["evaluated"]) == ["90", "91"]
    assert [row["prompt_id"] for row in found["evaluated"]] == ["org_sums:0", "org_sums:1"]


def test_sets_that_nobody_registered(found: dict[str, Any]) -> None:
    (row,) = found["unregistered"]["rows"]
    assert (
        row["dataset"] == "org/plain"
        and row["solution"] == "s"
        and row["messages"][0]["content"] == "q"
    )
    # preprocessed like the set that it is a copy of
    assert solutions(found["copy"]["rows"]) == ["1", "2", "3"]


def test_the_ids_of_built_in_sets_are_what_the_hub_has(found: dict[str, Any]) -> None:
    """Subset and held-out split are known, and as in ms-swift, the Countdown rows get their question."""
    gsm8k, countdown = found["gsm8k's id"], found["countdown's id"]["rows"]
    assert solutions(gsm8k["rows"]) == ["so\n#### 1", "so\n#### 2", "so\n#### 3"]
    assert (
        solutions(gsm8k["eval"]) == ["so\n#### 90", "so\n#### 91"]
        and gsm8k["rows"][0]["dataset"] == "modelscope/gsm8k"
    )
    assert sorted((row["target"], row["nums"]) for row in countdown) == [
        (64, [63, 95, 96]),
        (98, [44, 19, 35]),
    ]
    assert all(
        f"that equals {row['target']}." in row["messages"][0]["content"] for row in countdown
    )


def test_streamed(found: dict[str, Any]) -> None:
    assert (
        solutions(found["hf streamed"]["rows"])
        == solutions(found["ms streamed"]["rows"])
        == ["10", "20"]
    )


def test_faults_are_one_line(found: dict[str, Any]) -> None:
    for name, part in (("no such subset", "nothing"), ("no such set", "org/gone")):
        fault = found[name]["fault"]
        assert part in fault and "Hugging Face" in fault and "\n" not in fault


def test_without_a_network(found: dict[str, Any]) -> None:
    assert solutions(found["hf offline"]["rows"]) == ["1", "2", "3"]
    assert solutions(found["ms offline"]["rows"]) == ["10", "20"]
    for hub, folder in (("hf", "hf/hub"), ("ms", "ms")):
        fault = found[f"{hub} offline, never had"]["fault"]
        assert "looked in the cache" in fault and f"/cache/{folder}" in fault, fault
        assert "--dataset path/to/rows.jsonl" in fault and "\n" not in fault


@pytest.mark.long
@pytest.mark.parametrize(("use_hf", "hub"), [("true", "Hugging Face"), ("false", "ModelScope")])
def test_a_model_and_data_that_no_hub_can_give_are_named_at_once(
    tmp_path: Path, use_hf: str, hub: str
) -> None:
    words = [
        "--rlhf_type",
        "grpo",
        "--model",
        "org/model",
        "--dataset",
        "org/sums",
        "--reward_funcs",
        "accuracy",
    ]
    nobody = "http://127.0.0.1:9"
    done = subprocess.run(
        [sys.executable, "-m", "swift_r1", "rlhf", *words, "--use_hf", use_hf],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(REPO),
            "HF_ENDPOINT": nobody,
            "HF_HOME": str(tmp_path),
            "MODELSCOPE_ENDPOINT": nobody,
            "MODELSCOPE_CACHE": str(tmp_path),
        },
    )
    data, model = done.stderr.splitlines()  # no word of the hubs' clients about trying again
    assert done.returncode == 2
    assert (
        data.startswith("swift rlhf: dataset org/sums") and f"cannot be loaded from {hub}" in data
    )
    assert use_hf == "true" or f"ConnectionError: {nobody}" in data
    assert model.startswith(
        "swift rlhf: --model org/model is neither a folder here nor in the Hugging Face cache"
    )


def test_which_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USE_HF", raising=False)
    assert (default_hub(None), default_hub(True), default_hub(False)) == ("ms", "hf", "ms")
    monkeypatch.setenv("USE_HF", "1")
    assert (default_hub(None), default_hub(False)) == ("hf", "ms")
    assert is_hub_id("org/set") and not any(
        map(is_hub_id, ("set", "a/b/c", "./set", "/set", "../set", "~/set"))
    )


def test_ids_of_built_in_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWIFT_R1_DATA", raising=False)  # files come before hubs
    # a plugin of other tests may have one of the names
    monkeypatch.setattr(registry, "datasets", {})
    places = {
        value: open_sources([value])[0].place
        for value in ("hf::gsm8k", "ms::gsm8k", "hf::countdown", "hf::o/x")
    }
    names = {value: (place.name, place.hub) for value, place in places.items() if place}
    assert names == {
        "hf::gsm8k": ("openai/gsm8k", "hf"),
        "ms::gsm8k": ("modelscope/gsm8k", "ms"),
        "hf::countdown": ("Jiayi-Pan/Countdown-Tasks-3to4", "hf"),
        "hf::o/x": ("o/x", "hf"),
    }
    # Of the set, an id has subsets and splits alone.
    for value in ("modelscope/gsm8k", "hf::openai/gsm8k#20", "ms::openai/gsm8k"):
        (source,) = open_sources([value])
        assert source.parts == (("main", ("train",)),) and source.held_out_split == ("test",)
        assert (
            source.place is not None
            and source.place.name == source.name == value.rpartition(":")[2].partition("#")[0]
        )
        assert type(source.preprocess) is AutoPreprocessor
    (asdiv,) = open_sources(["asdiv"])  # on one hub alone
    assert (
        asdiv.place is not None
        and asdiv.place.hub == "hf"
        and asdiv.parts == (("asdiv", ("validation",)),)
    )
    with pytest.raises(UsageError, match="asdiv has no ms_dataset_id"):
        open_sources(["ms::asdiv"])
