"""The policy losses against slow float64 loops written from the formulas; gradients; cuts into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swift_r1.algorithms.aggregation import (
    drop_truncated,
    loss_normalizer,
    mean_metrics,
    sum_metrics,
)
from swift_r1.algorithms.config import ImportanceSamplingLevel, LossConfig, RolloutCorrection
from swift_r1.algorithms.losses import marked_tokens, policy_loss, top_entropy_threshold
from swift_r1.algorithms.methods import LOSSES

LOSS_TYPES = tuple(LOSSES)
LEVELS = get_args(ImportanceSamplingLevel)
MODES = (None, *get_args(RolloutCorrection))
Given = dict[str, Tensor]


def make_given(
    seed: int, rows: int, width: int, *, spread: float = 0.4, dtype: torch.dtype = torch.float64
) -> Given:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logps = -normal(rows, width).abs() - 0.01
    old_logps = logps + spread * normal(rows, width)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    made = {
        "logps": logps,
        "old_logps": old_logps,
        "ref_logps": logps + spread * normal(rows, width),
        "rollout_logps": old_logps + spread * normal(rows, width),
        "entropies": normal(rows, width).abs(),
        "advantages": normal(rows),
        "teacher_logps": logps + spread * normal(rows, width),
    }
    return {name: tensor.to(dtype) for name, tensor in made.items()} | {"mask": mask}


def call(given: Given, config: LossConfig, **more: Any) -> Any:
    return policy_loss(
        given["logps"],
        given["old_logps"],
        given["advantages"],
        given["mask"],
        config,
        ref_logps=given["ref_logps"],
        rollout_logps=given["rollout_logps"],
        entropies=given["entropies"],
        teacher_logps=given["teacher_logps"],
        **more,
    )


def marks_of(given: Given, config: LossConfig) -> Tensor | None:
    """Those of all the tokens; how they are chosen is tested in `test_covariance.py`."""
    if config.loss.marks is None:
        return None
    trained = given["mask"] != 0
    advantages = given["advantages"].reshape(len(trained), -1).expand_as(trained)
    return marked_tokens(given["old_logps"], advantages, trained, config, seed=0)


def geometric_mean(
    logps: list[float], old: list[float], advantage: Any, tokens: list[int], c: LossConfig
) -> float:
    """Of ratios that are clipped on the side to which their advantage draws them."""
    product = 1.0
    for t in tokens:
        a = advantage[t] if isinstance(advantage, list) else advantage
        r = math.exp(logps[t] - old[t])
        if a > 0:
            r = min(r, math.exp(c.epsilon if c.epsilon_high is None else c.epsilon_high))
        elif a < 0:
            r = max(r, math.exp(-c.epsilon))
        product *= r
    return product ** (1 / len(tokens))


def dppo_divergence(logp: float, old_logp: float, c: LossConfig) -> float:
    """Of the sampled token and any other one."""
    p, q = math.exp(logp), math.exp(old_logp)
    if c.loss_type == "dppo_tv":
        return abs(p - q)
    rest, old_rest = max(1 - p, 1e-8), max(1 - q, 1e-8)
    return q * math.log(q / p) + old_rest * math.log(old_rest / rest)


def loop_loss(given: Given, c: LossConfig) -> float:
    """The formulas of the issue, token by token, with Python's floats."""
    logps, old, ref, roll, entropies, teacher = (
        given[k].tolist()
        for k in ("logps", "old_logps", "ref_logps", "rollout_logps", "entropies", "teacher_logps")
    )
    advantages, mask = given["advantages"].tolist(), given["mask"].tolist()
    rows = len(mask)

    trained = sorted(
        entropies[i][t] for i in range(rows) for t in range(len(mask[i])) if mask[i][t]
    )
    threshold = -math.inf
    if c.top_entropy_quantile < 1 and trained:
        place = round((1 - c.top_entropy_quantile) * (len(trained) - 1), 6)
        low = math.floor(place)
        high = min(low + 1, len(trained) - 1)
        threshold = trained[low] + (place - low) * (trained[high] - trained[low])

    marked = marks_of(given, c)
    completions: list[list[float]] = []
    for i in range(rows):
        tokens = [t for t in range(len(mask[i])) if mask[i][t]]
        losses: list[float] = []
        for t in tokens:
            a = advantages[i][t] if isinstance(advantages[i], list) else advantages[i]
            if c.loss_type == "gmpo":
                r = geometric_mean(logps[i], old[i], advantages[i], tokens, c)
            elif c.importance_sampling_level == "token":
                r = math.exp(logps[i][t] - old[i][t])
            else:
                r = math.exp(sum(logps[i][u] - old[i][u] for u in tokens) / len(tokens))
            if c.loss_type == "cispo":
                cap = 5.0 if c.epsilon_high is None else c.epsilon_high
                loss = -min(r, cap) * a * logps[i][t]
            elif c.loss_type == "sapo":
                tau = c.tau_pos if a > 0 else c.tau_neg
                loss = -(4 / tau) / (1 + math.exp(-tau * (r - 1))) * a
            elif c.loss_type == "real":
                loss = -math.log(r) * a
            elif c.loss_type == "gmpo":
                loss = -r * a
            elif c.loss_type in ("dppo_tv", "dppo_kl"):
                upper = c.epsilon if c.epsilon_high is None else c.epsilon_high
                far = dppo_divergence(logps[i][t], logps[i][t] - math.log(r), c)
                masked = (a > 0 and r > 1 and far > upper) or (a < 0 and r < 1 and far > c.epsilon)
                loss = 0.0 if masked else -min(r, 20.0) * a * logps[i][t]
            elif c.loss_type == "kl_cov":
                assert marked is not None
                loss = -r * a + (c.ppo_kl_coef * abs(math.log(r)) if marked[i, t] else 0.0)
            else:
                upper = c.epsilon if c.epsilon_high is None else c.epsilon_high
                clipped = min(max(r, 1 - c.epsilon), 1 + upper)
                capped = r if c.delta is None else min(r, c.delta)
                loss = -min(capped * a, clipped * a)
            if c.loss_type == "clip_cov" and marked is not None and marked[i, t]:
                loss = 0.0
            if c.loss_type == "fipo":
                future = 0.0
                for u in tokens:
                    log_r = (
                        math.log(r)
                        if c.importance_sampling_level != "token"
                        else logps[i][u] - old[i][u]
                    )
                    if u >= t and not (c.delta is not None and math.exp(log_r) > c.delta):
                        future += 2 ** (-(u - t) / c.fipo_decay_rate) * log_r
                weight = math.exp(future)
                if c.fipo_clip_range:
                    lowest = 1 if c.fipo_clip_high_only else 1 - c.fipo_clip_range
                    weight = min(max(weight, lowest), 1 + c.fipo_clip_range)
                if c.fipo_safety_threshold is not None and a < 0 and r > c.fipo_safety_threshold:
                    weight = min(max(weight, 0.8), 1.0)
                loss *= weight
            if entropies[i][t] < threshold:
                loss = 0.0
            most = c.off_policy_sequence_mask_delta
            drift = sum(roll[i][u] - logps[i][u] for u in tokens) / len(tokens)
            if most is not None and a < 0 and drift > most:
                loss = 0.0
            mode = c.rollout_importance_sampling_mode
            if mode is not None:
                own = compared = math.exp(old[i][t] - roll[i][t])
                if mode.startswith("sequence"):
                    compared = math.exp(sum(old[i][u] - roll[i][u] for u in tokens) / len(tokens))
                limit = c.rollout_importance_sampling_threshold
                if mode.endswith("truncate"):
                    loss *= min(compared, limit)
                else:
                    loss *= own if compared <= limit else 0.0
            if c.beta and not c.kl_in_reward:
                loss += c.beta * (math.exp(ref[i][t] - logps[i][t]) - (ref[i][t] - logps[i][t]) - 1)
            loss -= c.entropy_coef * entropies[i][t]
            gap = teacher[i][t] - logps[i][t]
            loss += c.sdar_loss_coef * gap / (1 + math.exp(-c.sdar_gate_beta * gap))
            losses.append(loss)
        completions.append(losses)

    total = sum(sum(losses) for losses in completions)
    if c.loss_type in ("grpo", "sapo", "real", "gmpo"):
        return sum(sum(losses) / len(losses) for losses in completions if losses) / rows
    if c.loss_type == "dr_grpo":
        return total / (rows * c.max_completion_length)
    return total / max(sum(len(losses) for losses in completions), 1)


