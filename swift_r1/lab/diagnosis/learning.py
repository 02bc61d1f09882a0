"""Signs in the rewards: whether there is anything to learn from, and whether it is learned."""

from __future__ import annotations

import math
from statistics import fmean

from swift_r1.lab.diagnosis.past import MetricChange, Past, Sign, detector

SILENT = 0.9  # share of groups whose rewards are equal
INVALID = 0.02
SPREAD = 0.25  # of a reward, against its mean: below it, nearly all completions have it
NEVER = 10  # rounds in which the first function gave nothing
# nats per token; against the first rounds
LOW_ENTROPY = 0.1
LESS_ENTROPY = 0.4


@detector("rewards invalid", 5, "rewards/*/invalid")
def rewards_invalid(past: Past, rounds: int) -> Sign | None:
    """Sees a function that fails now and then; one that fails more often ends the run
    (`--max_invalid_reward_ratio`)."""
    for name in past.rewards:
        shares = past.last(f"{name}/invalid", rounds)
        if shares and fmean(shares) >= INVALID and sum(map(bool, shares)) >= min(3, len(shares)):
            return Sign(
                f"reward {name.removeprefix('rewards/')} was invalid for {fmean(shares):.1%} of the completions",
                "read `cause` in invalid_rewards.jsonl; swift check tries the function on made-up completions",
            )
    return None


def _silent(past: Past, rounds: int) -> list[float]:
    """Returns the share of groups in which nothing differs, of each line; empty where there is enough that does. With
    `--dynamic_sample` that is of the groups that are trained on."""
    if (
        past.log.series.keys() & {"teacher_kl", "sdar/gate_mean"}
        and "rlsd_lambda" not in past.log.series
    ):
        return []  # a teacher needs no difference, unless it only weighs what rewards say
    shares = past.last("frac_reward_zero_std", rounds)
    kept = past.last("dynamic_sample/kept_without_signal", rounds)
    if kept:
        shares = [value / (past.prompts or 1) for value in kept]
    return shares if shares and fmean(shares) >= SILENT else []


def _solved(past: Past, name: str, rounds: int) -> bool:
    """Returns whether nearly all completions have the same of this reward, above 0."""
    values, spread = (past.last(f"{name}/{one}", rounds) for one in ("mean", "std"))
    return bool(values and spread) and fmean(values) > 0 and fmean(spread) <= SPREAD * fmean(values)


@detector("rewards saturated", 8, "frac_reward_zero_std", "rewards/*/std")
def rewards_saturated(past: Past, rounds: int) -> Sign | None:
    """Sees that all completions earn the same: too easy, or a function that does not tell two completions apart."""
    silent = _silent(past, rounds)
    name = past.trained
    if not silent or not _solved(past, name, rounds):
        return None
    text = (
        f"{fmean(silent):.0%} of the groups have equal rewards; reward {name.removeprefix('rewards/')} is "
        f"{fmean(past.last(f'{name}/mean', rounds)):.3g} for nearly all completions"
    )
    other = past.last(f"{past.right}/mean", rounds) if name != past.right else []
    if other:
        text += f", and {past.right.removeprefix('rewards/')} {fmean(other):.3g}"
    return Sign(
        text,
        "it is learned: stop; or harder prompts, or look whether the reward function accepts anything",
    )


@detector("entropy collapse", 5, "entropy")
def entropy_collapse(past: Past, rounds: int) -> Sign | None:
    """Sees that the policy has settled before it was good: it writes the same again and again, and earns no more for
    it."""
    entropy = past.change("entropy", rounds)
    right = past.change(f"{past.right}/mean", rounds)
    if entropy is None or max(entropy.late) > min(LOW_ENTROPY, LESS_ENTROPY * fmean(entropy.early)):
        return None
    if _solved(past, past.right, rounds) or (right is not None and right.gain > 0):
        return None
    return Sign(
        f"entropy {fmean(entropy.late):.2g} nats per token, at first {fmean(entropy.early):.2g}, without more reward",
        "a lower --learning_rate, --epsilon_high 0.28, a higher --beta; continue from an earlier checkpoint",
    )


@detector(
    "no signal",
    8,
    "frac_reward_zero_std",
    under=(
        *(
            "template broken",
            "rewards saturated",
            "entropy collapse",
            "repetition",
            "length explosion",
        ),
        "KL running off",
    ),
)
def no_signal(past: Past, rounds: int) -> Sign | None:
    """Groups are all right or all wrong: their advantages are 0. With a critic they may differ from each other."""
    advice = past.answers_first + (
        "easier prompts, a solved example in the prompt, more --num_generations, a reward for the format or for a part "
        "of the answer, --dynamic_sample true; swift forecast tells before a run"
    )
    if past.rounds >= NEVER and len(past.rewards) > 1 and past.earned_nothing:
        return Sign(
            f"reward {past.right.removeprefix('rewards/')} was 0 for every completion since the first: only other "
            "rewards can rise",
            advice,
        )
    silent = _silent(past, rounds)
    if not silent or (not past.compares_groups and any(past.last(f"{past.right}/std", rounds))):
        return None
    change = past.change("reward", rounds)
    if change is not None and change.rise < 0:
        return Sign(
            f"{fmean(silent):.0%} of the groups have equal rewards; the mean reward fell from "
            f"{fmean(change.early):.3g} to {fmean(change.late):.3g}",
            "what it could do is lost: a lower --learning_rate, --max_grad_norm, a higher --beta; continue from an "
            "earlier checkpoint",
        )
    return Sign(
        f"{fmean(silent):.0%} of the groups have equal rewards; the mean reward is "
        f"{fmean(past.last('reward', rounds) or [math.nan]):.3g}",
        advice,
    )


@detector("evaluation falling", 1, "eval/*/accuracy", under=("template broken",))
def evaluation_falling(past: Past, _rounds: int) -> Sign | None:
    """Sees that the reward rises, and the last two evaluations are below the best one by more than their intervals."""
    log = past.log
    for benchmark in log.benchmarks():
        steps = log.get(f"eval/{benchmark}/accuracy").steps
        if len(steps) < 3 or steps[-1] < log.last_step:
            continue  # one that is not the newest was looked at when it came
        found = log.evaluations(benchmark, "accuracy")
        if len(found) < 3:
            continue
        best = max(found[:-2], key=lambda one: one.value)
        if best.low is None or any(one.high is None or one.high >= best.low for one in found[-2:]):
            continue
        some = 5 * past.round
        then, now = (
            past.values("reward", end - some, max(end, some)) for end in (best.step, found[-1].step)
        )
        if not then or not now:
            continue
        change = MetricChange(then, now)
        if change.rise > 0:
            return Sign(
                f"{benchmark} fell from {best.value:.3f} at step {best.step} to {found[-1].value:.3f} at step "
                f"{found[-1].step}, while the reward rose from {fmean(change.early):.3g} to {fmean(change.late):.3g}",
                "read the completions with the highest reward: what pays is not what is evaluated; take the checkpoint "
                "of the best evaluation, fewer passes over the data, a higher --beta",
            )
    return None
