"""The mathematics of optimizer steps does not depend on micro-batches, packing, ranks or the backend.

`test_invariance.py` compares gradients themselves, in one process; here each case is a run of its own.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.vision import write_tiny

EVERYTHING = {
    "loss_type": "dapo",
    "top_entropy_quantile": 0.4,
    "entropy_coef": 0.3,
    "overlong_filter": True,
    "kl_in_reward": True,
    "rollout_importance_sampling_mode": "sequence_truncate",
    "rollout_importance_sampling_threshold": 1.1,
}
"""What is computed over the whole optimizer step, or by one rank for the others."""


@pytest.fixture
def train(jobs, tiny_model):
    """`train(backend, ranks=1, ...) -> (steps, weights)`, other arguments as of the worker's `Case`."""

    def run(backend, ranks=1, **case):
        result, weights = jobs.run(ranks, backend=backend, model=tiny_model, **case)
        assert result["generation_equals_weights"]
        return result["steps"], weights

    return run


def assert_same(one, other):
    """Losses, gradient norms and metrics: the first step's to 1e-5, later ones to what Adam makes of that; weights to
    a tenth of one step's update."""
    (steps, weights), (expected_steps, expected_weights) = one, other
    for number, (step, expected) in enumerate(zip(steps, expected_steps, strict=True)):
        assert step.keys() == expected.keys()
        tolerance = 1e-5 if number == 0 else 3e-5
        for name in expected.keys() - {"micro_batches", "tokens_computed"}:
            value = expected[name]
            assert step[name] == pytest.approx(value, rel=tolerance, abs=1e-6), name
    for name, expected in expected_weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-4)


def test_zero3_equals_one_process(train):
    """Two ranks, other micro-batches, packed or padded, and a reference policy that moves after the second step."""
    reference = train("local", mix_after=2)
    steps = reference[0]
    assert steps[0]["grad_norm"] > 0.1
    assert steps[1]["kl"] > 1e-4 and steps[2]["kl"] < 0.5 * train("local", mix_after=3)[0][2]["kl"]
    assert_same(train("zero3", ranks=2, cuts="150 40s 70", mix_after=2), reference)


def test_ddp_equals_one_process(train):
    """Micro-batches of the two ranks add up; buckets are sent while the last one's backward pass goes on."""
    reference = train("local", mix_after=2)
    assert_same(train("ddp", ranks=2, cuts="150 40s 70", mix_after=2), reference)
    assert_same(
        train("ddp", ranks=2, cuts="40p 40 150", loss=EVERYTHING), train("local", loss=EVERYTHING)
    )


def test_tokens_that_two_ranks_choose_equal_one_process(train):
    case = {"loss": {"loss_type": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0}}
    reference = train("local", **case)
    assert reference[0][0]["clip_cov/dropped"] == pytest.approx(0.2, abs=0.02)
    assert_same(train("ddp", ranks=2, cuts="40 40s 24", **case), reference)


@pytest.mark.parametrize(
    ("backend", "train_type"),
    [
        ("zero3", "full"),
        *(
            pytest.param(name, train, marks=pytest.mark.long)
            for name, train in (
                *(("ddp", "full"), ("ddp", "lora"), ("fsdp2", "full")),
                *(("fsdp2", "lora"), ("zero2", "lora")),
            )
        ),
    ],
)
def test_ranks_with_images_equal_one_process(jobs, sighted, backend, train_type):
    """Of four groups two have images: some micro-batches have none, while the other rank's have. The tower is trained."""
    case = {"model": str(sighted), "images": True, "train": train_type, "loss": {"beta": 0.0}}
    expected = jobs.run(1, backend="local", cuts="150 150", **case)
    result, weights = jobs.run(2, backend=backend, cuts="60s 70", **case)
    assert result["generation_equals_weights"] and any(".visual." in name for name in weights)
    assert_same((result["steps"], weights), (expected[0]["steps"], expected[1]))


@pytest.fixture(scope="module")
def sighted(tmp_path_factory):
    return write_tiny("qwen3_vl", tmp_path_factory.mktemp("sighted"))


@pytest.mark.parametrize(
    ("cuts", "case"),
    [
        ("150 40s 70", {"mix_after": 2}),
        pytest.param("40p 40 150", {"loss": EVERYTHING}, marks=pytest.mark.long),
    ],
)
def test_fsdp_equals_one_process(train, cuts, case):
    assert_same(train("fsdp2", ranks=2, cuts=cuts, **case), train("local", **case))