configs = st.builds(
    LossConfig,
    loss_type=st.sampled_from(LOSS_TYPES),
    importance_sampling_level=st.sampled_from(LEVELS),
    epsilon=st.sampled_from([0.0, 0.1, 0.2, 0.5]),
    epsilon_high=st.sampled_from([None, 0.28, 1.1]),
    delta=st.sampled_from([None, 1.2, 3.0]),
    beta=st.sampled_from([0.0, 0.04, 1.0]),
    entropy_coef=st.sampled_from([0.0, 0.05]),
    kl_in_reward=st.booleans(),
    max_completion_length=st.sampled_from([7, 512]),
    tau_pos=st.sampled_from([1.0, 0.5]),
    tau_neg=st.sampled_from([1.05, 2.0]),
    fipo_decay_rate=st.sampled_from([2.0, 32.0]),
    fipo_clip_range=st.sampled_from([None, 0.0, 0.2]),
    fipo_clip_high_only=st.booleans(),
    fipo_safety_threshold=st.sampled_from([None, 1.1, 4.0]),
    clip_cov_ratio=st.sampled_from([0.3, 1.0]),
    clip_cov_lb=st.sampled_from([0.0, 1.0]),
    kl_cov_ratio=st.sampled_from([0.0002, 0.5]),
    ppo_kl_coef=st.sampled_from([0.1, 1.0]),
    sdar_loss_coef=st.sampled_from([0.0, 0.3]),
    sdar_gate_beta=st.sampled_from([1.0, 5.0]),
    top_entropy_quantile=st.sampled_from([1.0, 0.2, 0.55]),
    off_policy_sequence_mask_delta=st.sampled_from([None, 0.0, 0.3]),
    rollout_importance_sampling_mode=st.sampled_from(MODES),
    rollout_importance_sampling_threshold=st.sampled_from([1.05, 2.0]),
)


