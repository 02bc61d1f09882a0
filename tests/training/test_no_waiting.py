"""From the first forward pass to the update nothing waits for the device, which computes while more is sent to it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swift_r1.algorithms.advantages import Advantages
from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.ppo import PPOConfig
from swift_r1.models.loading import load_critic, load_model
from swift_r1.models.policy import Critic, Policy
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import FrozenReference
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, RoundBatch, round_batch, split_step
from swift_r1.training.grpo import before_training, train_step
from swift_r1.training.micro_batches import Form
from swift_r1.training.optimizer import LearningRate, OptimizerConfig
from swift_r1.training.ppo import TrainedCritic, critic_step
from swift_r1.training.token_values import StepTokens

SETTINGS = OptimizerConfig(1e-3, 0.0, 0.9, 0.95, 1e-8, 1.0)
ALL = LossConfig(
    beta=0.1,
    loss_type="dapo",
    delta=4.0,
    off_policy_sequence_mask_delta=0.5,
    rollout_importance_sampling_mode="sequence_mask",
    log_rollout_offpolicy_metrics=True,
    cuts_sampling=True,
)
# Of padded rows transformers asks, where it makes their mask, whether they are packed: once before each forward pass.
FORMS = {"packed": Form(packed=True), "shared": Form(packed=True, shared=True)}


class Waits(TorchDispatchMode):
    """Notes what would wait for an accelerator. `meta` is the device: its tensors cannot be read, as a GPU's cannot
    without waiting, so a read gets zeros; operations whose result has a size that only a GPU knows are noted too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func.overloadpacket)
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if name == "aten.embedding":
            self.seen.append("forward")
        elif name == "aten._fused_adamw_":
            self.seen.append("update")
        of_device = [one for one in tensors if one.device.type == "meta"]
        if name == "aten._local_scalar_dense" and of_device:
            self.seen.append("read a number")
            return 0.0
        if name in ("aten.nonzero", "aten.masked_select") and of_device:
            raise AssertionError(f"{func} waits for the number of elements")
        if name in ("aten._to_copy", "aten.copy_"):
            here, there = (
                (args[1], args[0]) if name == "aten.copy_" else (args[0], kwargs.get("device"))
            )
            target = getattr(there, "device", there) or here.device
            if here.device.type == "meta" and target.type == "cpu":
                self.seen.append("read")
                found = torch.zeros(here.shape, dtype=kwargs.get("dtype") or here.dtype)
                return there.copy_(found) if name == "aten.copy_" else found
            if (
                here.device.type == "cpu"
                and target.type == "meta"
                and not kwargs.get("non_blocking")
            ):
                self.seen.append("write")
        return func(*args, **kwargs)

    def between(self) -> list[str]:
        """From the first forward pass to the last update."""
        last = len(self.seen) - self.seen[::-1].index("update")
        return self.seen[self.seen.index("forward") : last]


def ragged() -> RoundBatch:
    completions = [list(range(3, 3 + length)) for length in (3, 9, 5, 7)]
    prompts = [[7, 8]] * 2 + [[9]] * 2
    rows = [
        TokenSequence(*pair, [-4.0] * len(pair[1]), [True] * len(pair[1]))
        for pair in zip(prompts, completions, strict=True)
    ]
    return round_batch(rows, [0.0, 1.0] * 2)


def settings(device: torch.device, form: str) -> tuple[Ranks, Batching]:
    return Ranks(0, 1, device, None), Batching(FORMS[form], 1, 2, max_tokens=16)


def a_step(
    path: Any, device: torch.device, form: str, dtype: str, backend_seen: Any
) -> dict[str, float]:
    """Several micro-batches under a loss that computes all that there is, and the record of all tokens."""
    ranks, batching = settings(device, form)
    backend = LocalBackend(
        load_model(path, dtype, gradient_checkpointing=False).to(device), SETTINGS, device, Policy
    )
    batch = ragged()
    micro_batches = split_step(batch, range(4), batching, ranks)
    assert len(micro_batches) > 1
    [prepared] = before_training(
        [micro_batches], backend, backend.reference(), 0.9, old_policy=True
    )
    tokens = StepTokens([{"sample": sample} for sample in range(4)], batch, with_reference=True)
    with backend_seen(backend):
        return train_step(prepared, batch.rewards, backend, ALL, 0.9, 1e-3, ranks, tokens=tokens)


