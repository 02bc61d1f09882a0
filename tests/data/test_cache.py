"""Prepared rows: kept, found again, and never taken for others."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from swift_r1.data import DatasetMeta, ResponsePreprocessor, register_dataset
from swift_r1.data import registry as registry_module
from swift_r1.data.cache import cache_folder, kept_rows, remove_old
from swift_r1.data.loading import load_dataset, load_rows
from swift_r1.errors import UsageError
from tests import forks
from tests.data.test_builtin import arguments


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWIFT_R1_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry_module, "datasets", dict(registry_module.datasets))
    monkeypatch.setattr("swift_r1.data.resolve.datasets", registry_module.datasets)
    monkeypatch.setattr(registry_module, "_origins", dict(registry_module._origins))
    return tmp_path / "cache" / "data"


def jsonl(path: Path, count: int, start: int = 0) -> str:
    lines = (json.dumps({"question": f"{n}?", "solution": n}) for n in range(start, start + count))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def stores(cache: Path) -> set[str]:
    """Returns the names of the rows that are kept."""
    return {entry.name.partition("=")[2] for entry in kept_rows(cache, "").parent.glob("*")}


def test_a_second_time_they_come_from_the_cache(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = jsonl(tmp_path / "a.jsonl", 30)
    first = load_rows(arguments(dataset=[file]))
    assert "from the cache" not in caplog.text and len(stores(own_cache)) == 1
    with caplog.at_level(logging.INFO):
        second = load_rows(arguments(dataset=[f"{file}#7"]))  # whatever number of them
    assert "dataset a: 30 prepared rows from the cache" in caplog.text
    assert {row["prompt_id"] for row in second.train} <= {row["prompt_id"] for row in first.train}
    caplog.clear()
    third = load_rows(arguments(dataset=[file], load_from_cache_file=False))
    assert "from the cache" not in caplog.text and third == first and len(stores(own_cache)) == 1


def test_other_content_other_columns_other_code_are_other_rows(
    tmp_path: Path, own_cache: Path
) -> None:
    file = jsonl(tmp_path / "a.jsonl", 3)
    assert [row["solution"] for row in load_rows(arguments(dataset=[file])).train] == [0, 1, 2]
    jsonl(tmp_path / "a.jsonl", 3, 5)
    assert [row["solution"] for row in load_rows(arguments(dataset=[file])).train] == [5, 6, 7]
    assert load_rows(arguments(dataset=[file], columns={"solution": "gold"})).train[0]["gold"] == 5
    assert len(stores(own_cache)) == 3


PLUGIN = """
    from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
    {imports}

    class Mine(ResponsePreprocessor):
        def preprocess(self, row):
            {inside}
            row["query"] = shown(row["query"])
            return super().preprocess(row)

    register_dataset(DatasetMeta(dataset_name="mine", dataset_path="a.jsonl", preprocess_func=Mine()))
"""


@pytest.mark.parametrize("lazily", [False, True])
def test_a_changed_plugin_never_meets_old_rows(tmp_path: Path, lazily: bool) -> None:
    """Nor one whose helper changed, wherever that is imported."""
    jsonl(tmp_path / "a.jsonl", 3)
    line = "from helper_of_mine import shown"
    imports, inside = ("", line) if lazily else (line, "pass")
    plugin = tmp_path / "plugin.py"
    plugin.write_text(textwrap.dedent(PLUGIN).format(imports=imports, inside=inside))
    (tmp_path / "rows.py").write_text(f"""