@settings(max_examples=150, deadline=None)
@given(configs, st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_equals_the_formula(
    config: LossConfig, seed: int, rows: int, width: int, per_token: bool
) -> None:
    given = make_given(seed, rows, width)
    if per_token:
        given["advantages"] = given["advantages"][:, None] * given["entropies"]
    assert call(given, config).loss.item() == pytest.approx(
        loop_loss(given, config), rel=1e-10, abs=1e-12
    )
    # bfloat16 in is float32 inside: only the rounding of the inputs is left.
    coarse = {k: v if k == "mask" else v.bfloat16() for k, v in given.items()}
    output = call(coarse, config)
    assert output.loss.dtype == torch.float32
    expected = loop_loss({k: v.double() for k, v in coarse.items()}, config)
    assert output.loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(configs, st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 6))
def test_what_the_loss_did_to_tokens(config: LossConfig, seed: int, rows: int, width: int) -> None:
    """Ratios token by token; and a token has a gradient if and only if the loss kept and did not clip it."""
    given, config = (
        make_given(seed, rows, width),
        replace(config, beta=0.0, delta=None, sdar_loss_coef=0.0),
    )
    logps = given["logps"].clone().requires_grad_()
    output = call(given | {"logps": logps}, config)
    (gradient,) = torch.autograd.grad(output.loss, logps)
    by_group = "epsilon" in config.loss.reads
    by_divergence = config.loss_type.startswith("dppo")
    cap = config.clip_high if "epsilon_high" in config.loss.reads else math.inf
    low, high = (1 - config.epsilon, 1 + config.clip_high) if by_group else (0, cap)
    for i, mask in enumerate(given["mask"].tolist()):
        tokens = [t for t in range(width) if mask[t]]
        log_ratios = [(given["logps"][i, t] - given["old_logps"][i, t]).item() for t in tokens]
        own = log_ratios
        if config.loss_type == "gmpo" and tokens:
            low, high = math.exp(-config.epsilon), math.exp(config.clip_high)
            values = [given[name][i].tolist() for name in ("logps", "old_logps", "advantages")]
            log_ratios = [math.log(geometric_mean(*values, tokens, config))] * len(tokens)
        elif config.importance_sampling_level != "token" and tokens:
            log_ratios = [sum(log_ratios) / len(tokens)] * len(tokens)
        for t, log_ratio, alone in zip(tokens, log_ratios, own, strict=True):
            ratio, advantage = output.tokens.ratios[i, t].item(), given["advantages"][i].item()
            assert ratio == pytest.approx(math.exp(log_ratio), rel=1e-10)
            compared = math.exp(alone) if config.loss_type == "gmpo" else ratio
            clipped = (compared > high) - (compared < low)
            if by_divergence:
                logp = given["logps"][i, t].item()
                far = dppo_divergence(logp, logp - log_ratio, config)
                clipped = (ratio > 1 and far > config.clip_high) - (
                    ratio < 1 and far > config.epsilon
                )
            if by_group:
                clipped *= clipped * advantage > 0
            assert output.tokens.clipped[i, t] == clipped
            if config.level != "sequence":
                moved = bool(output.tokens.kept[i, t]) and not (clipped and by_group)
                assert (gradient[i, t] != 0) == moved
            elif config.loss_type == "gmpo" and clipped:
                assert gradient[i, t] == 0
    assert not output.tokens.kept[~given["mask"]].any()


