"""Losses and advantages beside those of ms-swift's own code, on the same tensors; run with both installed."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from swift.rl_core.advantage import apply_rlsd_reweight, compute_advantages
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
from swift.rlhf_trainers.utils import compute_chord_loss, mu_schedule_function
from torch import Tensor

from swift_r1.algorithms.advantages import group_advantages
from swift_r1.algorithms.chord import chord_mu, expert_loss
from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.losses import policy_loss
from swift_r1.algorithms.methods.real import real_advantages, reward_labels
from swift_r1.algorithms.methods.rlsd import rlsd_advantages, rlsd_strength

GROUP = 4
GIVEN = dict(max_completion_length=10, num_generations=GROUP, epsilon_high=0.28)


def tensors(seed: int) -> dict[str, Tensor]:
    """Three groups of four completions of up to 9 tokens; float64, so that only formulas differ."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logps = -normal(12, 9).abs() - 0.01
    old = logps + 0.3 * normal(12, 9)
    lengths = torch.randint(1, 10, (12, 1), generator=generator)
    return {
        "logps": logps,
        "old_logps": old,
        "ref_logps": logps + 0.3 * normal(12, 9),
        "rollout_logps": old + 0.3 * normal(12, 9),
        "teacher_logps": logps + 0.3 * normal(12, 9),
        "entropies": normal(12, 9).abs(),
        "mask": torch.arange(9) < lengths,
        "rewards": torch.randint(0, 2, (12,), generator=generator).double(),
    }


