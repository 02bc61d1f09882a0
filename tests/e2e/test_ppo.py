"""PPO through `swift rlhf`: what it logs, how it learns beside adapters, and that its critic can be used again."""

import json

import pytest

PPO = {
    "rlhf_type": "ppo",
    "num_generations": 1,
    "per_device_train_batch_size": 16,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "learning_rate": 1e-4,
    "critic_learning_rate": 3e-3,
    "kl_coef": 0.02,
    "missing_eos_penalty": 0.5,
    "critic_warmup_steps": 4,
}
LOGGED = (
    *(
        "value_loss",
        "explained_variance",
        "returns/mean",
        "returns/std",
        "values/mean",
        "kl",
        "kl_penalty",
    ),
    *("critic/grad_norm", "critic/learning_rate", "clip_ratio/value", "clip_ratio/low", "skipped"),
)


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_ppo(rlhf, tiny_model, tmp_path, processes):
    zero = {"deepspeed": "zero3", "per_device_train_batch_size": 8} if processes == 2 else {}
    run = rlhf(tiny_model, processes, max_steps=40, save_steps=40, **PPO | zero)
    assert run.code == 0
    assert "with a new value head of zeros" in run.errors
    steps = run.steps
    for line in steps:
        assert all(name in line for name in LOGGED)
        assert line["critic/learning_rate"] == 3e-3 and line["skipped"] == 0
    assert [line["learning_rate"] for line in steps[:5]] == [0, 0, 0, 0, 1e-4]
    assert steps[0]["values/mean"] == 0 and steps[-1]["value_loss"] < steps[0]["value_loss"]
    rows = run.lines("completions.jsonl")
    assert len({row["advantage"] for row in rows}) > 2
    # The penalty of completions that were cut is in the reward.
    cut = [row for row in rows if row["finish_reason"] == "length"]
    assert cut and all(row["reward"] == pytest.approx(row["rewards/digits"] - 0.5) for row in cut)

    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    checkpoint = run.folder / "checkpoint-40"
    AutoModelForCausalLM.from_pretrained(checkpoint)
    assert (
        AutoModelForSequenceClassification.from_pretrained(checkpoint / "critic")
        .score.weight.abs()
        .max()
        > 0
    )
    again = rlhf(
        checkpoint,
        max_steps=1,
        **PPO
        | {
            "critic_model": checkpoint / "critic",
            "critic_warmup_steps": 0,
            "output_dir": tmp_path / "again",
        },
    )
    assert again.code == 0 and "with its own value head" in again.errors
    (line,) = again.steps
    assert line["values/mean"] != 0


@pytest.mark.long
@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_ppo_beside_adapters(rlhf, tiny_model, train_type):
    """The adapters alone are saved as the policy, the critic whole."""
    run = rlhf(tiny_model, max_steps=8, save_steps=8, train_type=train_type, lora_rank=4, **PPO)
    assert run.code == 0 and "80,704 of 80,704 parameters are trained" in run.errors
    checkpoint = run.folder / "checkpoint-8"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert json.loads((checkpoint / "critic" / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]