def losses_and_weights() -> Iterator[Any]:
    """Of each loss one weight at each level, of one loss all of them; the others in the long tests."""
    for loss_type in sorted(set(LOSS_TYPES) - {"fipo"}):
        for level, own in (("token", None), ("sequence", "sequence_mask")):
            for mode in MODES:
                short = loss_type == "grpo" or mode == own
                yield pytest.param(loss_type, level, mode, marks=() if short else pytest.mark.long)


@pytest.mark.parametrize(("loss_type", "level", "mode"), [*losses_and_weights()])
def test_gradient_by_finite_differences(
    loss_type: str, level: ImportanceSamplingLevel, mode: RolloutCorrection | None
) -> None:
    given = make_given(3, 3, 4)
    config = LossConfig(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.1,
        delta=1.6,
        top_entropy_quantile=0.6,
        off_policy_sequence_mask_delta=0.1,
        rollout_importance_sampling_mode=mode,
    )
    if loss_type in ("cispo", "dppo_tv", "dppo_kl"):
        # Its weight is a constant to the gradient; so hold it: the surrogate sum of w * A * logp is what differs.
        ratio_logps = given["logps"].clone()

        def loss(logps: Tensor) -> Tensor:
            shifted = given | {
                "logps": logps,
                "old_logps": logps.detach() - (ratio_logps - given["old_logps"]),
            }
            shifted["rollout_logps"] = shifted["old_logps"] - (
                given["old_logps"] - given["rollout_logps"]
            )
            return call(shifted, config).loss
    else:

        def loss(logps: Tensor) -> Tensor:
            return call(given | {"logps": logps}, config).loss

    logps = given["logps"].clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (logps,), eps=1e-6, atol=1e-7, rtol=1e-5)


