"""The mathematics of an optimizer step does not depend on micro-batches, ranks or the backend."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("backend_worker.py")


@pytest.fixture(scope="module")
def train(tiny_model, tmp_path_factory):
    """`train(backend, ranks, micro_batches, ...) -> (steps, weights)`, each case once."""
    results = {}

    def run(backend, ranks=1, micro_batches=2, dtype="float32", loss_type="grpo", rate=1e-3, steps=3):
        key = (backend, ranks, micro_batches, dtype, loss_type, rate, steps)
        if key not in results:
            out = tmp_path_factory.mktemp("backend") / "out.json"
            start = (
                []
                if backend == "local"
                else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            )
            words = [
                *(sys.executable, *start, str(WORKER), f"--backend={backend}", f"--model={tiny_model}"),
                *(f"--dtype={dtype}", f"--micro_batches={micro_batches}", f"--loss_type={loss_type}", f"--out={out}"),
                *(f"--rate={rate}", f"--steps={steps}"),
            ]
            done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            result = json.loads(out.read_text())
            assert result["generation_equals_weights"]
            results[key] = (result["steps"], load_file(out.with_suffix(".safetensors")))
        return results[key]

    return run


def assert_same(one, other, tolerance):
    (steps, weights), (expected_steps, expected_weights) = one, other
    for step, expected in zip(steps, expected_steps, strict=True):
        assert step.keys() == expected.keys()
        for name in ("loss", "grad_norm", "kl", "entropy", "rollout/logp_diff"):
            assert step[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name
    for name, expected in expected_weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_micro_batches_do_not_change_the_step(train, micro_batches, loss_type):
    reference = train("local", loss_type=loss_type)
    assert_same(train("local", micro_batches=micro_batches, loss_type=loss_type), reference, 2e-5)
    assert reference[0][0]["grad_norm"] > 0.1 and reference[0][2]["kl"] > 1e-4


@pytest.mark.parametrize(("backend", "micro_batches"), [("zero3", 2), ("zero2", 8)])
def test_two_ranks_under_zero_equal_one_process(train, backend, micro_batches):
    assert_same(train(backend, ranks=2, micro_batches=micro_batches), train("local"), 2e-5)


@pytest.mark.parametrize(("backend", "ranks"), [("local", 1), ("zero3", 2), ("zero0", 2)])
def test_bf16_training_keeps_updates_smaller_than_its_spacing(train, tiny_model, backend, ranks):
    """Weights near 0.3 are 0.002 apart in bf16; 20 steps of 1e-4 only add up in float32 master weights."""
    start = load_file(tiny_model / "model.safetensors")
    weights = train(backend, ranks=ranks, dtype="bfloat16", rate=1e-4, steps=20)[1]
    exact = train("local", rate=1e-4, steps=20)[1]
    for name, expected in exact.items():
        if name.endswith("proj.weight"):
            moved = ((weights[name] - start[name].bfloat16().float()) * (expected - start[name]).sign()).mean()
            wanted = (expected - start[name]).abs().mean()
            assert moved > 0.7 * wanted, name