def theirs(
    given: dict[str, Tensor], config: LossConfig, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """Their loss and its gradient."""
    logps, mask = given["logps"].clone().requires_grad_(), given["mask"]
    trainer: Any = object.__new__(GRPOTrainer)
    for name in LossConfig.__dataclass_fields__:
        setattr(trainer, name, getattr(config, name))
    trainer.epsilon_low, trainer.epsilon_high = config.epsilon, config.clip_high
    trainer.fipo_gamma = 2 ** (-1 / config.fipo_decay_rate)
    trainer.args = SimpleNamespace(
        delta=config.delta, log_entropy=False, top_entropy_quantile=config.top_entropy_quantile
    )
    trainer.compute_entropy = config.top_entropy_quantile < 1
    trainer.overlong_filter = trainer.disable_rollout_importance_sampling = trainer._has_teacher = (
        False
    )
    trainer.chord_sft_iterator, trainer._metrics = None, {"train": defaultdict(list)}
    trainer.model, trainer.model_accepts_loss_kwargs = SimpleNamespace(training=True), True
    trainer.accelerator = SimpleNamespace(num_processes=1, gather_for_metrics=lambda value: value)
    trainer._get_per_token_logps_and_entropies = lambda *_args, **_named: (
        logps,
        given["entropies"],
    )
    batch = SimpleNamespace(
        completion_mask=mask,
        truncated_mask=torch.zeros(12, dtype=torch.bool),
        advantages=advantages[:, None].expand_as(mask),
        old_per_token_logps=given["old_logps"],
        ref_per_token_logps=given["ref_logps"],
        rollout_per_token_logps=given["rollout_logps"],
        teacher_per_token_logps=given["teacher_logps"],
        num_items_in_batch=mask.sum(),
    )
    loss, _ = trainer._compute_loss_and_metrics(None, {}, batch)
    return loss.detach(), torch.autograd.grad(loss, logps)[0]


def ours(given: dict[str, Tensor], config: LossConfig, advantages: Tensor) -> tuple[Tensor, Tensor]:
    logps, mask, lacking = given["logps"].clone().requires_grad_(), given["mask"], 0.0
    if config.loss_type == "real":
        scores = ((logps - given["old_logps"]) * mask).sum(1).detach() / mask.sum(1)
        labels = reward_labels(advantages, torch.ones(12, dtype=torch.bool), GROUP)
        advantages, total = real_advantages(scores, labels, GROUP, config.real_tau)
        lacking = (total + (advantages * scores).sum()) / 12
    more = {
        name: given[name] for name in ("ref_logps", "rollout_logps", "entropies", "teacher_logps")
    }
    loss = policy_loss(logps, given["old_logps"], advantages, mask, config, **more).loss
    return loss.detach() + lacking, torch.autograd.grad(loss, logps)[0]


def check(seed: int, **fields: Any) -> None:
    config, given = LossConfig(**GIVEN | fields), tensors(seed)
    advantages = group_advantages(given["rewards"], GROUP)
    (loss, gradient), (other, others) = (
        ours(given, config, advantages),
        theirs(given, config, advantages),
    )
    assert math.isclose(loss.item(), other.item(), rel_tol=1e-9, abs_tol=1e-12), (
        fields,
        loss,
        other,
    )
    assert torch.allclose(gradient, others, rtol=1e-9, atol=1e-12), (
        fields,
        (gradient - others).abs().max(),
    )


def losses() -> int:
    cases: list[dict[str, Any]] = []
    kinds = ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo")
    levels = ("token", "sequence", "sequence_token")
    cases += [
        {"loss_type": kind, "importance_sampling_level": level, **more}
        for kind, level in itertools.product(kinds, levels)
        for more in ({}, {"beta": 0.1}, {"delta": 1.3}, {"top_entropy_quantile": 0.4})
    ]
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    cases += [
        {
            "loss_type": kind,
            "rollout_importance_sampling_mode": mode,
            "rollout_importance_sampling_threshold": 1.2,
        }
        for kind, mode in itertools.product((*kinds, "fipo"), modes)
    ]
    cases += [  # not bnpo: there the completions that are left out leave the denominator too
        {"loss_type": kind, "off_policy_sequence_mask_delta": 0.05}
        for kind in kinds
        if kind != "bnpo"
    ]
    cases += [
        {
            "loss_type": "fipo",
            "delta": delta,
            "fipo_clip_range": clip,
            "fipo_clip_high_only": only,
            **more,
        }
        for delta, clip, only in itertools.product((None, 1.3), (0.0, 0.2), (True, False))
        for more in ({}, {"fipo_decay_rate": 3.0, "fipo_safety_threshold": 1.1, "beta": 0.1})
    ]
    cases += [{"loss_type": "real", "real_tau": tau} for tau in (0.2, 0.5, 2.0)]
    # Of the others SDAR's part has their own denominator here.
    cases += [
        {"loss_type": kind, "sdar_loss_coef": 0.1, "sdar_gate_beta": 3.0}
        for kind in ("bnpo", "dapo", "cispo")
    ]
    for seed, case in itertools.product(range(3), cases):
        check(seed, **case)
    return len(cases)


def advantages() -> None:
    rewards = torch.rand(24, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    names = {"grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_plus_plus_baseline"}
    for (name, own), scale in itertools.product(names.items(), ("group", "batch", "none")):
        if name != "reinforce_plus_plus" or scale != "group":  # refused: it is grpo
            expected, _ = compute_advantages(rewards, weights, GROUP, name, scale)
            found = group_advantages(rewards @ weights, GROUP, estimator=own, scale_rewards=scale)  # type: ignore[arg-type]
            assert torch.allclose(found, expected, rtol=1e-9), (name, scale)


def teachers() -> None:
    given = tensors(5)
    base = group_advantages(given["rewards"], GROUP)
    own = given["old_logps"], given["teacher_logps"]
    for strength, clip, negative_only in itertools.product(
        (0.0, 0.5, 1.0), (0.0, 0.2), (False, True)
    ):
        found = rlsd_advantages(
            base,
            *own,
            given["mask"],
            strength=strength,
            clip_range=clip,
            negative_only=negative_only,
        )
        expected = apply_rlsd_reweight(
            base, given["mask"], own[1], own[0], strength, clip, negative_only
        )
        assert torch.allclose(found, expected, rtol=1e-12)
    for warmup, decay, step in itertools.product((0, 3), (0, 5), range(10)):
        state = SimpleNamespace(global_step=step)
        trainer: Any = SimpleNamespace(
            state=state,
            rlsd_lambda=0.5,
            rlsd_lambda_warmup_steps=warmup,
            rlsd_lambda_decay_steps=decay,
        )
        assert math.isclose(
            rlsd_strength(step, 0.5, warmup, decay),
            GRPOTrainer._rlsd_effective_lambda(trainer),
            abs_tol=1e-12,
        )


def chord() -> None:
    for warmup, decay, step in itertools.product((0, 3), (1, 5), range(10)):
        schedule = (step, warmup, decay, 0.9, 0.05)
        assert math.isclose(chord_mu(*schedule), mu_schedule_function(*schedule), abs_tol=1e-12)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 7, 11, generator=generator)
    labels = torch.randint(0, 11, (2, 7), generator=generator)
    labels[0, :3] = labels[1, :2] = labels[1, 6:] = -100
    grpo = torch.tensor(0.7)
    for phi in (False, True):
        args = SimpleNamespace(
            chord_mu_warmup_steps=0,
            chord_mu_decay_steps=200,
            chord_mu_peak=0.9,
            chord_mu_valley=0.05,
            chord_enable_phi_function=phi,
        )
        trainer: Any = SimpleNamespace(
            args=args,
            state=SimpleNamespace(global_step=40),
            chord_sft_iterator=iter([{"labels": labels}]),
            template=SimpleNamespace(data_collator=lambda rows: dict(rows)),
            accelerator=SimpleNamespace(device="cpu"),
            model=lambda **_inputs: SimpleNamespace(logits=logits),
        )
        expected = compute_chord_loss(trainer, grpo)
        targets = labels[:, 1:]
        logps = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        mu = chord_mu(40, 0, 200, 0.9, 0.05)
        found = (1 - mu) * grpo + mu * expert_loss(logps, targets != -100, enable_phi=phi).loss
        assert math.isclose(found.item(), expected.item(), rel_tol=1e-6), (phi, found, expected)


if __name__ == "__main__":
    number = losses()
    advantages()
    teachers()
    chord()
    print(f"{number} losses are equal")
