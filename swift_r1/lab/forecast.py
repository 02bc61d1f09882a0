"""What a run would have to learn from, by the answers that `swift forecast` has sampled; loads no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import groupby
from math import comb
from statistics import fmean
from typing import Any

from swift_r1.algorithms.methods import ESTIMATORS
from swift_r1.flags.plan import Plan
from swift_r1.flags.run import RunFlags
from swift_r1.rewards.types import RIGHT
from swift_r1.training.evaluation.statistics import MeanEstimate, mean_estimate

SIZES = (4, 8, 16)  # of groups, beside the run's own
NEVER = 0.01  # share of answers that earn something: as good as none
Row = Mapping[str, Any]  # of SAMPLED


def signal_probability(rewards: Sequence[Hashable | None], n: int) -> float:
    """Returns the probability that of `n` completions, drawn without replacement from these, two have rewards that
    differ.

    A subset has no signal where all of it is of one value or unusable: `sum_v C(c_v + u, n) - C(u, n)` of each value
    `v`, which `c_v` completions have, plus `C(u, n)`, over `C(N, n)`; the hypergeometric distribution's. Nothing is
    drawn at random, and the mean over all subsets is unbiased (a U-statistic: Hoeffding 1948, Annals of Mathematical
    Statistics 19(3)).

    Args:
        rewards: `N`, None for one that is not usable.

    Raises ValueError: not `1 <= n <= N`.
    """
    if not 1 <= n <= len(rewards):
        raise ValueError(f"groups of {n} among {len(rewards)} completions")
    counts = Counter(rewards)
    unusable = counts.pop(None, 0)
    alike = sum(comb(count + unusable, n) - comb(unusable, n) for count in counts.values()) + comb(
        unusable, n
    )
    return float(1 - Fraction(alike, comb(len(rewards), n)))


def signal_share(groups: Sequence[Sequence[Hashable | None]], n: int) -> MeanEstimate | None:
    """Returns the share of groups of `n` that have a signal, with its 95 % interval over prompts (`mean_estimate`:
    Wilson's, by the effective number of groups); None where fewer than `n` completions of a prompt were sampled."""
    if any(len(rewards) < n for rewards in groups):
        return None
    draws = min(len(rewards) for rewards in groups) / n
    return mean_estimate([signal_probability(rewards, n) for rewards in groups], draws)


def lines(rows: Sequence[Row], args: RunFlags, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yields what the answers say of a run: names, values, and their intervals or notes."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row["prompt"])]
    first, *_ = args.reward_funcs

    def over_prompts(name: str, shares: Sequence[Sequence[bool]]) -> tuple[str, str, str]:
        return name, *_shown(mean_estimate([fmean(one) for one in shares], len(shares[0])))

    passes = [[(row["rewards"][first] or 0.0) >= RIGHT for row in group] for group in groups]
    yield over_prompts(f"pass ({first} of 1 or more)", passes)
    for name in args.reward_funcs:
        known = [value for row in rows if (value := row["rewards"][name]) is not None]
        mean = f"{fmean(known):.3g}" if known else "none"
        note = f"{len(rows) - len(known)} without a valid value" if len(known) < len(rows) else ""
        yield f"mean of {name}", mean, note
    if args.rlhf_type == "grpo" and ESTIMATORS[args.advantage_estimator].baseline == "group":
        keys = [[_compared(row, args) for row in group] for group in groups]
        own = plan.num_generations
        for size in sorted({*SIZES, own}):
            name = f"groups of {size} with a signal" + " (the run's)" * (size == own)
            share = signal_share(keys, size)
            few = ("?", f"{len(keys[0])} answers per prompt are too few")
            yield name, *(few if share is None else _shown(share))
    yield over_prompts("cut off", [[row["cut"] for row in group] for group in groups])


def step_lines(step: Row, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yields what an optimizer step takes, by its line of `logging.jsonl`."""
    times = {
        name.removeprefix("time/"): seconds
        for name, seconds in step.items()
        if name.startswith("time/") and name != "time/step" and seconds
    }
    parts = ", ".join(f"{name} {seconds:.2g}" for name, seconds in times.items())
    yield "seconds a step", f"{step['time/step']:.3g}", parts
    hours = step["time/step"] * plan.total_steps / 3600
    yield "hours for the plan", f"{hours:.2g}", "without start, evaluations, checkpoints"
    yield "memory of a rank, GiB", f"{step['memory/peak_gib']:.2f}", ""


def earns_nothing(rows: Sequence[Row], args: RunFlags) -> bool:
    """Says whether next to no answer earns anything from the first reward function, whose values are valid."""
    known = [value for row in rows if (value := row["rewards"][args.reward_funcs[0]]) is not None]
    return bool(known) and fmean(value > 0 for value in known) <= NEVER


def _compared(row: Row, args: RunFlags) -> Hashable:
    """Returns what must differ within a group for a signal: the reward, or with GDPO any function's; None if
    unusable."""
    if row["reward"] is None or args.multi_objective_aggregation == "sum_then_normalize":
        return row["reward"]  # type: ignore[no-any-return]
    weights = zip(args.reward_funcs, args.reward_weights or [], strict=True)
    return tuple(row["rewards"][name] for name, weight in weights if weight)


def _shown(one: MeanEstimate) -> tuple[str, str]:
    """Returns a share and its interval in percent."""
    return f"{100 * one.value:.3g} %", f"95 %: {100 * one.low:.1f} to {100 * one.high:.1f}"
