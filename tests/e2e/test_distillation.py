"""`swift rlhf` with a teacher, as a user runs it."""

import json
from pathlib import Path

import pytest

from tests.conftest import wait_until_serving

PLUGIN, HINTS = (Path(__file__).with_name(f"{name}_plugin.py") for name in ("digits", "hints"))
TAUGHT = {
    "reward_funcs": [],
    "num_generations": 1,
    "per_device_train_batch_size": 16,
    "learning_rate": 1e-2,
    "max_steps": 12,
    "seed": 3,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, save_model):
    return save_model(tmp_path_factory.mktemp("teacher") / "llama", seed=7)


@pytest.mark.parametrize(
    "topk", [[], pytest.param(102, marks=pytest.mark.long)], ids=["advantages", "loss"]
)
def test_a_teacher_alone_is_learned_from(rlhf, tiny_model, teacher, topk):
    run = rlhf(tiny_model, teacher_model=teacher, gkd_logits_topk=topk, **TAUGHT)
    assert run.code == 0
    kls = [line["teacher_kl"] for line in run.steps]
    assert sum(kls[-3:]) < 0.9 * sum(kls[:3])
    assert {line["reward"] for line in run.steps} == {0.0}
    assert all(line["time/teacher"] > 0 for line in run.steps)
    assert all(line["grad_norm"] > 0 for line in run.steps)


def test_in_the_reward_beside_reward_functions(rlhf, tiny_model, teacher):
    """The advantages are those of the rewards less the KL; the rewards that are logged are not changed."""
    run = rlhf(
        tiny_model,
        teacher_model=teacher,
        teacher_kl_in_reward="true",
        teacher_kl_coef=0.1,
        max_steps=2,
    )
    assert run.code == 0
    rows = [row for row in run.lines("completions.jsonl") if row["step"] == 1]
    for start in range(0, len(rows), 4):
        advantages = [row["advantage"] for row in rows[start : start + 4]]
        assert sum(advantages) == pytest.approx(0, abs=1e-5) and any(advantages)
        assert [row["reward"] for row in rows[start : start + 4]] == [
            row["rewards/digits"] for row in rows[start : start + 4]
        ]


def test_the_policy_teaches_itself_by_a_hint(rlhf, tiny_model, tmp_path):
    flags = TAUGHT | {
        "external_plugins": HINTS,
        "dataset": "hinted#200",
        "gkd_logits_topk": 8,
        "max_steps": 2,
    }
    run = rlhf(tiny_model, teacher_model="policy", **flags)
    assert run.code == 0
    assert all(line["teacher_kl"] > 1e-4 for line in run.steps)
    flags |= {
        "external_plugins": PLUGIN,
        "dataset": "counting#200",
        "output_dir": tmp_path / "plain",
    }
    plain = rlhf(tiny_model, teacher_model="policy", **flags)
    assert plain.code == 2 and "teacher_prompt" in plain.errors


@pytest.mark.long
def test_a_server_teaches_as_the_model_itself_does(rlhf, tiny_model, teacher, start_tiny, tmp_path):
    """Two servers of one model, each for the rows of its tag."""
    servers = [start_tiny(teacher) for _ in range(2)]
    for server in servers:
        wait_until_serving(server)
    flags = TAUGHT | {
        "gkd_logits_topk": 5,
        "max_steps": 2,
        "temperature": 0.9,
        "learning_rate": 1e-3,
    }
    flags |= {"external_plugins": HINTS, "dataset": "hinted#200"}
    tags = [
        json.dumps({"url": one.url, "tags": [tag]})
        for one, tag in zip(servers, ("even", "odd"), strict=True)
    ]
    more = {
        "teacher_model_server": tags,
        "teacher_tag_key": "subject",
        "output_dir": tmp_path / "served",
    }
    served = rlhf(tiny_model, **flags | more)
    own = rlhf(tiny_model, teacher_model=teacher, output_dir=tmp_path / "own", **flags)
    assert served.code == own.code == 0
    for one, other in zip(served.steps, own.steps, strict=True):
        for name in ("loss", "grad_norm", "teacher_kl"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4)


@pytest.mark.long
def test_adapters_teach_the_model_under_them(rlhf, tiny_model, tmp_path):
    lora = {"train_type": "lora", "lora_rank": 4, "learning_rate": 1e-2}
    first = rlhf(tiny_model, max_steps=2, output_dir=tmp_path / "first", **lora)
    run = rlhf(
        tiny_model, teacher_adapters=first.folder / "checkpoint-2", **TAUGHT | {"max_steps": 2}
    )
    assert first.code == run.code == 0
    assert all(line["teacher_kl"] > 1e-5 for line in run.steps)
    none = rlhf(
        tiny_model,
        teacher_model=tiny_model,
        output_dir=tmp_path / "itself",
        **TAUGHT | {"max_steps": 1},
    )
    assert none.code == 0 and none.steps[0]["teacher_kl"] == pytest.approx(0, abs=1e-9)


def test_a_teacher_of_other_tokens_is_refused(rlhf, tiny_model, tmp_path, save_model):
    from transformers import AutoTokenizer

    other = save_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    run = rlhf(tiny_model, teacher_model=other, **TAUGHT)
    assert run.code == 2 and "has another tokenizer than --model" in run.errors
    run = rlhf(
        tiny_model,
        teacher_model=tiny_model,
        gkd_logits_topk=999,
        **TAUGHT | {"output_dir": tmp_path / "more"},
    )
    assert run.code == 2 and "--gkd_logits_topk 999: the policy knows" in run.errors


def test_rlsd_and_sdar_of_a_policy_that_reads_a_hint(rlhf, tiny_model):
    """Rewards decide the direction of each completion; the teacher moves weight between its tokens, or adds a loss."""
    flags = {"external_plugins": [PLUGIN, HINTS], "dataset": "hinted#200", "max_steps": 3}
    flags |= {"learning_rate": 1e-2, "log_tokens": "all"}
    run = rlhf(
        tiny_model, advantage_reweight="rlsd", rlsd_lambda=0.8, rlsd_lambda_warmup_steps=2, **flags
    )
    assert run.code == 0
    assert [line["rlsd_lambda"] for line in run.steps] == [0, 0.4, 0.8]
    assert all(line["grad_norm"] > 0 for line in run.steps)
    flags |= {"teacher_model": "policy"}  # the default
    run = rlhf(
        tiny_model,
        sdar_loss_coef=0.5,
        sdar_gate_beta=2,
        **flags | {"output_dir": run.folder / "sdar", "max_steps": 1},
    )
    assert run.code == 0
    gates = [(line["sdar/gate_mean"], line["sdar/teacher_gap_mean"]) for line in run.steps]
    assert all(0 < gate < 1 and abs(gap) > 1e-5 for gate, gap in gates)
    assert all(line["grad_norm"] > 0 for line in run.steps)
