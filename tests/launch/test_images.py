"""Rows with images before a model loads: what refuses them, and what `swift check` shows of them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import CheckArguments
from swift_r1.flags.sft import ALWAYS, SftArguments
from swift_r1.launch.checks.images import reads_images, row_faults
from swift_r1.launch.checks.run import run_checks, show
from swift_r1.runtime.terminal import Terminal
from tests.vision import picture, write_tiny

ROW = {
    "messages": [{"role": "user", "content": "<image>"}],
    "images": [{"path": "a.png", "sha256": "0", "width": 1, "height": 1}],
}
TEXT = {"messages": [{"role": "user", "content": "<image>"}], "images": []}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_R1_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def faults(kind: Any, *words: str) -> list[str]:
    recorded = ALWAYS if kind is SftArguments else None
    args = parse_arguments(kind, ["--dataset", "d", *words], {}, recorded=recorded)
    assert row_faults(args, [TEXT], []) == []
    return row_faults(args, [TEXT], [ROW])


def test_what_shows_texts_alone_refuses_rows_with_images(sees: Path, tiny_model: Path) -> None:
    grpo = ("--rlhf_type", "grpo", "--reward_funcs", "format")
    base = (*grpo, "--model", str(sees))
    assert faults(RlhfArguments, *base) == []
    args = parse_arguments(RlhfArguments, ["--dataset", "d", *base], {})
    found = {
        "a text model": faults(RlhfArguments, *grpo, "--model", str(tiny_model)),
        "turns": faults(RlhfArguments, *base, "--multi_turn_scheduler", "math_tip_trick"),
        "a critic": faults(RlhfArguments, *base[2:], "--rlhf_type", "ppo"),
        "a teacher": faults(RlhfArguments, *base, "--teacher_model", str(sees)),
        "a reward model": faults(RlhfArguments, *base, "--reward_model", str(sees)),
        "experts": row_faults(replace(args, chord_sft_dataset=["d"]), [ROW]),
        "parts of sequences": row_faults(replace(args, sequence_parallel_size=2), [ROW]),
    }
    said = {
        "a text model": f"rows have images, and --model {tiny_model} reads texts alone: ",
        "turns": "rows have images, and several turns, and tools, show the model texts alone: ",
        "a critic": "rows have images, and a critic (--rlhf_type ppo) reads texts alone: ",
        "a teacher": "rows have images, and a teacher reads texts alone: ",
        "a reward model": "rows have images, and --reward_model reads texts alone: ",
        "experts": "rows have images, and --chord_sft_dataset has texts alone: ",
        "parts of sequences": "rows have images, and --sequence_parallel_size cuts texts alone: ",
    }
    for name, (fault,) in found.items():
        assert fault.startswith(said[name]) and "--columns" in fault


def test_whether_a_model_has_a_tower(sees: Path, tiny_model: Path, tmp_path: Path) -> None:
    assert reads_images(str(sees)) is True
    assert reads_images(str(tiny_model)) is False
    assert reads_images(str(tmp_path)) is None
    assert reads_images("nobody/nothing") is None


def written(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_check_shows_what_the_model_will_see(sees: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(300, 200))
    (tmp_path / "long.png").write_bytes(picture(20_000, 1))
    file = written(
        tmp_path,
        {"query": "text alone"},
        {"query": "what?", "images": ["a.png"]},
        *({"query": f"why {number}?", "images": ["a.png"]} for number in range(3)),
        {"query": "how?", "images": ["long.png"]},
    )
    words = ["--dataset", file, "--model", str(sees), "--max_pixels", "15000"]
    report = run_checks(parse_arguments(CheckArguments, words, {}))
    assert report.ok, report.faults
    (data,) = report.to_json()["datasets"]
    # 150 x 100 is scaled to whole patches of 8, at most 48 x 48 in all
    assert list(data["images"]) == [{"size": (150, 100), "tokens": 28}]
    assert report.notes == [
        "1 of 6 training prompts left out: they have images that the model's processor refuses, for example rows:5: "
        "15000 x 1 pixels, absolute aspect ratio must be smaller than 200, got 15000.0"
    ]
    out = io.StringIO()
    show(report, Terminal(file=out, width=200))
    shown = "image 1: 150 x 100 pixels, 28 tokens"
    assert shown in out.getvalue()
    without = run_checks(parse_arguments(CheckArguments, ["--dataset", file], {}))
    assert without.to_json()["datasets"][0]["images"][0]["size"] == (300, 200)


def test_check_says_that_a_model_reads_texts(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    file = written(tmp_path, {"query": "what?", "images": ["a.png"]})
    words = ["--dataset", file, "--model", str(tiny_model)]
    report = run_checks(parse_arguments(CheckArguments, words, {}))
    assert not report.ok
    assert f"--model {tiny_model} reads texts alone" in report.datasets[0].problems[0]


def test_limits_of_sizes() -> None:
    base = ["--rlhf_type", "grpo", "--dataset", "d", "--model", "m", "--reward_funcs", "format"]

    def sizes(*words: str, **environ: str) -> tuple[int | None, int | None]:
        args = parse_arguments(RlhfArguments, [*base, *words], environ)
        rules = args.data_flags.image_rules
        assert (rules.max_pixels, rules.min_pixels) == (args.max_pixels, args.min_pixels)
        return rules.max_pixels, rules.min_pixels

    assert sizes() == (None, None)
    assert sizes("--max_pixels", "9", "--min_pixels", "4") == (9, 4)
    assert sizes(MAX_PIXELS="401408", MIN_PIXELS=" 784") == (401408, 784)  # of ms-swift's scripts
    assert sizes("--max_pixels", "9", MAX_PIXELS="401408") == (9, None)
    with pytest.raises(UsageError, match="--min_pixels 9 is more than --max_pixels 4"):
        sizes("--max_pixels", "4", "--min_pixels", "9")
    with pytest.raises(UsageError, match="MAX_PIXELS=large must be a whole number of pixels"):
        sizes(MAX_PIXELS="large")
