"""Every kind of adapter: it begins as the model, engine and checkpoint get it, and the reference is without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swift_r1.arguments.adapters import adapter_flags
from swift_r1.cli.main import main
from swift_r1.models.loading import load_model
from swift_r1.models.lora import LoraSettings
from swift_r1.models.weights import policy_weights
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.checkpoint.saving import Saver
from swift_r1.training.optimizer import OptimizerConfig
from tests.training import backend_worker as worker

ONE_RANK = Ranks(0, 1, torch.device("cpu"), None)
PLAIN = LoraSettings(4, 8, ("all-linear",))
KINDS = {
    "plain": PLAIN,
    "rslora": replace(PLAIN, rslora=True),
    "gaussian": replace(PLAIN, init="gaussian"),
    "regex": replace(PLAIN, target_modules=(), target_regex=r".*\.1\..*[qv]_proj"),
    "dropout": replace(PLAIN, dropout=0.5),
    "dora": replace(PLAIN, dora=True),
    "dora-dropout": replace(PLAIN, dora=True, dropout=0.5),
    "whole": replace(PLAIN, modules_to_save=("all-embedding", "all-norm", "lm_head")),
    "everything": replace(PLAIN, rslora=True, dora=True, dropout=0.5, modules_to_save=("lm_head", "norm")),
}
CONFIG = OptimizerConfig(1e-2, 0.1, 0.9, 0.95, 1e-8, 1.0)


def backend_of(folder: Path, lora: LoraSettings | None, dtype: str = "float32") -> LocalBackend:
    torch.manual_seed(0)
    return LocalBackend(load_model(folder, dtype, True, lora), CONFIG)


def logps(policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.logprobs(worker.collate_all(worker.ragged_round()), 0.9).logps


def train(backend: LocalBackend, reference=None) -> dict[str, float]:
    config = worker.LossConfig(beta=0.1 if reference is not None else 0.0)
    return worker.step_on(worker.ragged_round(), backend, reference, config, "150", ONE_RANK)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind(tiny_model, tiny_model_untied, tmp_path, kind, tied):
    folder = tiny_model if tied else tiny_model_untied
    lora = KINDS[kind]
    plain, backend = backend_of(folder, None), backend_of(folder, lora)
    base, reference = logps(plain), backend.reference()
    torch.testing.assert_close(logps(backend), base, rtol=0, atol=1e-6)
    for _ in range(3):
        metrics = train(backend, reference)
    assert metrics["kl"] > 1e-5 and metrics["grad_norm"] > 0
    # Switched off it is the model bit for bit, and on again the policy.
    trained = logps(backend)
    assert (trained - base).abs().mean() > 0.01
    assert torch.equal(logps(reference), base) and torch.equal(logps(backend), trained)
    # The engine gets the policy as one model.
    merged = {weight.name: weight.value() for weight in policy_weights(backend.model)}
    assert merged.keys() == dict(plain.model.named_parameters()).keys()
    plain.model.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logps(plain), trained, rtol=1e-4, atol=1e-4)
    # A checkpoint of it merges to the same, and training may begin with it.
    saver = Saver(tmp_path, backend, None, AutoTokenizer.from_pretrained(folder), ONE_RANK, None, False)
    saver.save(3, None, {}, True)
    checkpoint = tmp_path / "checkpoint-3"
    assert main(["merge-lora", "--adapters", str(checkpoint)]) == 0
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3-merged").named_parameters():
        assert torch.equal(value, merged[name]), name
    flags = adapter_flags("--adapters", checkpoint)
    assert (flags["use_dora"], flags["use_rslora"], flags["lora_rank"]) == (lora.dora, lora.rslora, 4)
    assert torch.equal(logps(backend_of(folder, replace(lora, adapters=str(checkpoint)))), trained)
