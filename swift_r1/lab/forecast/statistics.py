"""The figures of a forecast, exact where they can be: nothing in them is drawn at random.

Of a prompt's `N` completions every subset of `n` is as likely to be a group of the run, so that a mean over all of them
is unbiased (a U-statistic: Hoeffding 1948, Annals of Mathematical Statistics 19(3)).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction
from math import comb
from statistics import fmean

from swift_r1.algorithms.rewards import sample_std, standard_error
from swift_r1.lab.diagnosis.trend import END, LEAST_ROUNDS, NORMAL_95
from swift_r1.training.evaluation.statistics import MeanEstimate, mean_estimate

_TAG = re.compile(r"</(\w+)>")
_MARKERS = ("\\boxed{", "####")


def signal_probability(rewards: Sequence[Hashable | None], n: int) -> float:
    """Returns the probability that of `n` completions, drawn without replacement from these, two have rewards that
    differ.

    A subset has no signal where all of it is of one value or unusable: `sum_v C(c_v + u, n) - C(u, n)` of each value
    `v`, which `c_v` completions have, plus `C(u, n)`, over `C(N, n)`; the hypergeometric distribution's.

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


def repeated_share(texts: Sequence[Sequence[str]]) -> float:
    """Returns the share of completions that say word for word what an earlier one of their prompt says."""
    return 1 - sum(len(set(group)) for group in texts) / sum(map(len, texts))


def markers_of(prompt: str) -> list[str]:
    r"""Returns what a prompt tells the model to write, as far as that can be read from it: the closing tags that it
    names, and `\boxed{` or `####`."""
    tags = dict.fromkeys(f"</{name}>" for name in _TAG.findall(prompt))
    return [*tags, *(one for one in _MARKERS if one in prompt)]


def rounds_of_sampling(signal: float, resamples: int) -> float:
    """Returns how many times the completions of a round are generated with `--dynamic_sample`, which replaces groups
    without signal at most `resamples` times."""
    return sum((1 - signal) ** times for times in range(resamples + 1))


def steps_without_signal(signal: float, groups: float) -> float:
    """Returns the share of optimizer steps on `groups` groups in which none has a signal, so that they change
    nothing."""
    return float((1 - signal) ** groups)


def round_error(groups: Sequence[Sequence[float]], prompts: int, size: int) -> float:
    """Returns the standard error of the mean reward of a round of `prompts` groups of `size` completions, from the
    usable rewards of `P` groups of `N`: what differs between prompts counts once for each of them, what differs within
    a prompt once for each completion. NaN of fewer than two groups."""
    known = [group for group in groups if group]
    if len(known) < 2:
        return math.nan
    sampled = len(known) / sum(map(len, known))
    within = fmean(sample_std(group) ** 2 for group in known)
    of_prompt = standard_error(known) ** 2 * len(known) + within * (1 / size - sampled)
    return math.sqrt(max(0.0, of_prompt) / prompts)


def least_rise(error: float, rounds: int) -> float:
    """Returns the rise of a reward that `swift why` can tell from none after so many rounds, each of whose means has
    this standard error: it compares the first and the last third of them. NaN of too few rounds."""
    if rounds < LEAST_ROUNDS:
        return math.nan
    return NORMAL_95 * error * math.sqrt(2 / (rounds // END))


def rounds_to_tell(error: float, rise: float) -> int:
    """Returns how many rounds tell a rise, the inverse of `least_rise`."""
    each = max(1, math.ceil(2 * (NORMAL_95 * error / rise) ** 2))
    return max(LEAST_ROUNDS, END * each)