def gradient(given: Given, config: LossConfig) -> Tensor:
    logps = given["logps"].clone().requires_grad_()
    (found,) = torch.autograd.grad(call(given | {"logps": logps}, config).loss, logps)
    return found


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "sapo", "cispo"])
def test_gspo_token_has_the_gradient_of_tokens_at_the_ratio_of_their_completion(
    loss_type: str,
) -> None:
    given = make_given(6, 4, 5)
    given["advantages"] = given["advantages"][:, None] * given["entropies"]
    gaps, mask = given["logps"] - given["old_logps"], given["mask"]
    means = (gaps * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    level = "sequence_token"
    found = gradient(given, LossConfig(loss_type=loss_type, importance_sampling_level=level))
    torch.testing.assert_close(
        found,
        gradient(given | {"old_logps": given["logps"] - means}, LossConfig(loss_type=loss_type)),
    )
    assert not found.allclose(gradient(given, LossConfig(loss_type=loss_type)))
    # With one advantage per completion it is that of `sequence`.
    given["advantages"] = given["advantages"][:, 0]
    alike = [
        gradient(given, LossConfig(loss_type="grpo", importance_sampling_level=one))
        for one in (level, "sequence")
    ]
    torch.testing.assert_close(*alike)


@pytest.mark.parametrize("width", [5, 300])
def test_the_weight_of_fipo_is_a_factor_of_the_advantage(width: int) -> None:
    """Its gradient is that of `dapo` with the advantages f * A, also over several blocks of tokens."""
    given = make_given(7, 3, width, spread=0.1)
    config = LossConfig(
        loss_type="fipo", fipo_decay_rate=8, fipo_clip_range=0, fipo_safety_threshold=None
    )
    log_ratios = ((given["logps"] - given["old_logps"]) * given["mask"]).tolist()
    future = [[0.0] * (width + 1) for _ in log_ratios]
    for own, row in zip(future, log_ratios, strict=True):
        for t in reversed(range(width)):
            own[t] = row[t] + 2 ** (-1 / 8) * own[t + 1]
    weights = torch.tensor(future, dtype=torch.float64)[:, :width].exp()
    weighed = given | {"advantages": given["advantages"][:, None] * weights}
    torch.testing.assert_close(
        gradient(given, config), gradient(weighed, LossConfig(loss_type="dapo"))
    )
    found = mean_metrics(call(given, config).metrics)
    assert found["fipo/influence_weight"] == pytest.approx(weights[given["mask"]].mean().item())
    assert found["fipo/future_kl"] == pytest.approx(weights[given["mask"]].log().mean().item())


@pytest.mark.parametrize(
    "name", ["teacher_logps", "old_logps", "ref_logps", "rollout_logps", "entropies", "advantages"]
)
def test_only_logps_get_a_gradient(name: str) -> None:
    given = make_given(0, 3, 4)
    given["logps"].requires_grad_()
    given[name].requires_grad_()
    mode = "token_truncate"
    config = LossConfig(
        beta=0.1,
        sdar_loss_coef=0.1,
        top_entropy_quantile=0.5,
        rollout_importance_sampling_mode=mode,
    )
    call(given, config).loss.backward()
    assert given["logps"].grad is not None and given[name].grad is None


@pytest.mark.parametrize("pieces", [pytest.param(2, marks=pytest.mark.long), 8])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_cut_into_micro_batches_changes_nothing(
    loss_type: str, level: ImportanceSamplingLevel, pieces: int
) -> None:
    """Each piece is cut to its own width too, as a trainer would pad it."""
    given = make_given(5, 16, 24, dtype=torch.float32)
    given["mask"] = torch.arange(24) < torch.randint(
        0, 25, (16, 1), generator=torch.Generator().manual_seed(1)
    )
    given["mask"][3] = False
    config = LossConfig(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.04,
        top_entropy_quantile=0.5,
        rollout_importance_sampling_mode="sequence_truncate",
    )

    def step(pieces: int) -> tuple[float, Tensor, dict[str, float]]:
        logps = given["logps"].clone().requires_grad_()
        parts = torch.arange(16).chunk(pieces)
        normalizer = torch.stack(
            [loss_normalizer(given["mask"][rows], config) for rows in parts]
        ).sum()
        threshold = top_entropy_threshold(
            given["entropies"], given["mask"], config.top_entropy_quantile
        )
        outputs = []
        marked = marks_of(given, config)
        for rows in parts:
            width = max(1, int(given["mask"][rows].sum(1).max()))
            part = {k: v[rows] if v.dim() == 1 else v[rows, :width] for k, v in given.items()}
            part["logps"] = logps[rows, :width]
            whole = {"normalizer": normalizer, "entropy_threshold": threshold}
            if marked is not None:
                whole["marked"] = marked[rows, :width]
            outputs.append(call(part, config, **whole))
            outputs[-1].loss.backward()
        assert logps.grad is not None
        total = sum(output.loss.item() for output in outputs)
        return total, logps.grad, mean_metrics(sum_metrics(output.metrics for output in outputs))

    loss, grad, metrics = step(1)
    cut_loss, cut_grad, cut_metrics = step(pieces)
    assert loss != 0
    assert cut_loss == pytest.approx(loss, rel=1e-5)
    assert (cut_grad - grad).norm() <= 1e-5 * grad.norm()
    assert cut_metrics == pytest.approx(metrics, rel=1e-6)
    # Without the shared denominator the same sum is something else (or this test could not fail).
    whole = call(given, config).loss.item()
    assert whole == pytest.approx(loss, rel=1e-6)
    naive = sum(
        call({k: v[rows] for k, v in given.items()}, config).loss.item()
        for rows in torch.arange(16).chunk(pieces)
    )
    assert naive != pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_overlong_filter_and_the_denominator(loss_type: str) -> None:
    """A filtered completion has no gradient; it stays in N (and N * L), and its tokens leave the token count."""
    given = make_given(2, 4, 5)
    given["mask"] = torch.ones(4, 5, dtype=torch.bool)
    config = LossConfig(loss_type=loss_type, max_completion_length=10, beta=0.04)
    truncated = torch.tensor([False, True, False, True])
    filtered = drop_truncated(given["mask"], truncated)
    logps = given["logps"].clone().requires_grad_()
    loss = call(given | {"logps": logps, "mask": filtered}, config).loss
    (grad,) = torch.autograd.grad(loss, logps)
    assert grad[truncated].count_nonzero() == 0 and grad[~truncated].count_nonzero() > 0
    kept = {k: v[~truncated] for k, v in given.items()}
    alone = call(kept, config).loss.item()
    share = 1.0 if LOSSES[loss_type].mean_over == "tokens" else 0.5
    assert loss.item() == pytest.approx(share * alone)
    with pytest.raises(ValueError, match="truncated"):
        drop_truncated(given["mask"], truncated[:2])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_has_no_effect_whatever_it_holds(
    loss_type: str, level: ImportanceSamplingLevel
) -> None:
    given = make_given(4, 3, 6)
    config = LossConfig(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.04,
        top_entropy_quantile=0.5,
        rollout_importance_sampling_mode="sequence_mask",
    )
    spoilt = dict(given)
    spoils = {
        "logps": NAN,
        "old_logps": -INF,
        "ref_logps": INF,
        "rollout_logps": NAN,
        "entropies": INF,
    }
    spoils["teacher_logps"] = NAN
    for name, rubbish in spoils.items():
        spoilt[name] = given[name].masked_fill(~given["mask"], rubbish)
    results = []
    for case in (given, spoilt):
        logps = case["logps"].clone().requires_grad_()
        output = call(case | {"logps": logps}, config)
        results.append(
            (output.loss, *torch.autograd.grad(output.loss, logps), *output.metrics.values())
        )
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_huge_ratios_stay_finite(loss_type: str) -> None:
    """The clipped branch must not be spoilt by an infinity times 0 in the branch that lost."""
    logps = torch.tensor([[-1.0, -200.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-200.0, -1.0, -1.0]])
    for advantage in (1.0, -1.0):
        output = policy_loss(
            logps,
            old,
            torch.tensor([advantage]),
            torch.ones(1, 3),
            LossConfig(
                loss_type=loss_type,
                beta=0.1,
                sdar_loss_coef=1.0,
                rollout_importance_sampling_mode="token_truncate",
            ),
            ref_logps=old,
            rollout_logps=logps.detach(),
            teacher_logps=old,
        )
        (grad,) = torch.autograd.grad(output.loss, logps)
        assert output.loss.isfinite() and grad.isfinite().all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_to_train_is_zero_not_nan(loss_type: str) -> None:
    given = make_given(1, 2, 3)
    given["mask"][:] = False
    logps = given["logps"].requires_grad_()
    output = call(given, LossConfig(loss_type=loss_type, beta=0.1, top_entropy_quantile=0.5))
    output.loss.backward()
    assert output.loss.item() == 0 and logps.grad is not None and logps.grad.count_nonzero() == 0
    assert mean_metrics(output.metrics) == {}


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """At logp = old every loss has the gradient -A (over its denominator): REINFORCE."""
    for loss_type in LOSS_TYPES:
        logps = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], dtype=torch.float64, requires_grad=True)
        advantages = torch.tensor([1.5, -0.5], dtype=torch.float64)
        config = LossConfig(loss_type=loss_type, max_completion_length=2, clip_cov_lb=4.0)
        policy_loss(logps, logps.detach(), advantages, torch.ones(2, 2), config).loss.backward()
        assert logps.grad is not None
        torch.testing.assert_close(logps.grad, (-advantages / 4)[:, None].expand(2, 2))