@pytest.mark.parametrize(
    "backend",
    [
        "zero3",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("ddp", "fsdp2", "zero0", "zero2")
        ),
    ],
)
def test_ranks_leave_out_the_same_backward_passes(train, backend):
    """Micro-batches that teach nothing; on two ranks, which have other ones."""
    case = {"silent": True, "loss": {"beta": 0.0}}
    assert_same(
        train(backend, ranks=2, cuts="24 40s", **case), train("local", cuts="150 150", **case)
    )


ADAPTERS = {
    "dora": {"use_dora": True},
    "whole": {
        "use_rslora": True,
        "modules_to_save": ["all-embedding", "all-norm", "lm_head"],
        "lorap_lr_ratio": 4,
    },
}
"""What is trained beside or in place of `B A`, and at another rate."""
APART = json.dumps(
    {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        }
    }
)
"""ZeRO-3 that gathers a weight only where it is used, as it does with large ones."""


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("zero2", "whole"),
        *(
            pytest.param(backend, kind, id=f"{name}-{kind}", marks=pytest.mark.long)
            for name, backend, kind in (
                *(("zero2", "zero2", "dora"), ("apart", APART, "whole"), ("apart", APART, "dora")),
                *((name, name, kind) for name in ("zero3", "fsdp2") for kind in ADAPTERS),
            )
        ),
    ],
)
def test_other_adapters_equal_one_process(train, backend, kind):
    case = f"lora:{json.dumps(ADAPTERS[kind])}"
    assert_same(
        train(backend, ranks=2, cuts="70 60s", train=case, reload_after=1),
        train("local", cuts="150 150", train=case),
    )


PPO = "--kl_coef 0.1 --gamma 0.95 --lam 0.9 --num_ppo_epochs 2 --whiten_rewards true"


@pytest.mark.long
def test_ppo_of_zero3_equals_one_process(train):
    """Policy and critic, two engines in a process; the critic learns: later values are not 0."""
    reference = train("local", ppo=PPO)
    steps, weights = reference
    assert steps[0]["values/mean"] == 0 and abs(steps[2]["values/mean"]) > 1e-3
    assert steps[1]["kl_penalty"] != 0 and any(name.startswith("critic.score") for name in weights)
    assert_same(train("zero3", ranks=2, cuts="150 40s 70", ppo=PPO), reference)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("ddp", {}),
        ("ddp", {"reload_after": 2, "train": "lora"}),
        ("fsdp2", {"checkpointing": True}),
        ("fsdp2", {"reload_after": 2}),
        ("fsdp2", {"train": "lora"}),
        ("fsdp2", {"train": "qlora"}),
        ("zero0", {}),
        ("zero2", {}),
        ("zero2_offload", {}),
        ("zero3_offload", {"ppo": PPO + " --offload_ref_model true"}),
        ("zero3", {"checkpointing": True}),
        ("zero3", {"reload_after": 2}),
        ("zero2", {"reload_after": 2}),
        ("zero3", {"train": "lora"}),
        ("zero3", {"train": "qlora"}),
    ],
)
def test_ppo_of_other_backends_equals_one_process(train, backend, case):
    """Beside adapters and weights of 4 bits too: the critic is trained in full."""
    expected = train("local", ppo=PPO, train=case.get("train", "full"))
    assert_same(train(backend, ranks=2, cuts="150 40s 70", **{"ppo": PPO} | case), expected)


