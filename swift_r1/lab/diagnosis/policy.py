"""Signs in the policy's updates: how far it goes, from what, and whether the engine goes with it."""

from __future__ import annotations

from statistics import fmean

from swift_r1.lab.diagnosis.past import Past, Sign, detector

KL = 1.0
KL_GROWTH = 3.0
RATIO = 0.1
CLIPPED = 0.3
MISMATCH_GROWTH = 5.0
MISMATCH = {True: 0.02, False: 0.1}  # nats: in float32, in 16 bits
MISMATCH_AT_ONCE = 0.5  # nats, whatever the dtype: other weights, another temperature
STILL = 1e-4  # share of 16-bit weights


@detector("engine mismatch", 3, "rollout/logp_diff")
def engine_mismatch(past: Past, rounds: int) -> Sign | None:
    """Trainer and engine do not compute the same: more and more, or not at all."""
    if past.replays:
        return None  # the engine had other weights
    name = "rollout/logp_diff"
    late = past.last(name, rounds)
    change = past.change(name, rounds)
    advice = "--weight_check_steps 1: weights that do not arrive; else --rollout_importance_sampling_mode token_truncate, "
    if past.args.get("vllm_engine_kwargs"):
        advice += "or the engine without quantization, "
    advice += "float32 on both sides to tell numerics apart"
    if late and min(late) >= MISMATCH_AT_ONCE:
        return Sign(
            f"log-probs of trainer and engine differ by {fmean(late):.2g} nats per token", advice
        )
    # they differ by what top-p and the like leave out
    cuts = bool(past.last("rollout/kept_mass", rounds))
    exact = past.args.get("torch_dtype") == "float32" and not past.args.get("vllm_engine_kwargs")
    if late and exact and not cuts and min(late) >= MISMATCH[True]:
        return Sign(
            f"log-probs of trainer and engine differ by {fmean(late):.2g} nats per token in float32, where rounding "
            "explains 1e-5",
            advice,
        )
    floor = MISMATCH_AT_ONCE if cuts else MISMATCH[past.args.get("torch_dtype") == "float32"]
    if change is None or min(change.late) < max(floor, MISMATCH_GROWTH * fmean(change.early)):
        return None
    return Sign(
        f"log-probs of trainer and engine differ by {fmean(change.late):.2g} nats per token, at first by "
        f"{fmean(change.early):.2g}",
        advice,
    )


@detector("ratios off", 3, "ratio", "clip_ratio/low", "clip_ratio/high")
def ratios_off(past: Past, rounds: int) -> Sign | None:
    """Importance ratios far from 1, or many tokens clipped, on the average of the steps: a round's first has none. Ratios
    of whole completions are clipped on purpose at a thousandth of what tokens are, and so far more often."""
    ratios, *sides = (
        past.last(name, rounds) for name in ("ratio", "clip_ratio/low", "clip_ratio/high")
    )
    clipped = [sum(both) for both in zip(*sides, strict=False)]
    of_tokens = past.args.get("importance_sampling_level") in (None, "token")
    many = bool(clipped) and of_tokens and fmean(clipped) >= CLIPPED
    if not ratios or not clipped or (abs(fmean(ratios) - 1) < RATIO and not many):
        return None
    return Sign(
        f"the mean importance ratio is {fmean(ratios):.3g}, and {fmean(clipped):.0%} of the tokens are clipped",
        "a lower --learning_rate, fewer --num_iterations, fewer optimizer steps per round, less --max_staleness",
    )


@detector("KL running off", 5, "kl")
def kl_running_off(past: Past, rounds: int) -> Sign | None:
    """Sees that the policy leaves its reference, further with every round."""
    change = past.change("kl", rounds)
    if change is None or min(change.late) < max(KL, KL_GROWTH * min(change.early)):
        return None
    return Sign(
        f"KL to the reference {fmean(change.late):.3g} nats per token, at first {min(change.early):.2g}",
        "a lower --learning_rate, a higher --beta, --max_grad_norm; look whether --ref_model is the policy's own start",
    )


@detector("weights not moving", 10, "weights/changed", under=("no signal", "rewards saturated"))
def weights_not_moving(past: Past, rounds: int) -> Sign | None:
    """Updates are too small for 16 bits: the policy that generates stays what it was for long. Neither a warm-up nor
    the end of a schedule is meant, where the learning rate is small on purpose."""
    changed, norms, rates = (
        past.last(name, rounds) for name in ("weights/changed", "grad_norm", "learning_rate")
    )
    if not changed or fmean(changed) >= STILL or not any(norms):
        return None
    if min(rates, default=0.0) < (past.args.get("learning_rate") or 0.0) / 2:
        return None
    return Sign(
        f"{fmean(changed):.4%} of the 16-bit weights change in a step, at --learning_rate {max(rates, default=0):.2g}",
        "a learning rate of 5e-7 or more (0.3 % of the weights per step)",
    )
