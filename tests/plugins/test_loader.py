"""Plugin files: what they register, in which order, and how their faults are told."""

import logging
from pathlib import Path

import pytest

from swift_r1.data.registry import datasets
from swift_r1.errors import UsageError
from swift_r1.plugins import load_plugins
from swift_r1.rewards import orms

PLUGIN = """
from swift.rewards import ORM, orms
from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.utils import get_logger
from {neighbour} import WORTH

logger = get_logger()

class Length(ORM):
    def __call__(self, completions, nums, **kwargs):
        return [WORTH * len(text) for text in completions]

orms["{name}_length"] = Length
register_dataset(DatasetMeta(dataset_name="{name}_rows", preprocess_func=ResponsePreprocessor(), loader=lambda: []))
"""


def write(folder: Path, name: str, neighbour: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    neighbour = neighbour or f"{name}_neighbour"
    (folder / f"{neighbour}.py").write_text("WORTH = 2.0\n")
    path = folder / f"{name}.py"
    path.write_text(PLUGIN.format(name=name, neighbour=neighbour))
    return path


def test_what_a_plugin_registers(tmp_path: Path) -> None:
    path = write(tmp_path, "first")
    (plugin,) = load_plugins([str(path)])
    assert plugin.orms == ("first_length",)
    assert plugin.datasets == ("first_rows",)
    assert orms["first_length"]()(["abc"], nums=[1]) == [6.0]
    assert "first_rows" in datasets


def test_a_file_runs_once_and_two_of_one_name_do_not_clash(tmp_path: Path) -> None:
    path = write(tmp_path, "again")
    first = load_plugins([str(path)])
    kept = orms["again_length"]
    assert load_plugins([str(tmp_path / "." / "again.py")]) == first
    assert orms["again_length"] is kept
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, text in ((a, "one"), (b, "two")):
        folder.mkdir()
        (folder / "same.py").write_text(
            f"from swift_r1 import orms\norms['{text}'] = lambda completions: []\n"
        )
    loaded = load_plugins([str(a / "same.py"), str(b / "same.py")])
    assert [plugin.orms for plugin in loaded] == [("one",), ("two",)]


def test_a_neighbour_cannot_stand_in_for_a_library(tmp_path: Path) -> None:
    (tmp_path / "fractions.py").write_text("raise RuntimeError('the wrong fractions')\n")
    path = tmp_path / "uses_fractions.py"
    path.write_text(
        "import sys\nsys.modules.pop('fractions', None)\nfrom fractions import Fraction\nFraction(1, 2)\n"
    )
    load_plugins([str(path)])


def test_replacing_a_reward_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from swift_r1 import orms\norms['format'] = lambda completions: [0.0] * len(completions)\n"
    )
    with caplog.at_level(logging.WARNING):
        (plugin,) = load_plugins([str(path)])
    assert plugin.orms == ("format",)
    assert f"plugin {path} replaces the reward 'format'" in caplog.text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = 1\ndef f():\n    return 1 / 0\nf()\n", ":3: ZeroDivisionError: division by zero"),
        (
            "import json\njson.loads('[')\n",
            ":2: JSONDecodeError: Expecting value: line 1 column 2 (char 1)",
        ),
        ("x = (\n", ":1: SyntaxError: '(' was never closed"),
        ("raise ValueError('two\\nlines')\n", ":1: ValueError: two lines"),
        (
            "import nothing_of_that_name\n",
            ":1: ModuleNotFoundError: No module named 'nothing_of_that_name'",
        ),
    ],
)
def test_a_failing_plugin_is_one_line_with_its_place(
    tmp_path: Path, source: str, text: str
) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(UsageError) as caught:
        load_plugins([str(path)])
    (fault,) = caught.value.faults
    assert fault.startswith(f"plugin {path}{text}")
    assert "\n" not in fault


def test_all_bad_files_are_named(tmp_path: Path) -> None:
    text = tmp_path / "plugin.txt"
    text.write_text("")
    with pytest.raises(UsageError) as caught:
        load_plugins([str(tmp_path / "gone.py"), str(tmp_path), str(text)])
    missing, folder, suffix = caught.value.faults
    assert "gone.py: there is no such file" in missing
    assert "is a folder" in folder
    assert "is not a Python file" in suffix
