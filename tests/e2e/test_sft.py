"""`swift sft` as a user runs it."""

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
from tests.lab.runs.entries import undescribed

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"{n}+1"},
            {"role": "assistant", "content": str(n + 1)},
            {"role": "user", "content": "again" * (n % 3 + 1)},
            {"role": "assistant", "content": f"it is {n + 1}", "loss": n % 4 != 0},
        ]
    }
    for n in range(40)
]


@pytest.fixture
def sft(tiny_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """`sft(name, processes=1, **flags)`: the folder of a finished run, and what it said."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def run(name: str, processes: int = 1, **flags: Any) -> tuple[Path, str]:
        given = {
            "model": tiny_model,
            "dataset": data,
            "output_dir": tmp_path / name,
            "add_version": "false",
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": "false",
            "logging_steps": 1,
            "report_to": "none",
        } | flags
        words = [word for flag, value in given.items() for word in (f"--{flag}", str(value))]
        environ = {"NPROC_PER_NODE": str(processes), "OMP_NUM_THREADS": "1"}
        done = forks.run(
            ["-m", "swift_r1", "sft", *words], cwd=tmp_path, environ=environ, timeout=280
        )
        print(done.stdout, done.stderr)
        assert done.returncode == 0
        return tmp_path / name, done.stderr

    return run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]


def test_a_run_and_the_same_run_cut_otherwise(sft) -> None:
    """One process, and two with packed rows in smaller micro-batches."""
    about = {"max_steps": 3, "eval_steps": 3, "split_dataset_ratio": 0.1}
    folder, said = sft("whole", **about, metric_for_best_model="loss", save_steps=3)
    log = lines(folder)
    assert not unknown({key for line in log for key in line})
    written = [str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()]
    assert not undescribed(written)
    *steps, last = log
    assert [line["tokens_learned"] > 0 for line in steps] == [True] * 3
    assert steps[2]["loss"] < steps[0]["loss"] and last["eval/rows/loss"] > 0
    assert "held-out perplexity" in said
    said_of_it = Diagnosis(folder)
    said_of_it.refresh()
    line = headline(said_of_it.verdict, said_of_it.past)
    assert line.startswith("learns answers: loss ") and "held-out perplexity on rows" in line
    card = (folder / "checkpoint-3/README.md").read_text()
    assert "sft, --loss_scale default" in card and "grpo" not in card.lower()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best_metric"] == last["eval/rows/loss"]
    other, _ = sft(
        "cut",
        2,
        **about,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        packing="true",
    )
    for one, two in zip(log, lines(other), strict=True):
        for key in {"loss", "token_accuracy", "eval/rows/loss", "tokens_learned"} & one.keys():
            assert two[key] == pytest.approx(one[key], rel=1e-5), key
    whole, cut = (load_file(one / "checkpoint-3/model.safetensors") for one in (folder, other))
    for name, weight in whole.items():
        torch.testing.assert_close(cut[name], weight, rtol=0, atol=2e-4)


def test_a_resumed_run_is_the_same_bit_for_bit(sft, tmp_path: Path) -> None:
    about = {"save_steps": 2, "deterministic": "true", "train_type": "lora", "lora_dropout": 0.1}
    folder, _ = sft("run", **about)
    before = (folder / "checkpoint-4/adapter_model.safetensors").read_bytes()
    log = [(line["step"], line["loss"]) for line in lines(folder)]
    shutil.rmtree(folder / "checkpoint-4")
    _, said = sft("run", **about, resume_from_checkpoint=folder / "checkpoint-2")
    assert "resuming from" in said
    assert (folder / "checkpoint-4/adapter_model.safetensors").read_bytes() == before
    assert [(line["step"], line["loss"]) for line in lines(folder)] == log


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [{"deepspeed": "zero3"}, {"fsdp": "fsdp2"}, {"sequence_parallel_size": 2}]
)
def test_weights_and_rows_that_are_spread(sft, flags: dict[str, Any]) -> None:
    folder, _ = sft("whole", max_steps=2)
    other, _ = sft("spread", 2, max_steps=2, per_device_train_batch_size=2, **flags)
    for one, two in zip(lines(folder), lines(other), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["tokens_learned"] == one["tokens_learned"]