@pytest.mark.parametrize(
    ("backend", "ranks", "case"),
    [
        ("local", 1, {}),
        ("fsdp2", 2, {}),
        pytest.param("zero3", 2, {}, marks=pytest.mark.long),
        pytest.param("ddp", 2, {}, marks=pytest.mark.long),
        pytest.param("fsdp2", 2, {"train": "lora"}, marks=pytest.mark.long),
        pytest.param("fsdp2", 2, {"train": "qlora"}, marks=pytest.mark.long),
        pytest.param("zero0", 2, {}, marks=pytest.mark.long),
        pytest.param("zero2", 2, {}, marks=pytest.mark.long),
        pytest.param("local", 1, {"train": "lora"}, marks=pytest.mark.long),
        pytest.param("local", 1, {"train": "qlora"}, marks=pytest.mark.long),
        pytest.param("local", 1, {"optim": "adamw_8bit"}, marks=pytest.mark.long),
        pytest.param("zero2", 2, {"train": "lora"}, marks=pytest.mark.long),
        pytest.param("zero3", 2, {"train": "lora"}, marks=pytest.mark.long),
        pytest.param("zero3", 2, {"train": "qlora"}, marks=pytest.mark.long),
    ],
)
def test_what_was_in_host_memory_between_steps_is_the_same_to_the_bit(train, backend, ranks, case):
    """`--offload_model` and `--offload_optimizer`: weights, masters, moments, gradients, and the reference."""
    case = case | {"ranks": ranks, "dtype": "bfloat16", "cuts": "150 150"}
    stayed = train(backend, **case)
    steps, weights = train(backend, away=True, **case)
    assert steps == stayed[0] and steps[1]["grad_norm"] > 0
    assert weights.keys() == stayed[1].keys()
    assert all(torch.equal(weights[name], value) for name, value in stayed[1].items())


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("local", 1),
        *(
            pytest.param(name, 2, marks=pytest.mark.long)
            for name in ("ddp", "fsdp2", "zero0", "zero3")
        ),
    ],
)
def test_bf16_training_keeps_updates_smaller_than_its_spacing(train, tiny_model, backend, ranks):
    """Weights near 0.3 are 0.002 apart in bf16; 10 steps of 2e-4 only add up in float32 master weights."""
    start = load_file(tiny_model / "model.safetensors")
    case = {"cuts": " ".join(["300"] * 10), "rate": 2e-4, "loss": {"beta": 0.0}}
    weights = train(backend, ranks=ranks, dtype="bfloat16", **case)[1]
    exact = train("local", **case)[1]
    for name, expected in exact.items():
        if name.endswith("proj.weight"):
            moved = (
                (weights[name] - start[name].bfloat16().float()) * (expected - start[name]).sign()
            ).mean()
            wanted = (expected - start[name]).abs().mean()
            assert moved > 0.7 * wanted, name


@pytest.mark.long
def test_bf16_of_zero3_has_exact_positions(train):
    """While it partitions a model DeepSpeed makes new tensors in bf16: rotary frequencies among them."""
    reference = train("zero2", ranks=2, cuts="150", dtype="bfloat16")[0]
    step = train("zero3", ranks=2, cuts="150", dtype="bfloat16")[0][0]
    assert step["grad_norm"] == pytest.approx(reference[0]["grad_norm"], rel=2e-3)


@pytest.mark.long
def test_zero3_equals_one_process_with_weights_of_4_bits(train, tiny_model):
    """Weights that are pushed are what the 4 bits stand for, merged; what is not quantised stays as it was."""
    reference = train("local", train="qlora")
    assert reference[0][1]["kl"] > 1e-6
    assert_same(train("zero3", ranks=2, cuts="150 40s 70", train="qlora"), reference)
    start = load_file(tiny_model / "model.safetensors")
    for name, value in start.items():
        moved = (reference[1][name] - value).abs().mean() / value.abs().mean()
        assert 0.02 < moved < 0.2 if "proj" in name else moved == 0, name


AS_MS_SWIFT = json.dumps(
    {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "none", "pin_memory": True},
            "overlap_comm": False,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 2000,
    }
)


@pytest.mark.parametrize(
    "backend",
    [
        "zero1",
        "zero2_offload",
        pytest.param(AS_MS_SWIFT, id="json"),
        # the first steps of the others are in tests of their own too, or are that of the file
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("zero0", "zero2", "zero3", "zero3_offload")
        ),
    ],
)
def test_deepspeed_takes_every_preset(train, backend):
    """And a file as ms-swift has them; the first step is that of one process."""
    step, expected = train(backend, ranks=2, cuts="150")[0][0], train("local", cuts="150")[0][0]
    assert step["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", pytest.param("qlora", marks=pytest.mark.long)])
def test_a_second_copy_of_weights_changes_nothing(train, kind):
    """`--zero_hpz_partition_size`, of the policy and of the reference, which moves after the second step."""
    zero = json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})
    case = {"ranks": 2, "cuts": "150 40s 70", "train": kind} | (
        {"mix_after": 2} if kind == "full" else {}
    )
    assert train(zero, **case)[0] == train("zero3", **case)[0]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_float16_finds_its_loss_scale(train, ranks):
    """Of two ranks the first step overflows: it is left out, and the next one is what it would have been."""
    steps = train(
        "local" if ranks == 1 else "zero2", ranks=ranks, dtype="float16", cuts="150 150 150 150"
    )[0]
    expected = train("local", cuts="150 150 150 150")[0]
    lost = ranks - 1
    assert [step["loss_scale"] for step in steps] == [2.0**16] + [2.0 ** (16 - lost)] * 3
    assert not lost or steps[0]["grad_norm"] == float("inf")
    assert steps[lost]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=5e-3)
    for step, wanted in zip(steps[lost:], expected, strict=False):
        assert step["loss"] == pytest.approx(wanted["loss"], abs=5e-3)


