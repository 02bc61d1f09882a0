"""An evaluation in training, and the same checkpoint evaluated alone, are the same completions and the same figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments
from swift_r1.flags.eval_tasks import BOXED
from swift_r1.flags.parser import parse_arguments
from swift_r1.training.evaluation.evaluate import plain_means
from tests import forks
from tests.lab.evaluation.conftest import rows_of

PLUGIN = Path(__file__).parents[2] / "e2e" / "digits_plugin.py"

Evaluate = Callable[..., Path]


def train(model: Path, folder: Path, **flags: Any) -> list[dict[str, Any]]:
    """The evaluation lines of `swift rlhf` on the digits task."""
    defaults = {
        "rlhf_type": "grpo",
        "model": model,
        "external_plugins": PLUGIN,
        "dataset": "counting#200",
        "reward_funcs": "digits",
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "gradient_checkpointing": "false",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "output_dir": folder,
        "add_version": "false",
    }
    words: list[str] = []
    for name, value in (defaults | flags).items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    done = forks.run(["-m", "swift_r1", "rlhf", *words], cwd=folder.parent, timeout=280)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [line for line in lines if any(name.startswith("eval/") for name in line)]


@pytest.mark.long
def test_in_training_and_alone_agree(
    swift_eval: Evaluate, tiny_model: Path, gsm8k_file: Path, tmp_path: Path
) -> None:
    own = {
        "name": "second",
        "dataset": f"gsm8k={gsm8k_file}",
        "limit": 5,
        "num_generations": 2,
        "temperature": 0.7,
    }
    own |= {"max_completion_length": 20, "system": "Count.", "instruction": "In digits."}
    own |= {"prompt_template": "no", "response_prefix": "<think>"}
    lines = train(
        tiny_model,
        tmp_path / "run",
        eval_datasets=[f"gsm8k={gsm8k_file}", json.dumps(own)],
        eval_steps=2,
        eval_unit="rollout",
        eval_on_start="true",
        eval_temperature=0,
        num_generations_eval=1,
        eval_max_completion_length=40,
        per_device_eval_batch_size=6,
        num_iterations=2,
        max_steps=8,
        save_steps=4,
    )
    # Two optimizer steps a round: every second round is every fourth step.
    assert [line["step"] for line in lines] == [0, 4, 8]
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "eval_completions.jsonl").read_text().splitlines()
    ]
    flags: dict[str, Any] = {
        "n": 1,
        "temperature": 0,
        "max_completion_length": 40,
    }
    for step in (4, 8):
        line = next(line for line in lines if line["step"] == step)
        folder = swift_eval(
            tmp_path / "run" / f"checkpoint-{step}",
            benchmarks=[
                json.dumps({"dataset": f"gsm8k={gsm8k_file}", "instruction": BOXED}),
                json.dumps(own),
            ],
            **flags,
            output_dir=tmp_path / f"alone-{step}",
        )
        alone = rows_of(folder)
        inside = [row for row in rows if row["step"] == step]
        for name, count in (("gsm8k", 12), ("second", 10)):
            texts = [row["completion"] for row in alone if row["benchmark"] == name]
            assert len(texts) == count
            assert texts == [row["completion"] for row in inside if row["benchmark"] == name]
            assert all(text.startswith("<think>") for text in texts) == (name == "second")
        report = json.loads((folder / "report.json").read_text())
        for name, own_report in report["benchmarks"].items():
            for metric, value in own_report["metrics"].items():
                assert line[f"eval/{name}/{metric}"] == value["value"]
            n = own_report["n"]
            assert line[f"eval/{name}/avg@{n}/low"] == own_report["metrics"][f"avg@{n}"]["low"]
            assert line[f"eval/{name}/mean_length"] == own_report["mean_length"]
            assert line[f"eval/{name}/truncated"] == own_report["truncated"]
    prompts = {row["prompt"] for row in rows if row["benchmark"] == "second"}
    assert len(prompts) == 5 and all("Count." in text and "In digits." in text for text in prompts)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["last_evaluation"]["eval/gsm8k/avg@1"] == lines[-1]["eval/gsm8k/avg@1"]
    # The weights moved, so the agreement says something.
    assert [row["completion"] for row in rows if row["step"] == 4] != [
        row["completion"] for row in rows if row["step"] == 8
    ]


WORDS = "--rlhf_type grpo --model m --dataset d --reward_funcs format --num_generations 2 --per_device_train_batch_size 2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--eval_datasets gsm8k", "--eval_datasets has no effect without --eval_steps"),
        (
            "--eval_on_start true --eval_unit rollout",
            "--eval_unit has no effect without --eval_steps",
        ),
        (
            "--eval_steps 1 --save_steps 1 --eval_unit rollout --metric_for_best_model accuracy",
            "--metric_for_best_model needs --eval_unit step",
        ),
    ],
)
def test_bad_flags(words: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_arguments(RlhfArguments, [*WORDS.split(), *words.split()], {})
    assert any(said in fault for fault in error.value.faults), error.value.faults


def test_flags_of_evaluation_reach_each_data_set() -> None:
    words = "--eval_steps 5 --eval_datasets gsm8k math500#7 --eval_limit 20 --num_generations_eval 4 --eval_top_p 0.9"
    args = parse_arguments(
        RlhfArguments, [*WORDS.split(), *words.split(), "--eval_max_completion_length", "99"], {}
    )
    gsm8k, math500 = args.eval_tasks()
    assert (gsm8k.limit, gsm8k.num_generations, gsm8k.top_p, gsm8k.max_completion_length) == (
        20,
        4,
        0.9,
        99,
    )
    assert (math500.limit, math500.reward, math500.temperature) == (7, "math", 1.0)
    # Without --eval_limit a benchmark is whole, and the run's own held-out prompts are 64.
    plain = parse_arguments(
        RlhfArguments, [*WORDS.split(), "--eval_steps", "5", "--eval_datasets", "gsm8k"], {}
    )
    assert plain.eval_tasks()[0].limit is None and plain.eval_limit == 64


def test_the_plain_mean_of_several_sets() -> None:
    metrics = {
        "eval/gsm8k/accuracy": 0.5,
        "eval/gsm8k/reward": 0.4,
        "eval/gsm8k/completions/mean_length": 10.0,
        "eval/aime24/accuracy": 0.1,
        "eval/aime24/reward": 0.2,
        "eval/aime24/completions/mean_length": 30.0,
        "eval/aime24/pass@1": 0.1,
    }
    wanted = {"accuracy": 0.3, "reward": 0.3, "completions/mean_length": 20.0}
    assert plain_means(metrics) == pytest.approx(
        {f"eval/mean/{key}": value for key, value in wanted.items()}
    )
    assert plain_means({key: value for key, value in metrics.items() if "gsm8k" in key}) == {}