def test_rollout_metrics_by_hand() -> None:
    old = torch.zeros(1, 3)
    rollout = -torch.tensor([[math.log(4.0), 0.0, math.log(0.5)]])
    config = LossConfig(rollout_importance_sampling_mode="token_truncate")
    output = policy_loss(old, old, torch.ones(1), torch.ones(1, 3), config, rollout_logps=rollout)
    found = mean_metrics(output.metrics)
    assert found["rollout/logp_diff"] == pytest.approx((math.log(4) + math.log(2)) / 3)
    assert found["rollout/weight"] == pytest.approx((2 + 1 + 0.5) / 3)
    assert found["rollout/weight_over_threshold"] == pytest.approx(1 / 3)
    assert output.loss.item() == pytest.approx(-3.5 / 3)
    masked = replace(config, rollout_importance_sampling_mode="token_mask")
    output = policy_loss(old, old, torch.ones(1), torch.ones(1, 3), masked, rollout_logps=rollout)
    assert output.loss.item() == pytest.approx(-1.5 / 3)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0, 5, width=32), min_size=1, max_size=40),
    st.sampled_from([0.01, 0.2, 0.5, 1.0]),
)
def test_entropy_threshold_is_torchs_quantile(values: list[float], share: float) -> None:
    entropies = torch.tensor(values)
    ours = top_entropy_threshold(entropies, torch.ones(len(values)), share)
    torch.testing.assert_close(ours, torch.quantile(entropies, 1 - share), rtol=1e-5, atol=1e-6)
