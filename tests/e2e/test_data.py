"""Data flags in whole runs: streamed files, a prompt format, what the model's turn begins with."""

import json
from pathlib import Path

from transformers import AutoTokenizer

from tests.tool_templates import THINKING

PLUGIN = Path(__file__).parent / "thinks_plugin.py"


def test_streamed_with_a_format_and_a_prefix(rlhf, tiny_model, tmp_path):
    train, held_out = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    train.write_text(
        "".join(json.dumps({"Stem": f"{n}?", "answer": str(n), "step": n}) + "\n" for n in range(9))
    )
    held_out.write_text(json.dumps({"Stem": "held out?", "answer": "1", "step": 1}) + "\n")
    run = rlhf(
        tiny_model,
        external_plugins=PLUGIN,
        dataset=train,
        val_dataset=held_out,
        columns={"stem": "query", "answer": "solution"},
        reward_funcs="begins",
        streaming="true",
        shuffle_buffer_size=4,
        max_steps=6,
        eval_steps=6,
        prompt_template="qwen_math",
        response_prefix="<think>",
    )
    assert run.code == 0
    rows = run.lines("completions.jsonl")
    assert len(rows) == 6 * 8 and len({row["prompt_id"] for row in rows}) == 12
    assert {row["prompt_id"].partition("@")[0] for row in rows} == {f"train:{n}" for n in range(9)}
    for row in [*rows, *run.lines("eval_completions.jsonl")]:
        question = "held out?" if row["prompt_id"].startswith("val") else f"{row['columns/step']}?"
        assert row["prompt"].startswith("<|im_start|>system\nPlease reason step by step")
        assert row["prompt"].endswith(
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>"
        )
        assert row["completion"].startswith("<think>") and row["reward"] == 1.0
        assert row["solution"] == str(row["columns/step"]) and isinstance(row["step"], int)
    assert all(line["rollout/logp_diff"] < 2e-3 for line in run.steps)


def test_arguments_of_the_template(rlhf, tiny_model, tmp_path):
    """They are in the prompts, in the checkpoint's template, and cannot change where the run goes on."""
    file, rows = tmp_path / "mine.jinja", tmp_path / "rows.jsonl"
    file.write_text(THINKING)
    rows.write_text(
        "".join(
            json.dumps({"question": [{"type": "text", "text": f"{n}?"}]}) + "\n" for n in range(9)
        )
    )
    flags = {
        "dataset": rows,
        "prompt_template": file,
        "external_plugins": PLUGIN,
        "reward_funcs": "begins",
    }
    run = rlhf(tiny_model, **flags, enable_thinking="false", max_steps=1)
    assert run.code == 0
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "checkpoint-1")
    for row in run.lines("completions.jsonl"):
        assert row["prompt"].endswith("?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        asked = [
            {"role": "user", "content": row["prompt"].split("user\n")[1].split("<|im_end|>")[0]}
        ]
        assert (
            tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            == row["prompt"]
        )
    flags |= {
        "resume_from_checkpoint": "last",
        "chat_template_kwargs": '{"enable_thinking": true}',
        "max_steps": 2,
    }
    again = rlhf(tiny_model, **flags)
    assert again.code == 2 and "--chat_template_kwargs {} became" in again.errors
    refused = rlhf(tiny_model, dataset=rows, enable_thinking="false", output_dir=tmp_path / "no")
    assert refused.code == 2 and "the chat template does not read enable_thinking" in refused.errors


def test_a_base_model_ends_its_turn_as_the_template_does(rlhf, thinking_base, tmp_path):
    """Its own end token is another than the template's, and the template opens the model's turn with a tag."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}?"}) + "\n" for n in range(9)))
    run = rlhf(
        thinking_base,
        external_plugins=PLUGIN,
        dataset=rows,
        reward_funcs="begins",
        max_completion_length=60,
        max_steps=2,
        eval_steps=2,
    )
    assert run.code == 0
    assert "completions end at the chat template's <|im_end|> too" in run.errors
    tokenizer = AutoTokenizer.from_pretrained(thinking_base)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    completions = [*run.lines("completions.jsonl"), *run.lines("eval_completions.jsonl")]
    assert {row["finish_reason"] for row in completions} == {"stop", "length"}
    for row in completions:
        assert row["prompt"].endswith("<|im_start|>assistant\n<think>\n")
        assert row["completion"].startswith("<think>\n") and row["reward"] == 1.0
        assert "<|im_start|>" not in row["completion"]
    config = json.loads((run.folder / "checkpoint-2" / "generation_config.json").read_text())
    assert set(config["eos_token_id"]) == {tokenizer.eos_token_id, end}
    assert all(line["rollout/logp_diff"] < 2e-3 for line in run.steps)