def critic_updates(path: Any, device: torch.device, backend_seen: Any) -> None:
    ranks, batching = settings(device, "packed")
    model = load_critic(path, "float32", gradient_checkpointing=False).to(device)
    backend = LocalBackend(model, SETTINGS, device, Critic)
    micro_batches = [
        replace(one, old_values=torch.zeros(one.mask.shape, device=device))
        for one in split_step(ragged(), range(4), batching, ranks)
    ]
    advantages = Advantages(
        torch.zeros(4, 9), torch.zeros(4), torch.zeros(4, 9), torch.ones(4, dtype=torch.bool)
    )
    critic = TrainedCritic(backend, LearningRate("constant", 1e-3, 0, 8), PPOConfig())
    with backend_seen(backend):
        critic_step(micro_batches, advantages, critic, ranks)


@pytest.fixture
def fused_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(module, "_device_dtype_check_for_fused", lambda *_args, **_named: None)


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        *(("bfloat16", "shared"), ("float16", "packed")),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                *(("float32", "packed"), ("float32", "shared")),
                *(("bfloat16", "packed"), ("float16", "shared")),
            )
        ),
    ],
)
def test_a_step_asks_the_device_for_nothing(
    tiny_model: Any, fused_on_meta: None, form: str, dtype: str
) -> None:
    waits = Waits()
    a_step(tiny_model, torch.device("meta"), form, dtype, lambda _backend: waits)
    found = waits.between()
    assert found.count("forward") > 1 and set(found) == {"forward", "update"}
    assert waits.seen[len(waits.seen) - waits.seen[::-1].index("update") :] == [
        "read a number",
        "read",
        "read",
    ]


def test_nor_does_the_critics(tiny_model: Any, fused_on_meta: None) -> None:
    waits = Waits()
    critic_updates(tiny_model, torch.device("meta"), lambda _backend: waits)
    assert set(waits.between()) == {"forward", "update"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_that_is_not_finite_changes_nothing(tiny_model: Any, dtype: str) -> None:
    """Nobody asks before it whether it is."""
    found = []
    for losses in ([math.nan, 1.0], [1.0]):
        backend = LocalBackend(
            load_model(tiny_model, dtype, gradient_checkpointing=False), SETTINGS
        )
        first, *_ = backend.masters
        for factor in losses:
            backend.backward(
                factor * sum(one.float().sum() for one in backend.model.parameters()), last=True
            )
            assert math.isfinite(backend.step(1e-3)) == math.isfinite(factor)
        found.append((first.detach().clone(), backend.optimizer.state[first]["step"].item()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1] == 1


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_offloaded_reference_is_sent_to_the_device_and_never_back(
    tiny_model: Any, kind: str
) -> None:
    device = torch.device(kind)
    ranks, batching = settings(device, "packed")
    policy = Policy(load_model(tiny_model, "float32", gradient_checkpointing=False))
    backend: Any = SimpleNamespace(device=device)
    [micro, *_] = split_step(ragged(), range(4), batching, ranks)
    reference = FrozenReference(policy, backend, offload=True)
    places = {name: value.data_ptr() for name, value in policy.named_parameters()}
    found = [reference.logprobs(micro.inputs, 1.0).logps for _ in range(2)]
    assert found[0].device.type == kind and torch.equal(*found)
    assert {name: value.data_ptr() for name, value in policy.named_parameters()} == places
    assert all(value.device.type == "cpu" for value in policy.parameters())
    with torch.no_grad():
        kept = FrozenReference(policy.to(device), backend).logprobs(micro.inputs, 1.0).logps
    assert torch.equal(kept, found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_waits_for_nothing(tiny_model: Any, form: str) -> None:
    """torch itself raises on what makes the host wait."""

    @contextmanager
    def strict(backend: LocalBackend) -> Iterator[None]:
        backend.module.register_forward_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error"))
        backend.optimizer.register_step_post_hook(
            lambda *_: torch.cuda.set_sync_debug_mode("default")
        )
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert a_step(tiny_model, torch.device("cuda"), form, "bfloat16", strict)["grad_norm"] > 0
    critic_updates(tiny_model, torch.device("cuda"), strict)
