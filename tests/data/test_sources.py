"""Every form of `--dataset` and every kind of file or folder, and datasets that JSON files register."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_r1.data import DatasetMeta, SubsetDataset, register_dataset, registry
from swift_r1.data.builtin import WorkedPreprocessor
from swift_r1.data.loading import load_rows
from swift_r1.data.registry import register_dataset_info
from swift_r1.data.resolve import open_sources
from swift_r1.errors import UsageError
from tests.data.test_builtin import arguments

ROWS = [{"question": f"{n}?", "solution": str(n)} for n in range(6)]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "datasets", {})
    monkeypatch.setattr(registry, "_origins", {})
    monkeypatch.chdir(tmp_path)


def jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def solutions(*values: str, **flags: Any) -> list[str]:
    return [
        row.get("solution") for row in load_rows(arguments(dataset=list(values), **flags)).train
    ]


ALL = ["0", "1", "2", "3", "4", "5"]


def test_a_line_of_text_is_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\ufeffWhat is 1 + 1?\n\nSay größer.\n")
    rows = load_rows(arguments(dataset=["prompts.txt"])).train
    assert [row["messages"][0]["content"] for row in rows] == ["What is 1 + 1?", "Say größer."]
    assert rows[1]["prompt_id"] == "prompts:1"


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole, "test": whole.select(range(2))}).save_to_disk(
        str(tmp_path / "splits")
    )
    assert solutions("one") == solutions("one/") == solutions(str(tmp_path / "splits")) == ALL
    assert len(solutions("one#9")) == 9
    register_dataset(
        DatasetMeta(dataset_name="mine", dataset_path=str(tmp_path / "splits"), eval_split=["test"])
    )
    data = load_rows(arguments(dataset=["mine"], evaluates=True))
    assert (len(data.train), len(data.eval)) == (6, 2)
    register_dataset(
        DatasetMeta(
            dataset_name="other", dataset_path=str(tmp_path / "splits"), split=["validation"]
        )
    )
    with pytest.raises(UsageError, match=r"splits has no split validation: it has train, test"):
        solutions("other")


def test_folders_of_files(tmp_path: Path) -> None:
    configs = (
        "{config_name: main, default: true, data_files: a.jsonl}",
        "{config_name: hard, data_files: b.jsonl}",
    )
    card = "---\nconfigs:\n- " + "\n- ".join(configs) + "\n---\n"
    jsonl(tmp_path / "repo" / "a.jsonl")
    jsonl(tmp_path / "repo" / "b.jsonl", ROWS[:2])
    (tmp_path / "repo" / "README.md").write_text(card)
    assert solutions("repo") == solutions("repo:main") == solutions("./repo") == ALL
    assert solutions("repo:main/hard") == [*ALL, "0", "1"]
    assert len(solutions("repo:hard#7")) == 7
    with pytest.raises(
        UsageError, match=r"repo \(subset soft, split train\): the folder cannot be read: .*soft"
    ):
        solutions("repo:soft")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match=r"nothing .*the folder cannot be read"):
        solutions("nothing")


WORKED = [{"question": "q", "answer": "so\n#### 1,000"}]


def test_a_clone_of_a_registered_set_is_preprocessed_like_it(tmp_path: Path) -> None:
    jsonl(tmp_path / "clones" / "sums" / "train.jsonl", WORKED)
    assert solutions("clones/sums") == [None]
    register_dataset(DatasetMeta(hf_dataset_id="org/sums", preprocess_func=WorkedPreprocessor()))
    assert solutions("clones/sums") == ["1,000"]


def test_built_in_sets_have_their_bare_name_alone(tmp_path: Path) -> None:
    """What ends like one is prepared like any other, and no reward finds another `solution` than the row has."""
    for name in ("clones/gsm8k", "owner/math", "Countdown-Tasks-3to4"):
        jsonl(tmp_path / name / "train.jsonl", WORKED)
        (row,) = load_rows(arguments(dataset=[name], columns={"answer": "solution"})).train
        assert row["solution"] == "so\n#### 1,000" and row["dataset"] == name.rsplit("/")[-1]
        assert solutions(name) == [None]
    jsonl(tmp_path / "modelscope" / "gsm8k" / "train.jsonl", WORKED)
    assert solutions("modelscope/gsm8k") == [None]  # a path that exists is one


def test_registered_names_come_before_paths(tmp_path: Path) -> None:
    (tmp_path / "countdown").mkdir()
    (source,) = open_sources(["countdown#5"])
    assert source.loader is not None and source.place is None
    (source,) = open_sources(["./countdown"])
    assert source.place is not None


SIGNS = ["with#hash.jsonl", "with:colon.jsonl", "with::colons.jsonl", "with#12.jsonl", "a b.jsonl"]


@pytest.mark.parametrize("name", SIGNS)
def test_signs_in_paths(tmp_path: Path, name: str) -> None:
    jsonl(tmp_path / name)
    assert solutions(name) == ALL
    assert len(solutions(f"{name}#3")) == 3


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    jsonl(tmp_path / "rows.jsonl")
    assert solutions("~/rows.jsonl#6") == ALL


def test_several_values_and_their_numbers(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl")
    jsonl(tmp_path / "b.jsonl", ROWS[:2])
    assert solutions("a.jsonl", "b.jsonl") == [*ALL, "0", "1"]
    mixed = solutions("a.jsonl#2", "b.jsonl#5", seed=3)
    assert len(mixed) == 7 and mixed == solutions("a.jsonl#2", "b.jsonl#5", seed=3)
    assert solutions("a.jsonl#2", "b.jsonl#3", dataset_shuffle=False) == ["0", "1", "0", "1", "0"]
    chosen = {tuple(solutions("a.jsonl#2", seed=seed)) for seed in range(20)}
    assert len(chosen) > 5 and all(len(set(pair)) == 2 for pair in chosen)


def test_subsets_of_a_loader(tmp_path: Path) -> None:
    def load(subset: str) -> Any:
        return [{"question": subset, "answer": f"#### {subset}"}]

    meta = DatasetMeta(
        dataset_name="levels",
        loader=load,
        subsets=[
            "easy",
            SubsetDataset("hard", "h"),
            SubsetDataset("odd", "o", is_weak_subset=True),
        ],
        preprocess_func=WorkedPreprocessor(),
    )
    register_dataset(meta)
    assert solutions("levels:easy/hard") == ["easy", "h"]
    assert solutions("levels:all") == ["easy", "h"]
    assert solutions("levels:odd") == ["o"]


def test_a_preprocessor_may_be_any_function(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl")

    def shouted(row: dict[str, Any]) -> dict[str, Any] | None:
        if row["solution"] == "3":
            return None
        return {
            "messages": [{"role": "user", "content": row["question"] * 2}],
            "solution": row["solution"],
        }

    register_dataset(
        DatasetMeta(dataset_name="shouted", dataset_path="a.jsonl", preprocess_func=shouted)
    )
    assert solutions("shouted") == ["0", "1", "2", "4", "5"]


def test_files_that_register_datasets(tmp_path: Path) -> None:
    jsonl(
        tmp_path / "sub" / "rows.jsonl",
        [{"stem": "q", "gold": "1", "talk": [{"who": "me", "says": "hello"}]}],
    )
    info = [
        {
            "dataset_name": "renamed",
            "dataset_path": "rows.jsonl",
            "columns": {"stem": "query", "gold": "solution"},
        },
        {
            "dataset_name": "talks",
            "dataset_path": "rows.jsonl",
            "columns": {"talk": "messages"},
            "messages": {"role_key": "who", "content_key": "says", "user_role": "me"},
            "help": "a talk",
            "tags": ["x"],
        },
        {
            "hf_dataset_id": "org/set",
            "split": ["train", "extra"],
            "subsets": [
                "a",
                {"name": "b", "subset": "bb", "split": ["test"], "columns": {"x": "query"}},
            ],
        },
    ]
    (tmp_path / "sub" / "info.json").write_text(json.dumps(info))
    register_dataset_info(["sub/info.json"])
    register_dataset_info(["sub/info.json"])
    (row,) = load_rows(arguments(dataset=["renamed"])).train
    assert row["solution"] == "1" and row["messages"][0]["content"] == "q"
    (row,) = load_rows(arguments(dataset=["talks"])).train
    assert row["messages"] == [{"role": "user", "content": "hello"}]
    (source,) = open_sources(["hf::org/set:all"])
    assert source.parts == (("a", ("train", "extra")), ("bb", ("test",))) and set(
        source.of_subset
    ) == {"bb"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "info.json: No such file"),
        ("\xff", "info.json: not UTF-8"),
        ("{}", "holds a dict, not a list of datasets"),
        ("[1]", "entry 1 is an int, not an object"),
        ('[{"path": "x"}]', "entry 1: unknown key path; there are columns, dataset_name"),
        ('[{"dataset_name": "x", "split": "train"}]', "entry 1: split is a str, not a list"),
        (
            '[{"dataset_name": "x", "subsets": [{"names": 1}]}]',
            "entry 1: a subset: unknown key names",
        ),
        ('[{"help": "x"}]', "entry 1: register_dataset: the DatasetMeta has no dataset_name"),
    ],
)
def test_bad_files_that_register_datasets(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "info.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        register_dataset_info(["info.json"])
    (fault,) = caught.value.faults
    assert fault.startswith("--custom_dataset_info info.json") and message in fault
