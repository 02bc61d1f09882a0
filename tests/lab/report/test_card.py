"""The model card of a checkpoint, from files of a run."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import ModelCard

from swift_r1.lab.report.card import model_card

ARGS = {
    "model": "Qwen/Qwen2.5-3B",
    "train_type": "lora",
    "dataset": [
        "AI-MO/NuminaMath-TIR#1000",
        "ms::modelscope/gsm8k:main",
        "rows#1.jsonl",
        "countdown",
    ],
    "reward_funcs": ["accuracy", "format"],
    "reward_weights": [1.0, 0.1],
    "rlhf_type": "grpo",
    "loss_type": "dapo",
    "num_generations": 8,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "cosine",
}


def test_a_card(tmp_path: Path) -> None:
    content = {
        "args": ARGS,
        "world_size": 2,
        "command": ["swift", "rlhf", "--system", "a b"],
        "versions": {"torch": "2"},
    }
    (tmp_path / "args.json").write_text(json.dumps(content))
    rows = [
        {"step": step, "reward": step / 1000, "kl": None if step % 2 else 0.5}
        for step in range(1, 201)
    ]
    rows += [
        {"step": 100, "eval/math500/accuracy": 0.25},
        {"step": 200, "eval/math500/accuracy": 0.5},
    ]
    (tmp_path / "logging.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = model_card(tmp_path, 150)
    card = ModelCard(text)
    assert card.data.base_model == "Qwen/Qwen2.5-3B" and card.data.library_name == "peft"
    assert card.data.datasets == ["AI-MO/NuminaMath-TIR", "modelscope/gsm8k"]
    for part in (
        "| 1 | 0.001 |  |",
        "| 150 | 0.150 | 0.5000 |",
        "| 100 | 0.250 |",
        "--system 'a b'\n```",
        "format x 0.1",
    ):
        assert part in text
    assert "| 200 |" not in text and text.count("\n| ") < 40
    # what is logged after the step is not its own
    assert "reward rises" not in text
    line = "reward rises: 0.0335 to 0.167, +0.13 (95 %: +0.13 to +0.13), first and last 66 of 200 rounds"
    assert f"## Training\n\n{line}\n\n| step |" in model_card(tmp_path, 200)