import logging; logging.basicConfig(level=logging.INFO)
from swift_r1.plugins import load_plugins
from swift_r1.data.loading import load_dataset
load_plugins(["{plugin}"])
rows, _ = load_dataset("mine")
print(rows[0]["messages"][0]["content"])
""")

    def run(helper: str) -> tuple[str, bool]:
        (tmp_path / "helper_of_mine.py").write_text(f"def shown(text):\n    return {helper}\n")
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # of the same second
        done = forks.run(["rows.py"], cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), "from the cache" in done.stderr

    assert run("text") == ("0?", False)
    assert run("text") == ("0?", True)
    assert run("text.upper() + '!'") == ("0?!", False)
    plugin.write_text(plugin.read_text().replace("shown(row", "'so ' + shown(row"))
    assert run("text") == ("so 0?", False)


def test_a_loader_is_asked_each_time(own_cache: Path) -> None:
    times = []

    def load() -> Any:
        times.append(1)
        return [{"question": f"{len(times)}?", "solution": 0}]

    register_dataset(DatasetMeta(dataset_name="changing", loader=load))
    contents = [load_dataset("changing")[0][0]["messages"][0]["content"] for _ in range(2)]
    assert contents == ["1?", "2?"]
    assert not stores(own_cache)  # nothing is left behind


def test_the_launchers_rows_are_the_trainers(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times = []

    def load() -> Any:
        times.append(1)
        return [{"question": f"{n}?", "solution": len(times)} for n in range(4)]

    register_dataset(DatasetMeta(dataset_name="changing", loader=load))
    launcher = load_rows(arguments(dataset=["changing"]), keep=True)
    trainer = load_rows(arguments(dataset=["changing"]), launcher.prepared)
    assert trainer == launcher and len(times) == 1
    assert trainer.train.digest() == launcher.train.digest()  # type: ignore[attr-defined]
    assert not stores(own_cache)
    assert (
        len(load_rows(arguments(dataset=["changing"]), launcher.prepared).train) == 4
        and len(times) == 2
    )


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 3])
def test_processes_give_the_same_rows(tmp_path: Path, processes: int) -> None:
    file = Path(jsonl(tmp_path / "a.jsonl", 9_000))
    lines = file.read_text().splitlines()
    lines[4_321], lines[8_000] = "{broken", ""
    file.write_text("\n".join(lines))
    data = load_rows(arguments(dataset=[str(file), "countdown#5000"], dataset_num_proc=processes))
    assert (len(data.train), data.drops.broken) == (8_998 + 5_000, 1)
    assert [row["prompt_id"] for row in data.train[4_320:4_322]] == ["a:4320", "a:4322"]
    assert data.train[8_997]["prompt_id"] == "a:8998" and data.train[8_997]["solution"] == 8_999
    digest = data.train.digest()  # type: ignore[attr-defined]
    assert digest == load_rows(arguments(dataset=[str(file), "countdown#5000"])).train.digest()  # type: ignore[attr-defined]


def test_a_process_that_dies_is_told(tmp_path: Path) -> None:

    class Deadly(ResponsePreprocessor):
        def preprocess(self, row: dict[str, Any]) -> Any:
            if row["solution"] == 3_000 and os.getpid() != parent:
                os._exit(9)
            return super().preprocess(row)

    parent = os.getpid()
    file = jsonl(tmp_path / "a.jsonl", 5_000)
    register_dataset(
        DatasetMeta(dataset_name="deadly", dataset_path=file, preprocess_func=Deadly())
    )
    with pytest.raises(UsageError, match="a process that prepared rows was killed"):
        load_rows(arguments(dataset=["deadly"], dataset_num_proc=2))


SLOW = """
import os, time
from swift_r1.data import DatasetMeta, load_dataset, register_dataset
def slow(row):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(100)
register_dataset(DatasetMeta(dataset_name="slow", dataset_path="a.jsonl", preprocess_func=slow))
load_dataset("slow", num_proc=2)
"""


@pytest.mark.parametrize(
    "sent",
    [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)],
)
def test_its_processes_end_with_it(tmp_path: Path, sent: signal.Signals) -> None:
    jsonl(tmp_path / "a.jsonl", 5_000)
    (tmp_path / "slow.py").write_text(SLOW)
    parent = forks.start(["slow.py"], cwd=tmp_path, stdout=forks.PIPE, stderr=forks.DEVNULL)
    assert parent.stdout is not None
    children = {int(parent.stdout.readline()) for _ in range(2)}
    assert parent.pid not in children and len(children) == 2
    parent.send_signal(sent)
    parent.wait(60)
    # A process that has ended has closed its end of the pipe.
    assert parent.stdout.read() == ""
    parent.stdout.close()


def test_a_broken_store_is_made_again(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = jsonl(tmp_path / "a.jsonl", 30)
    load_rows(arguments(dataset=[file]))
    (name,) = stores(own_cache)
    (rows,) = kept_rows(own_cache, name).glob("*/*.arrow")
    rows.write_bytes(rows.read_bytes()[:-100])
    assert len(load_rows(arguments(dataset=[file])).train) == 30
    assert "cannot be used, and are prepared again" in caplog.text
    caplog.clear()
    assert len(load_rows(arguments(dataset=[file])).train) == 30 and not caplog.text


def test_what_a_killed_run_left_of_its_rows_goes(tmp_path: Path, own_cache: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", 30)
    load_rows(arguments(dataset=[file]))
    (name,) = stores(own_cache)
    (whole,) = (path for path in kept_rows(own_cache, name).iterdir() if path.is_dir())
    rest = whole.rename(whole.with_name(f"{whole.name}.incomplete"))
    assert len(load_rows(arguments(dataset=[file])).train) == 30
    assert whole.is_dir() and not rest.exists()


def test_what_is_old_goes(own_cache: Path) -> None:
    for name, days in {"a" * 32: 29, "b" * 32: 31, "run-c": 1, "run-d": 3}.items():
        folder = kept_rows(own_cache, name)
        (folder / "0.0.0").mkdir(parents=True)
        then = time.time() - days * 86_400
        os.utime(folder, (then, then))
    remove_old(own_cache)
    assert stores(own_cache) == {"a" * 32, "run-c"}


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWIFT_R1_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "swift-r1" / "data"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SWIFT_R1_CACHE", str(tmp_path / "file"))
    assert cache_folder().parent == Path(tempfile.gettempdir())


def test_values_that_json_has_no_form_for(tmp_path: Path) -> None:
    import datetime
    import decimal

    values = [(1, 2), datetime.date(2025, 1, 2), decimal.Decimal("1.50"), float("inf")]
    register_dataset(
        DatasetMeta(
            dataset_name="odd",
            loader=lambda: [{"question": "q", "value": value} for value in values],
        )
    )
    assert [row["value"] for row in load_dataset("odd")[0]] == [
        [1, 2],
        "2025-01-02",
        "1.50",
        float("inf"),
    ]
    register_dataset(
        DatasetMeta(dataset_name="bytes", loader=lambda: [{"question": "q", "blob": b"x"}])
    )
    with pytest.raises(
        UsageError, match="bytes row 0: the column blob holds a value that JSON cannot: bytes"
    ):
        load_dataset("bytes")
