"""The commands of a warm start: each is one that its command takes, and the answers of the rows come first."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from swift_r1.cli import why
from swift_r1.flags import RlhfArguments, parse_arguments
from swift_r1.flags.forecast import ForecastArguments
from swift_r1.flags.sft import ALWAYS, SftArguments
from swift_r1.lab.diagnosis.warm_start import warm_start
from tests.lab.diagnosis.test_detectors import diagnosed, rows_of

GIVEN = (
    "--rlhf_type grpo --model m --dataset a.jsonl b#9 --reward_funcs right --per_device_train_batch_size 8 "
    "--external_plugins my.py --system 'be brief' --use_vllm false --output_dir out --resume_from_checkpoint last"
)
NOTHING = {
    "rewards/right/mean": 0.0,
    "rewards/right/std": 0.0,
    "frac_reward_zero_std": 1.0,
    "completions/clipped_ratio": 1.0,
    "time/generate": 30.0,
    "time/reward": 2.0,
}


def commands(more: str = "", seconds: float = 0.5, **plan: Any) -> list[tuple[str, str]]:
    """Each command as its name and its flags, which it takes; and what it costs."""
    words = [*shlex.split(GIVEN), *more.split()]
    args = parse_arguments(RlhfArguments, words, {}).to_dict()
    found = []
    for line in warm_start(["swift", "rlhf", *words], args, {"answered": True} | plan, seconds):
        command, _, cost = line.partition("  # ")
        program, name, *flags = shlex.split(command)
        assert program == "swift"
        if name == "sft":
            sft = parse_arguments(SftArguments, flags, {}, recorded=ALWAYS)
            assert (sft.model, sft.system) == ("m", "be brief")
        elif name == "rlhf":
            rlhf = parse_arguments(RlhfArguments, flags, {})
            assert rlhf.reward_funcs == ["right"] and rlhf.resume_from_checkpoint is None
        else:
            parse_arguments(ForecastArguments, flags, {})
        found.append((command, cost))
    return found


def test_the_answers_of_the_rows_come_first() -> None:
    learn, again, tried, own = commands()
    assert "--dataset a.jsonl 'b#9' --external_plugins my.py" in learn[0]
    assert learn[0].endswith("--output_dir output/warm --add_version false")
    assert learn[1] == "320 answers"
    assert again[0].endswith("--model output/warm/checkpoint-40") and " m " not in again[0]
    assert "--num_prompts 256 --output_file right.jsonl" in tried[0]
    assert tried[1] == "4,096 answers, about 34 min 8 s"
    assert own[0].endswith("--dataset right.jsonl")


def test_rows_without_answers_are_sampled() -> None:
    assert [one.split()[1] for one, _ in commands(answered=False)] == ["forecast", "sft"]
    few = commands(answered=False, dataset_size=10, seconds=math.nan)[0]
    assert "--num_prompts 10" in few[0] and few[1] == "160 answers"


def test_why_names_the_answers_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where every completion was cut off, which is what a model does that does not know the task."""
    given: dict[str, Any] = {"model": "m", "dataset": ["d"], "max_completion_length": 48}
    rows = rows_of(NOTHING, 12)
    found = diagnosed(tmp_path / "yes", rows, answered=True, **given).verdict
    assert found is not None
    assert found.causes[0].advice.startswith("swift sft first, on the answers that the rows have")
    assert [cause.name for cause in found.causes].count("no signal") == 1
    assert why.run([str(tmp_path / "yes")]) != 0
    shown = capsys.readouterr().out
    assert shown.index("$ swift sft --model m ") < shown.index("$ swift forecast")
    assert "--num_prompts 256" in shown and "4,096 answers" in shown
    assert all("swift sft first" in one for one in re.findall("sign: no signal.*\n.*", shown))

    found = diagnosed(tmp_path / "no", rows, **given).verdict
    assert found is not None and found.causes[0].name == "truncation"
    assert why.run([str(tmp_path / "no")]) != 0
    assert "swift sft first" not in capsys.readouterr().out