@pytest.mark.parametrize(
    ("optim", "backend"),
    [
        ("adamw_8bit", "local"),
        *(
            pytest.param(optim, backend, marks=pytest.mark.long)
            for optim, backend in (
                *(("adamw_8bit", "fsdp2"), ("adamw_8bit", "ddp"), ("adamw_8bit", "zero3")),
                *(("muon", "local"), ("muon", "ddp")),
            )
        ),
        *(
            pytest.param(optim, backend, marks=pytest.mark.long)
            for optim in ("adamw_torch", "adamw_8bit", "sgd")
            for backend in ("local", "zero2", "zero3")
            if optim != "adamw_8bit" or backend == "zero2"
        ),
    ],
)
def test_optimizers_go_on_from_their_state(train, optim, backend):
    """The same bits as without a break; and each is another optimizer than fused AdamW, or the same to rounding."""
    ranks = 1 if backend == "local" else 2
    straight = train(backend, ranks=ranks, optim=optim)
    broken = train(backend, ranks=ranks, optim=optim, reload_after=2)
    assert straight[0] == broken[0]
    assert all(torch.equal(broken[1][name], value) for name, value in straight[1].items())
    fused = train("local")[0]
    near = {"adamw_torch": 1e-5, "adamw_8bit": 1e-3}.get(optim, 1.0)
    distance = abs(straight[0][2]["loss"] - fused[2]["loss"])
    assert distance < near and (optim == "adamw_torch" or distance > 1e-7)


@pytest.mark.long
def test_zero1_in_bf16_goes_on_from_its_state(train):
    """DeepSpeed has an optimizer of another class for it."""
    straight = train("zero0", ranks=2, dtype="bfloat16")
    broken = train("zero0", ranks=2, dtype="bfloat16", reload_after=2)
    assert straight[0] == broken[0]
    assert all(torch.equal(broken[1][name], value) for name, value in straight[1].items())


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("local", 1),
        pytest.param("fsdp2", 2, marks=pytest.mark.long),
        pytest.param("zero3", 2, marks=pytest.mark.long),
    ],
)
def test_frozen_weights_stay(train, tiny_model, backend, ranks):
    weights = train(backend, ranks=ranks, cuts="150", train="full:model.layers.0")[1]
    start = load_file(tiny_model / "model.safetensors")
    for name, value in start.items():
        assert torch.equal(weights[name], value) == name.startswith("model.layers.0."), name


UNEVEN = (
    {},
    {"loss": EVERYTHING},
    {
        "loss": {
            "importance_sampling_level": "sequence",
            "rollout_importance_sampling_mode": "sequence_mask",
        }
    },
    {
        "loss": {"loss_type": "real", "num_generations": 4, "log_rollout_offpolicy_metrics": True},
        "mu": 0.3,
    },
    {"ppo": PPO},
)
"""The mean of completions, that of tokens, GSPO, groups and experts, and PPO with its critic."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name == "grpo" else [pytest.mark.long])
        for name, case in zip(["grpo", "tokens", "gspo", "real", "ppo"], UNEVEN, strict=True)
    ],
)
def test_completions_that_do_not_divide_among_ranks(jobs, tiny_model, case):
    """16 on three ranks, one at a time, so that two ranks have a micro-batch without any; then more at a time, and in
    shared prompts. Loss and gradient are those of one process to 1e-6; where rows are cut otherwise, gradients to 2e-6,
    as in one process that cuts them so."""
    for cut in ("1", "70", "60s"):
        (one, exact), (three, gradients) = (
            jobs.run(ranks, backend="summed", model=tiny_model, cuts=cut, **case)
            for ranks in (1, 3)
        )
        [wanted], [step] = one["steps"], three["steps"]
        assert wanted["grad_norm"] > 1e-3 and (cut != "1" or step["micro_batches"] == 6)
        assert step.keys() == wanted.keys()
        for name in wanted.keys() - {"micro_batches", "tokens_computed"}:
            assert step[name] == pytest.approx(wanted[name], rel=1e-6, abs=1e-6), name
        for name, gradient in exact.items():
            difference = (gradients[name] - gradient).norm() / wanted["grad_norm"]
            assert difference < (1e-6 if cut == "1" else 2e-6), (cut, name)


@pytest.mark.parametrize(
    "backend",
    [
        "zero3",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("fsdp2", "ddp", "zero0", "zero2")
        ),
    ],
)
def test_a_rank_without_completions_trains_with_the_others(train, backend):
    """Three ranks, and a micro-batch for each of 16 completions, so that two have one that is empty."""
    loss = {"beta": 0.0}
    assert_same(
        train(backend, ranks=3, cuts="1 1s", loss=loss), train("local", cuts="150 150", loss=loss)
    )
