"""`swift rlhf` with rollouts in its own process: it learns, and leaves what the output contract says."""

import hashlib
import json

import pytest

OF_A_STEP = """
step loss reward reward_std frac_reward_zero_std entropy grad_norm learning_rate rewards/digits/mean
rewards/digits/std rewards/digits/invalid clip_ratio/low clip_ratio/high completions/mean_length
completions/max_length completions/clipped_ratio rollout/weight_version rollout/logp_diff tokens_per_second
time/generate time/reward time/train time/sync time/step
"""
STEP_KEYS = set(OF_A_STEP.split())


def test_reward_rises(rlhf, tiny_model):
    run = rlhf(
        tiny_model,
        per_device_train_batch_size=32,
        max_steps=14,
        learning_rate=8e-3,
        weight_decay=0,
        eval_steps=14,
        eval_on_start="true",
        eval_limit=8,
    )
    assert run.code == 0
    rewards = [line["reward"] for line in run.steps]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + 0.3, rewards
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["steps"] == 14 and summary["last_reward"] == rewards[-1]
    evaluations = [line for line in run.lines("logging.jsonl") if "eval/counting/reward" in line]
    assert [line["step"] for line in evaluations] == [0, 14]
    assert evaluations[1]["eval/counting/reward"] > evaluations[0]["eval/counting/reward"] + 0.3


def test_outputs_are_as_the_contract_says(rlhf, tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flags = {
        "max_steps": 5,
        "save_steps": 2,
        "save_total_limit": 2,
        "beta": 0.1,
        "learning_rate": 1e-3,
    }
    run = rlhf(tiny_model, cold=True, num_iterations=1, **flags)
    assert run.code == 0
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4, 5]
    for line in run.steps:
        assert STEP_KEYS | {"kl"} <= line.keys()
        assert line["rollout/logp_diff"] < 1e-3
    assert run.steps[0]["kl"] == pytest.approx(0, abs=1e-6) and run.steps[-1]["kl"] > 1e-5
    completions = run.lines("completions.jsonl")
    assert len(completions) == 5 * 8
    assert {row["step"] for row in completions} == {1, 2, 3, 4, 5}
    assert len({row["request_id"] for row in completions}) == 10
    first = completions[0]
    assert (
        first["rewards/digits"] == first["reward"]
        and first["weight_version"] == 1
        and "start" in first
    )
    assert {path.name for path in run.folder.glob("checkpoint-*")} == {
        "checkpoint-4",
        "checkpoint-5",
    }
    checkpoint = run.folder / "checkpoint-5"
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    for name, entry in files.items():
        assert hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == entry["sha256"]
    assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template
    assert (run.folder / "images" / "reward.png").stat().st_size > 0
    assert json.loads((run.folder / "args.json").read_text())["args"]["max_steps"] == 5


def test_a_prompt_far_over_the_models_context_is_left_out(rlhf, tiny_model, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"query": text}) + "\n" for text in ("x" * 120_000, "one", "two"))
    )
    run = rlhf(tiny_model, dataset=file, max_steps=2, use_vllm="false")
    assert run.code == 0 and len(run.steps) == 2
    assert (
        "1 of 3 training prompts left out: longer than 1012 tokens (--max_length, or the model's"
        in run.errors
    )


def test_lora_trains_adapters_and_saves_them(rlhf, tiny_model):
    from transformers import AutoModelForCausalLM

    run = rlhf(
        tiny_model,
        train_type="lora",
        lora_rank=4,
        target_modules=["q_proj", "v_proj"],
        beta=0.1,
        max_steps=3,
        learning_rate=0.01,
    )
    assert run.code == 0
    assert "lora: " in run.errors and "parameters are trained" in run.errors
    for line in run.steps:
        assert line["rollout/logp_diff"] < 1e-3
    assert run.steps[0]["kl"] == pytest.approx(0, abs=1e-6) and run.steps[-1]["kl"] > 1e-4
    checkpoint = run.folder / "checkpoint-3"
    assert {path.name for path in checkpoint.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert json.loads((checkpoint / "adapter_config.json").read_text())["r"] == 4
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    trained = {name: p for name, p in model.named_parameters() if ".lora_B." in name}
    assert {name.split(".")[-4] for name in trained} == {"q_proj", "v_proj"}
    assert all(parameter.abs().max() > 1e-3 for parameter in trained.values())


def test_an_unknown_target_module_is_named(rlhf, tiny_model):
    run = rlhf(tiny_model, train_type="lora", target_modules=["nonsense"], max_steps=1)
    assert run.code == 2 and "--target_modules nonsense" in run.errors


def test_a_round_of_several_steps_reuses_its_completions(rlhf, tiny_model):
    """Two steps a round, two passes: the ratio leaves 1, and old log-probs are those from before the round."""
    run = rlhf(
        tiny_model,
        max_steps=8,
        steps_per_generation=2,
        num_iterations=2,
        learning_rate=1e-2,
        epsilon=0.01,
        beta=0,
    )
    assert run.code == 0
    assert [line["rollout/weight_version"] for line in run.steps] == [1, 1, 1, 1, 2, 2, 2, 2]
    ratios = [line["ratio"] for line in run.steps]
    assert ratios[0] == pytest.approx(1, abs=1e-6)
    assert any(abs(ratio - 1) > 1e-4 for ratio in ratios[1:4])
    assert any(line["clip_ratio/low"] + line["clip_ratio/high"] > 0 for line in run.steps)
    for line in run.steps:
        assert line["rollout/logp_diff"] < 1e-3


def test_a_reward_that_keeps_failing_ends_the_run_and_is_named(rlhf, tiny_model, tmp_path):
    plugin = tmp_path / "broken.py"
    plugin.write_text(
        "from swift.rewards import ORM, orms\n"
        "class Broken(ORM):\n"
        "    def __call__(self, completions, trainer_state, **kwargs):\n"
        "        if trainer_state.global_step:  # the check at the start finds nothing\n"
        "            raise ValueError('no judge today')\n"
        "        return [0.0] * len(completions)\n"
        "orms['broken'] = Broken\n"
    )
    run = rlhf(
        tiny_model,
        external_plugins=[
            str(plugin),
            str(__file__).replace("test_embedded.py", "digits_plugin.py"),
        ],
        reward_funcs=["digits", "broken"],
        max_steps=30,
    )
    assert run.code == 5
    assert "broken" in run.errors and "no judge today" in run.errors
