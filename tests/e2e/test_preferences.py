"""`swift rlhf --rlhf_type dpo` and its like as a user runs them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swift_r1.lab.diagnosis.verdict import headline
from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.record.glossary import unknown
from tests import forks

MESSAGES = [
    {
        "messages": [
            {"role": "user", "content": f"say {n}"},
            {"role": "assistant", "content": str(n) * 3},
        ],
        "rejected_response": "x" * (1 + n % 3),
    }
    for n in range(40)
]
TRL = [
    {
        "prompt": row["messages"][:1],
        "chosen": row["messages"][1:],
        "rejected": [{"role": "assistant", "content": row["rejected_response"]}],
    }
    for row in MESSAGES
]


@pytest.fixture
def rlhf(tiny_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """`rlhf(name, code=0, processes=1, rows=..., **flags)`: the folder of a run that has ended, and what it said."""

    def run(
        name: str, code: int = 0, processes: int = 1, rows: Any = MESSAGES, **flags: Any
    ) -> tuple[Path, str]:
        data = tmp_path / "pairs.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {
            "rlhf_type": "dpo",
            "model": tiny_model,
            "dataset": data,
            "output_dir": tmp_path / name,
            "add_version": "false",
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "report_to": "none",
        } | flags
        words = [
            word
            for flag, value in given.items()
            for word in (f"--{flag}", *map(str, value if isinstance(value, list) else [value]))
        ]
        environ = {"NPROC_PER_NODE": str(processes), "OMP_NUM_THREADS": "1"}
        done = forks.run(
            ["-m", "swift_r1", "rlhf", *words], cwd=tmp_path, environ=environ, timeout=280
        )
        print(done.stdout, done.stderr)
        assert done.returncode == code
        return tmp_path / name, done.stderr

    return run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]


def test_a_run_and_the_same_run_cut_otherwise(rlhf) -> None:
    """One process with rows as ms-swift has them, and two with TRL's, packed, in smaller micro-batches."""
    about = {"eval_steps": 4, "split_dataset_ratio": 0.1, "rpo_alpha": 0.1, "label_smoothing": 0.1}
    folder, said = rlhf("whole", **about, metric_for_best_model="rewards/margins", save_steps=4)
    log = lines(folder)
    assert not unknown({key for line in log for key in line})
    *steps, last = log
    assert steps[0]["rewards/margins"] == 0 and steps[0]["loss/sigmoid"] == pytest.approx(0.693147)
    assert steps[3]["rewards/margins"] > 0 and last["eval/pairs/pairs"] == 4
    assert "held-out pairs right" in said
    diagnosis = Diagnosis(folder)
    diagnosis.refresh()
    line = headline(diagnosis.verdict, diagnosis.past)
    assert line.startswith("compares answers: loss ") and "held-out margin on pairs" in line
    card = (folder / "checkpoint-4/README.md").read_text()
    assert "dpo, loss " in card and "grpo" not in card.lower()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best_metric"] == last["eval/pairs/rewards/margins"]
    cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "packing": "true"}
    other, _ = rlhf("cut", processes=2, rows=TRL, **about, **cut)
    for one, two in zip(log, lines(other), strict=True):
        for key in {"loss", "rewards/margins", "eval/pairs/loss", "tokens_learned"} & one.keys():
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
    whole, spread = (load_file(one / "checkpoint-4/model.safetensors") for one in (folder, other))
    for name, weight in whole.items():
        torch.testing.assert_close(spread[name], weight, rtol=0, atol=1e-3)


def test_a_resumed_run_is_the_same_bit_for_bit(rlhf) -> None:
    """Of adapters, whose reference is the model without them."""
    about = {"save_steps": 2, "deterministic": "true", "train_type": "lora"}
    folder, _ = rlhf("run", **about)
    before = (folder / "checkpoint-4/adapter_model.safetensors").read_bytes()
    log = [(line["step"], line["loss"]) for line in lines(folder)]
    assert log[0][1] == pytest.approx(0.693147) and log[-1][1] < 0.6
    shutil.rmtree(folder / "checkpoint-4")
    rlhf("run", **about, resume_from_checkpoint=folder / "checkpoint-2")
    assert (folder / "checkpoint-4/adapter_model.safetensors").read_bytes() == before
    assert [(line["step"], line["loss"]) for line in lines(folder)] == log


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [{"deepspeed": "zero3"}, {"fsdp": "fsdp2"}, {"sequence_parallel_size": 2}]
)
def test_weights_and_rows_that_are_spread(rlhf, flags: dict[str, Any]) -> None:
    folder, _ = rlhf("whole", max_steps=2)
    other, _ = rlhf("spread", processes=2, max_steps=2, per_device_train_batch_size=2, **flags)
    for one, two in zip(lines(folder), lines(other), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"loss_type": "simpo"}, "--loss_type simpo is not one of --rlhf_type dpo: sigmoid, hinge"),
        ({"rlhf_type": "simpo", "loss_type": ["sigmoid", "hinge"]}, "takes one loss"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": 1}, "has 1 weights for 2"),
        ({"rlhf_type": "orpo", "ref_model": "x"}, "--ref_model has no effect without a reference"),
        ({"num_generations": 4}, "--num_generations is of sampling"),
        ({"train_type": "lora", "lora_dropout": 0.1}, "--lora_dropout is not for pairs"),
        ({"rows": [MESSAGES[0] | {"rejected_response": "000"}]}, "is the chosen one"),
        ({"rows": [{"messages": MESSAGES[0]["messages"]}]}, "no rejected answer"),
        (
            {"rows": [{"prompt": "a", "chosen": "b", "rejected": MESSAGES[0]["messages"]}]},
            "one form",
        ),
    ],
)
def test_what_is_refused(rlhf, flags: dict[str, Any], said: str) -> None:
    assert said in rlhf("refused", code=2, **flags)[1]
