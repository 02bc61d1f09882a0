"""`examples/counting`: its pictures, its rows, its model, and (long) the run of its script."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from swift_r1.flags import parse_arguments
from swift_r1.flags.rlhf import CheckArguments
from swift_r1.launch.checks.run import run_checks
from tests import forks
from tests.conftest import REPO

EXAMPLE = REPO / "examples" / "counting"
sys.path.append(str(EXAMPLE))

import drawing  # noqa: E402


def shapes(picture: bytes) -> tuple[int, int]:
    """Counts the discs and the squares of a picture by its pixels: the corner of a square is coloured."""
    image = Image.open(io.BytesIO(picture))
    discs = squares = 0
    for place in range(drawing.SIDE**2):
        left = place % drawing.SIDE * drawing.SQUARE
        top = place // drawing.SIDE * drawing.SQUARE
        if image.getpixel((left + drawing.SQUARE // 2, top + drawing.SQUARE // 2)) != drawing.PAPER:
            square = image.getpixel((left + 1, top + 1)) != drawing.PAPER
            squares += square
            discs += not square
    return discs, squares


def test_a_picture_has_as_many_discs_as_it_says() -> None:
    problems = [drawing.problem(seed) for seed in range(300)]
    assert [shapes(one.picture)[0] for one in problems] == [one.count for one in problems]
    assert {one.count for one in problems} == set(range(1, drawing.MOST + 1))
    assert len({shapes(one.picture)[1] for one in problems}) > 5
    assert drawing.problem(7) == problems[7]


def commands(folder: Path, dataset: str) -> list[list[str]]:
    """The commands of `swift` that the script runs, as words; the warm start leaves its checkpoint. The model that it
    makes before is made."""
    recorder = folder / "bin" / "swift"
    recorder.parent.mkdir(exist_ok=True)
    recorder.write_text(
        f"#!{sys.executable}\n"
        "import json, os, pathlib, sys\n"
        "os.write(1, (json.dumps(sys.argv[1:]) + '\\n').encode())\n"
        "if sys.argv[1] == 'sft':\n"
        "    words = dict(zip(sys.argv[2:], sys.argv[3:]))\n"
        "    kept = pathlib.Path(words['--output_dir'], 'checkpoint-' + words['--max_steps'])\n"
        "    kept.mkdir(parents=True)\n"
    )
    recorder.chmod(0o755)
    recorder.with_name("python").unlink(missing_ok=True)
    recorder.with_name("python").symlink_to(recorder)
    environ = os.environ | {
        "PATH": f"{recorder.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DATA": dataset,
        "MODEL": str(folder / "model"),
    }
    done = subprocess.run(
        [EXAMPLE / "run.sh"], env=environ, capture_output=True, text=True, timeout=300, check=True
    )
    ran = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    for words in ran:
        if words[0].endswith(".py"):
            assert forks.run(words, timeout=300).returncode == 0
    return [words for words in ran if not words[0].endswith(".py")]


def test_the_script_passes_swift_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    warm, learning = commands(tmp_path, "counting")
    assert warm[0] == "sft" and "counting_form" in warm
    assert warm[warm.index("--model") + 1] == str(tmp_path / "model-random")
    # The warm start is there: it is not made again.
    (swapped,) = commands(tmp_path, "counting_swapped")
    assert [one.replace("counting_swapped", "counting") for one in swapped] == learning
    args = parse_arguments(CheckArguments, swapped[1:], {})
    args = replace(args, model=str(tmp_path / "model-random"), reward_num_workers=1, num_rows=2)
    report = run_checks(replace(args, dataset=["counting#64", "counting_swapped#64"]))
    assert report.ok, report.faults + [
        problem for one in report.rewards for problem in one.problems
    ]
    assert [one.rows for one in report.datasets] == [2, 2]


@pytest.mark.long
def test_it_learns_to_count(tmp_path: Path) -> None:
    environ = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MODEL": str(tmp_path / "model"),
        "OUTPUT": str(tmp_path / "run"),
    }
    subprocess.run([EXAMPLE / "run.sh"], env=environ, timeout=3000, check=True)
    lines = [json.loads(line) for line in (tmp_path / "run/logging.jsonl").read_text().splitlines()]
    curve = [line["eval/counting/accuracy"] for line in lines if "eval/counting/accuracy" in line]
    assert curve[0] < 0.35 and curve[-1] > 0.7
