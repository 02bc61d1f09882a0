"""Every kind of adapter: it begins as the model, engine and checkpoint get it, and the reference is without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swift_r1.cli.main import main
from swift_r1.errors import UsageError
from swift_r1.flags.adapters import AdapterArguments, adapter_flags
from swift_r1.models.loading import load_model
from swift_r1.models.weights import added_weights, policy_weights
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.checkpoint.saving import Saver
from swift_r1.training.optimizer import OptimizerConfig
from tests.training import backend_worker as worker

ONE_RANK = Ranks(0, 1, torch.device("cpu"), None)
PLAIN = AdapterArguments(
    train_type="lora", lora_rank=4, lora_alpha=8, target_modules=["all-linear"]
)
KINDS = {
    "plain": PLAIN,
    "rslora": replace(PLAIN, use_rslora=True),
    "gaussian": replace(PLAIN, init_weights="gaussian"),
    "regex": replace(PLAIN, target_modules=[], target_regex=r".*\.1\..*[qv]_proj"),
    "dropout": replace(PLAIN, lora_dropout=0.5),
    "dora": replace(PLAIN, use_dora=True),
    "dora-dropout": replace(PLAIN, use_dora=True, lora_dropout=0.5),
    "whole": replace(PLAIN, modules_to_save=["all-embedding", "all-norm", "lm_head"]),
    "everything": replace(
        PLAIN, use_rslora=True, use_dora=True, lora_dropout=0.5, modules_to_save=["lm_head", "norm"]
    ),
}
CORNER = (("plain", False), ("regex", False), ("whole", True), ("everything", False))
CONFIG = OptimizerConfig(1e-2, 0.1, 0.9, 0.95, 1e-8, 1.0)


def backend_of(folder: Path, lora: AdapterArguments | None, dtype: str = "float32") -> LocalBackend:
    torch.manual_seed(0)
    return LocalBackend(load_model(folder, dtype, True, lora), CONFIG)


def logps(policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.logprobs(worker.collate_all(worker.ragged_round()), 0.9).logps


def train(backend: LocalBackend, reference=None) -> dict[str, float]:
    config = worker.LossConfig(beta=0.1 if reference is not None else 0.0)
    return worker.step_on(worker.ragged_round(), backend, reference, config, "150", ONE_RANK)


def saved(backend: LocalBackend, model: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    Saver(folder, backend, None, AutoTokenizer.from_pretrained(model), ONE_RANK, None, False).save(
        3, None, {}, True
    )
    return folder / "checkpoint-3"


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        pytest.param(kind, tied, marks=() if (kind, tied) in CORNER else pytest.mark.long)
        for kind, tied in (
            *((kind, False) for kind in KINDS),
            ("whole", True),
            ("everything", True),
        )
    ],
)
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
    checkpoint = saved(backend, folder, tmp_path)
    assert main(["merge-lora", "--adapters", str(checkpoint)]) == 0
    for name, value in AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint-3-merged"
    ).named_parameters():
        assert torch.equal(value, merged[name]), name
    flags = adapter_flags("--adapters", checkpoint)
    assert (flags["use_dora"], flags["use_rslora"], flags["lora_rank"]) == (
        lora.use_dora,
        lora.use_rslora,
        4,
    )
    assert torch.equal(
        logps(backend_of(folder, replace(lora, adapters=[str(checkpoint)]))), trained
    )


@pytest.mark.parametrize("kind", ["dropout", "dora-dropout"])
def test_dropout_is_where_a_gradient_is(tiny_model, kind):
    """Also where the layers are computed twice: the recomputed ones drop the same."""
    backend = backend_of(tiny_model, KINDS[kind])
    train(backend)
    inputs = worker.collate_all(worker.ragged_round())
    assert torch.equal(logps(backend), logps(backend))
    found = []
    for checkpointing in (True, False):
        model: Any = backend.model
        (
            model.gradient_checkpointing_enable
            if checkpointing
            else model.gradient_checkpointing_disable
        )()
        torch.manual_seed(1)
        with_gradient = backend.logprobs(inputs, 0.9).logps
        assert (with_gradient - logps(backend)).abs().mean() > 1e-3
        with_gradient.sum().backward()
        found.append([master.grad.clone() for master in backend.masters])
        for master in backend.masters:
            master.grad.zero_()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "whole"])
def test_a_reference_with_adapters_of_its_own(tiny_model, tmp_path, kind):
    first = backend_of(tiny_model, replace(PLAIN, target_modules=["q_proj", "up_proj"]))
    train(first)
    folder, expected = saved(first, tiny_model, tmp_path / "first"), logps(first)
    backend = backend_of(tiny_model, replace(KINDS[kind], ref_adapters=[str(folder)]))
    reference = backend.reference()
    torch.testing.assert_close(
        logps(backend), logps(backend_of(tiny_model, None)), rtol=0, atol=1e-6
    )
    for _ in range(2):
        train(backend, reference)
    policy = logps(backend)
    torch.testing.assert_close(logps(reference), expected, rtol=0, atol=1e-6)
    assert torch.equal(logps(backend), policy)
    assert not any("reference" in weight.name for weight in added_weights(backend.model))
    again = backend_of(
        tiny_model,
        replace(KINDS[kind], adapters=[str(saved(backend, tiny_model, tmp_path / "second"))]),
    )
    assert torch.equal(logps(again), policy)


def test_adapters_that_do_not_fit(tiny_model, tiny_model_untied, tmp_path):
    folder = str(
        saved(
            backend_of(tiny_model, replace(PLAIN, target_modules=["q_proj"])), tiny_model, tmp_path
        )
    )
    for model, lora, said in (
        (tiny_model, PLAIN, r"does not fit --model and the flags: .*k_proj.* is not in it"),
        (
            tiny_model,
            replace(PLAIN, target_regex=r".*\.0\..*q_proj"),
            r"layers\.1.*q_proj.* has no place there",
        ),
        (
            tiny_model,
            replace(PLAIN, lora_rank=8, target_modules=["q_proj"]),
            r"has there \[4, 64\], not \[8, 64\]",
        ),
    ):
        with pytest.raises(UsageError, match=said):
            backend_of(model, replace(lora, adapters=[folder]))


def test_modules_that_are_not_there(tiny_model):
    with pytest.raises(
        UsageError, match="--modules_to_save wpe: LlamaForCausalLM has no such module"
    ):
        backend_of(tiny_model, replace(PLAIN, modules_to_save=["norm", "wpe"]))
    with pytest.raises(
        UsageError, match="the embedding gets no adapter; leave it out, or train it whole"
    ):
        backend_of(tiny_model, replace(PLAIN, target_modules=["q_proj", "embed_tokens"]))
