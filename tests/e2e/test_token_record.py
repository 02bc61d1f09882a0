"""The token record of runs: what the loss saw and did of each token, against a recomputation, whichever rank had it."""

import math
from functools import cache

import pytest
import torch
from pyarrow import parquet

EPSILON, TEMPERATURE = 0.02, 0.9
TWO_RANKS = {"per_device_train_batch_size": 8}


def recorded(folder):
    """Rows by optimizer step."""
    files = sorted((folder / "tokens").glob("step-*.parquet"))
    return {
        int(path.stem.partition("-")[2]): parquet.read_table(path).to_pylist() for path in files
    }


@cache
def model_of(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@torch.no_grad()
def forward(folder, prompt, completion):
    """Log-probs and entropies of the completion's tokens under the weights in `folder`, from whole logits."""
    logits = (
        model_of(folder)(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        / TEMPERATURE
    )
    logps = logits.log_softmax(-1)
    return logps[range(len(completion)), completion].tolist(), torch.distributions.Categorical(
        logits=logits
    ).entropy().tolist()


def close(values):
    return pytest.approx(values, abs=2e-4)


def test_values_are_those_of_a_slow_recomputation(rlhf, tiny_model):
    """Two rounds of four optimizer steps, the weights of each in a checkpoint."""
    run = rlhf(
        tiny_model,
        max_steps=6,
        steps_per_generation=2,
        num_iterations=2,
        save_steps=1,
        max_completion_length=24,
        learning_rate=2e-4,
        beta=0.1,
        epsilon=EPSILON,
        temperature=TEMPERATURE,
        top_entropy_quantile=0.5,
        log_tokens="all",
    )
    assert run.code == 0
    lines = {
        (row["step"], row["request_id"], row["number"]): row
        for row in run.lines("completions.jsonl")
    }
    record = recorded(run.folder)
    assert list(record) == [1, 2, 3, 4, 5, 6]
    assert [rows[0]["round_step"] for rows in record.values()] == [1, 1, 1, 1, 5, 5]

    def weights_before(step):
        return run.folder / f"checkpoint-{step - 1}" if step > 1 else tiny_model

    clipped = set()
    for step, rows in record.items():
        assert len(rows) == 8 and {row["step"] for row in rows} == {step}
        # entropies of tokens that --top_entropy_quantile kept, and of the others
        by_kept = {True: [], False: []}
        for row in rows:
            line = lines[row["round_step"], row["request_id"], row["number"]]
            assert (line["prompt_id"], line["group"]) == (row["prompt_id"], row["group"])
            prompt, completion, length = (
                row["prompt_token_ids"],
                row["token_ids"],
                len(row["token_ids"]),
            )
            assert row["advantages"] == pytest.approx([line["advantage"]] * length)
            assert row["weight_versions"] == [line["weight_version"]] * length
            logps, entropies = forward(weights_before(step), prompt, completion)
            old, old_entropies = forward(weights_before(row["round_step"]), prompt, completion)
            assert row["logps"] == close(logps) and row["entropies"] == close(entropies)
            assert row["rollout_logps"] == close(old)
            assert row["ref_logps"] == close(forward(tiny_model, prompt, completion)[0])
            assert row["ratios"] == close(
                [math.exp(new - one) for new, one in zip(logps, old, strict=True)]
            )
            for ratio, advantage, clip in zip(
                row["ratios"], row["advantages"], row["clipped"], strict=True
            ):
                low, high = (
                    ratio < 1 - EPSILON and advantage < 0,
                    ratio > 1 + EPSILON and advantage > 0,
                )
                assert clip == high - low
            clipped |= set(row["clipped"])
            for kept, entropy in zip(row["mask"], old_entropies, strict=True):
                by_kept[kept].append(entropy)
        assert (
            abs(len(by_kept[True]) - len(by_kept[False])) <= 1
            and max(by_kept[False]) < min(by_kept[True]) + 1e-5
        )
    assert clipped == {-1, 0, 1}


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"deepspeed": "zero3"}, marks=pytest.mark.long),
        pytest.param({"fsdp": "fsdp2"}, marks=pytest.mark.long),
        {"sequence_parallel_size": 2, "attn_impl": "flash_attn"},
    ],
    ids=str,
)
def test_two_ranks_record_what_one_does(rlhf, tiny_model, tmp_path, backend):
    """And they are the same run, also where both share a row."""
    flags = {"max_steps": 2, "beta": 0.1, "log_tokens": "all", "deterministic": "true"}
    one = rlhf(
        tiny_model, output_dir=tmp_path / "one", **flags | {"per_device_train_batch_size": 16}
    )
    two = rlhf(tiny_model, 2, output_dir=tmp_path / "two", **flags | TWO_RANKS | backend)
    assert one.code == two.code == 0
    for line, other in zip(one.steps, two.steps, strict=True):
        for name in ("reward", "loss", "grad_norm", "kl", "entropy"):
            assert other[name] == pytest.approx(line[name], rel=1e-3, abs=1e-6), name
    told = "--attn_impl flash_attention_2: attention is PyTorch's SDPA here" in two.errors
    assert told == ("attn_impl" in backend)
    expected = [row for rows in recorded(one.folder).values() for row in rows]
    found = [row for rows in recorded(two.folder).values() for row in rows]
    assert len(expected) == len(found) == 32
    for row, other in zip(expected, found, strict=True):
        for name, value in row.items():
            floating = isinstance(value, list) and isinstance(value[0], float)
            assert other[name] == (
                pytest.approx(value, rel=1e-3, abs=1e-5) if floating else value
            ), name


def test_advantages_of_tokens(rlhf, tiny_model):
    run = rlhf(
        tiny_model,
        rlhf_type="ppo",
        num_generations=1,
        per_device_train_batch_size=4,
        kl_coef=0.1,
        max_steps=2,
        log_tokens="all",
    )
    assert run.code == 0
    means = {
        (row["step"], row["request_id"]): row["advantage"] for row in run.lines("completions.jsonl")
    }
    rows = [row for rows in recorded(run.folder).values() for row in rows]
    assert len(rows) == 8 and any(len(set(row["advantages"])) > 2 for row in rows)
    for row in rows:
        mean = sum(row["advantages"]) / len(row["advantages"])
        assert mean == pytest.approx(means[row["round_step"], row["request_id"]], abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            {"log_tokens": "none", "log_tokens_limit": 1},
            "--log_tokens_limit has no effect with --log_tokens none",
        ),
        (
            {"log_tokens": "all", "log_tokens_groups": 1},
            "--log_tokens_groups has no effect with --log_tokens all",
        ),
        ({"log_tokens": "some"}, "must be one of all, sample, none, not 'some'"),
    ],
)
def test_flags_that_do_nothing_are_refused(rlhf, tiny_model, flags, why):
    run = rlhf(tiny_model, **flags)
    assert run.code == 2 and why in run.errors
