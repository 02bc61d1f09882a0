"""The mathematics of optimizer steps does not depend on micro-batches, packing, ranks or the backend.

`test_invariance.py` compares gradients themselves, in one process; here each case is a run of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("backend_worker.py")

EVERYTHING = {
    "loss_type": "dapo",
    "top_entropy_quantile": 0.4,
    "overlong_filter": True,
    "kl_in_reward": True,
    "rollout_importance_sampling_mode": "sequence_truncate",
    "rollout_importance_sampling_threshold": 1.1,
}
"""What is computed over the whole optimizer step, or by one rank for the others."""


@pytest.fixture(scope="module")
def train(tiny_model, tmp_path_factory):
    """`train(backend, ranks, cuts, ...) -> (steps, weights)`, each case once; one optimizer step a cut."""
    results = {}

    def run(backend, ranks=1, cuts="150 150 150", dtype="float32", loss=None, rate=1e-3, mix_after=None, lora_rank=0):
        key = (backend, ranks, cuts, dtype, json.dumps(loss), rate, mix_after, lora_rank)
        if key not in results:
            out = tmp_path_factory.mktemp("backend") / "out.json"
            start = (
                []
                if backend == "local"
                else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            )
            words = [
                *(sys.executable, *start, str(WORKER), f"--backend={backend}", f"--model={tiny_model}"),
                *(f"--dtype={dtype}", f"--loss={json.dumps(loss or {})}", f"--out={out}", f"--rate={rate}"),
                *("--cuts", *cuts.split()),
                *([f"--mix_after={mix_after}"] if mix_after else []),
                f"--lora_rank={lora_rank}",
            ]
            done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            result = json.loads(out.read_text())
            assert result["generation_equals_weights"]
            results[key] = (result["steps"], load_file(out.with_suffix(".safetensors")))
        return results[key]

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


def test_zero0_equals_one_process_with_everything_that_spans_ranks(train):
    reference = train("local", loss=EVERYTHING)
    assert 0 < reference[0][0]["rollout/weight_over_threshold"] < 1
    assert_same(train("zero0", ranks=2, cuts="40 150p 24s", loss=EVERYTHING), reference)


def test_zero3_equals_one_process_with_adapters(train, tiny_model):
    """The merged weights too; what has no adapter stays as it was."""
    reference = train("local", lora_rank=4)
    assert reference[0][1]["kl"] > 1e-6
    assert_same(train("zero3", ranks=2, cuts="150 40s 70", lora_rank=4), reference)
    start = load_file(tiny_model / "model.safetensors")
    assert reference[1].keys() == start.keys()
    for name, value in start.items():
        assert torch.equal(reference[1][name], value) == ("proj" not in name), name


def test_zero2_equals_one_process(train):
    assert_same(train("zero2", ranks=2, cuts="40 40s 40"), train("local"))


@pytest.mark.parametrize(("backend", "ranks"), [("local", 1), ("zero3", 2), ("zero0", 2)])
def test_bf16_training_keeps_updates_smaller_than_its_spacing(train, tiny_model, backend, ranks):
    """Weights near 0.3 are 0.002 apart in bf16; 20 steps of 1e-4 only add up in float32 master weights."""
    start = load_file(tiny_model / "model.safetensors")
    cuts = " ".join(["150"] * 20)
    weights = train(backend, ranks=ranks, cuts=cuts, dtype="bfloat16", rate=1e-4)[1]
    exact = train("local", cuts=cuts, rate=1e-4)[1]
    for name, expected in exact.items():
        if name.endswith("proj.weight"):
            moved = ((weights[name] - start[name].bfloat16().float()) * (expected - start[name]).sign()).mean()
            wanted = (expected - start[name]).abs().mean()
            assert moved > 0.7 * wanted, name
