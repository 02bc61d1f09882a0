"""Why a reward does not rise. Causes stand in the order in which one brings about the next: what is wrong with the
rewards explains what is wrong with the signal, that explains a policy that does not move, and so on. Each has the
measurement that tells it from the others; without one nothing is claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from swift_r1.lab.diagnosis.past import Past, Sign
from swift_r1.lab.diagnosis.text import NEVER_ENDS
from swift_r1.lab.diagnosis.trend import Trend

# share of a reward's variance that is chance; share of equal completions that got another value
NOISE = 0.05
EQUAL_DIFFER = 0.05
RELATIVE = 0.01  # of a reward's standard deviation: a mean that is 0 but for rounding
REORDERED = 0.02  # share of completions whose reward depends on their place
# share of completions whose reward depends on the row at all; that earn more by the row beside theirs
OF_A_ROW = 0.05
BESIDE = 0.1
# of the groups, equal rewards; of the completions, equal to another of their group
SILENT = 0.7
ALIKE = 0.3
MOSTLY_ALIKE = 0.6
NO_TEACHING = 0.05  # of the groups, with a signal
COLD_SILENT = 0.4
COLD_ENTROPY = 0.05  # nats per token
CUT_MASS = 0.8  # of the policy's probability, left by top-p and the like
STILL = 0.01  # nats, mean change of a token's log-prob since the start
STILL_ROUNDS = 8
GROWTH = 1.6  # of that change, since it was measured first: less is standing still
PULL = 0.1  # of the KL, against the advantages
CLIPPED = 0.01  # of a gradient's norm, left by clipping
# nats by which a token's log-prob moves in a round; and since the start
LEAP = 0.15
FAR = 1.5
WILD_ENTROPY = 2.0  # times that of the first rounds
WILD_ROUNDS = 3
WARM_START = "answers to learn from first (swift sft), such as its own right ones (swift forecast --output_file)"
NEVER = 0.01  # mean of a reward that is as good as never given
LOW_MOVE = 0.02  # nats per round, as healthy runs of small models have


@dataclass(frozen=True, slots=True)
class Cause:
    """What keeps a reward from rising, by which measurement, and what to do."""

    name: str
    evidence: str
    advice: str
    fault: bool = True  # something is wrong; else it is only too early to tell

    @property
    def line(self) -> str:
        return f"{self.name}: {self.evidence}; try: {self.advice}"


Looked = Callable[[Past], Cause | None]
Signs = Mapping[str, Sign]  # by name, those that hold


def causes_of(past: Past, trend: Trend, others: Sequence[Trend], signs: Signs) -> list[Cause]:
    """Returns why a reward does not rise, what explains most first; nothing for one that rises, unless it is not the
    one that matters. `others` are the trends of what it is to raise: the first of several reward functions, and
    evaluations."""
    beside = _beside_the_task(past, trend, others)
    if trend.kind in ("rises", "solved"):
        never = _task_never_done(past) if beside is not None else None
        return [cause for cause in (never, beside) if cause is not None]
    found = list(_in_order(past, trend, signs))
    if not found and not signs and trend.kind in ("flat", "too early"):
        found = [cause for cause in [_too_few_completions(past, trend)] if cause is not None]
    return found


def _in_order(past: Past, trend: Trend, signs: Signs) -> Iterator[Cause]:
    falls = trend.kind == "falls"
    no_signal: Sequence[Looked | str] = (_no_signal, "no signal")
    large: Sequence[Looked | str] = (_updates_too_large, "KL running off", "ratios off")
    steps: Sequence[Looked | str] = (
        "rewards invalid",
        _reward_is_noise,
        _reward_relative,
        _reward_constant,
        _answers_of_other_rows,
        _answers_first,
        _never_ends,
        "template broken",
        _no_variety,
        _sampling_differs,
        "engine mismatch",
        *(() if falls else no_signal),
        _policy_does_not_move,
        "weights not moving",
        *large,
        "entropy collapse",
        "repetition",
        "language broken",
        "length explosion",
        "truncation",
        "evaluation falling",
        # where all is lost there is no signal any more
        *(no_signal if falls else ()),
        "data repeated",
        _prompts_in_order,
    )
    names = {
        "engine mismatch": "sampling differs from training",
        "weights not moving": "policy does not move",
        "KL running off": "updates too large",
        "ratios off": "updates too large",
        "evaluation falling": "beside the task",
    }
    seen = set[str]()
    for step in steps:
        cause = None
        if not isinstance(step, str):
            cause = step(past)
        elif step in signs:
            cause = Cause(names.get(step, step), *signs[step])
        if cause is not None and cause.name not in seen:
            seen.add(cause.name)
            yield cause


def _latest(past: Past, name: str) -> float | None:
    values = past.values(name, 0)
    return values[-1] if values else None


def _mean(past: Past, name: str, rounds: int = STILL_ROUNDS) -> float | None:
    """Returns the mean of a metric over the last rounds, or over all where there were fewer."""
    values = past.last(name, min(rounds, past.rounds))
    return fmean(values) if values else None


def _taught(past: Past) -> list[str]:
    """Returns the reward functions that count."""
    names = past.args.get("reward_funcs")
    weights = past.args.get("reward_weights")
    weighed = isinstance(names, list) and isinstance(weights, list) and len(names) == len(weights)
    if not weighed:
        return past.rewards
    own = [
        f"rewards/{name}" for name, weight in zip(names or [], weights or [], strict=True) if weight
    ]
    return [name for name in own if f"{name}/mean" in past.log.series] or past.rewards


def _reward_is_noise(past: Past) -> Cause | None:
    for name in _taught(past):
        short = name.removeprefix("rewards/")
        noise = past.values(f"recheck/{short}/noise", 0)
        differ = past.values(f"{name}/equal_differ", 0)
        advice = (
            "a reward that says the same of the same completion: judge at temperature 0, the mean of several judgements, "
            "no time limits within the function"
        )
        if noise and fmean(noise) >= NOISE:
            changed = fmean(past.values(f"recheck/{short}/changed", 0))
            return Cause(
                "reward is noise",
                f"asked again about the same completions, {short} gives {changed:.0%} of them another value: "
                f"{fmean(noise):.0%} of its variance is chance",
                advice,
            )
        if len(differ) >= 3 and fmean(differ) >= EQUAL_DIFFER:
            return Cause(
                "reward is noise",
                f"{fmean(differ):.0%} of the completions that are equal to another of their prompt got another value from "
                f"{short}",
                advice,
            )
    return None


def _answers_of_other_rows(past: Past) -> Cause | None:
    if _reward_relative(past) is not None:
        return None  # other columns change the mean that it is measured from
    for name in _taught(past):
        short = name.removeprefix("rewards/")
        reordered, own, other, before, after = (
            past.values(f"recheck/{short}/{one}", 0)
            for one in ("reordered", "own", "other", "before", "after")
        )
        if reordered and fmean(reordered) >= REORDERED:
            return Cause(
                "answers of other rows",
                f"{fmean(reordered):.0%} of the completions get another value from {short} when they come in another "
                "order: values are given to other completions than they are of",
                "return one value per completion, in the order of `completions`; do not sort, group or drop them",
            )
        for beside, where in ((before, "before"), (after, "after")):
            if beside and fmean(beside) >= max(BESIDE, 2 * fmean(own)):
                return Cause(
                    "answers of other rows",
                    f"{fmean(beside):.0%} of the completions earn more from {short} with the columns of the row {where} "
                    f"their own, {fmean(own):.0%} with their own rather than another row's",
                    "look at the preprocessor: columns are shifted against the prompts",
                )
        noisy = any(past.values(f"recheck/{short}/changed", 0))
        of_a_row = fmean(own) + fmean(other) if own and not noisy else 0.0
        if of_a_row >= OF_A_ROW and fmean(own) <= fmean(other):
            return Cause(
                "answers of other rows",
                f"{short} reads columns, but {fmean(own):.0%} of the completions earn more with those of their own row "
                f"than with another row's, and {fmean(other):.0%} less",
                "look at the preprocessor: columns that belong to other prompts; compare some prompts with their columns "
                "(swift check)",
            )
    return None


def _reward_relative(past: Past) -> Cause | None:
    """Rewards that are measured from the mean of their group, or of the round: their mean is 0 whatever is learned."""
    means = past.values("reward", 0)
    spreads = past.values(f"{past.trained}/std", 0)
    if past.rounds < 3 or not means or not spreads or not any(spreads):
        return None
    if max(map(abs, means)) > RELATIVE * fmean(spreads):
        return None
    return Cause(
        "reward is relative",
        f"the mean reward is 0 in every round, though {past.trained.removeprefix('rewards/')} varies by "
        f"{fmean(spreads):.2g}: it is measured from a mean, and cannot rise whatever is learned",
        "the score as it is: advantages subtract the mean of the group anyway; or log it beside this one, with weight 0 "
        "(--reward_weights)",
    )


def _reward_constant(past: Past) -> Cause | None:
    """Rewards that do not tell the completions of a prompt apart, whatever these are. Where all are 0 the answers may be
    wrong, and where completions are equal their rewards have to be."""
    silent = past.values("frac_reward_zero_std", 0)
    values = past.values(f"{past.trained}/mean", 0)
    spreads = past.values(f"{past.trained}/std", 0)
    alike = past.values("completions/repeated", 0)
    if past.rounds < 3 or not values or not silent or min(silent) < 1 or not any(values):
        return None
    if not past.compares_groups and any(spreads):
        return None
    if alike and fmean(alike) > MOSTLY_ALIKE:
        return None
    name = past.trained.removeprefix("rewards/")
    everywhere = not any(spreads)
    what = (
        f"was {fmean(values):.3g} for every completion"
        if everywhere
        else "gave all completions of a prompt the same"
    )
    differ = (
        f", of which {1 - fmean(alike):.0%} differ from the others of their prompt" if alike else ""
    )
    return Cause(
        "reward constant",
        f"{name} {what} since the first round{differ}",
        "a reward that tells a right answer from a wrong one: call it on both (swift check)",
    )


def _never_ends(past: Past) -> Cause | None:
    cut = past.first("completions/clipped_ratio")
    if past.rounds < 3 or not cut or min(cut) < NEVER_ENDS:
        return None
    longest = past.args.get("max_completion_length")
    return Cause(
        "truncation",
        f"{fmean(cut):.0%} of the completions of the first rounds were cut off: they do not end by themselves"
        + (f" within {longest} tokens" if longest else ""),
        "a longer --max_completion_length; the end that the model has learned: --stop_words, its chat template, its "
        "eos_token_id (swift check shows a prompt as the model sees it)",
    )


def _prompts_in_order(past: Past) -> Cause | None:
    """In the first pass over data that is not shuffled, later rounds have other prompts than earlier ones."""
    size = past.plan.get("prompts_per_epoch")
    if past.args.get("dataset_shuffle") is not False or not isinstance(size, int):
        return None
    asked = past.rounds * (past.prompts or 1)
    if asked > size:
        return None
    return Cause(
        "prompts in the order of the file",
        f"the {asked:,} prompts so far are the first of {size:,}, in the order of the data (--dataset_shuffle false): if "
        "later ones are harder, a reward that falls says nothing about the policy",
        "--dataset_shuffle true, or an evaluation on the same prompts each time (--eval_steps)",
    )


def _no_variety(past: Past) -> Cause | None:
    alike = _mean(past, "completions/repeated")
    silent = _mean(past, "frac_reward_zero_std")
    entropy = past.first("entropy")
    temperature = past.args.get("temperature")
    flags = []
    if isinstance(temperature, int | float) and temperature < 0.7:
        flags.append("temperature")
    if past.args.get("top_k") not in (None, -1, 0):
        flags.append("top_k")
    if isinstance(past.args.get("top_p"), int | float) and past.args["top_p"] < 0.9:
        flags.append("top_p")
    given = ", ".join(f"--{name} {past.args[name]}" for name in flags)
    cold = bool(flags) and bool(entropy) and fmean(entropy) < COLD_ENTROPY
    earns = bool(_mean(past, f"{past.right}/mean"))  # more variety of wrong answers would not help
    least = ALIKE if earns else MOSTLY_ALIKE
    same = alike is not None and alike >= least and silent is not None and silent >= COLD_SILENT
    same = same and past.compares_groups
    if not (cold or same) or not _answers_differ_little(past, flags):
        return None
    parts = []
    if alike is not None:
        parts.append(f"{alike:.0%} of the completions equal another of their prompt")
    if silent is not None:
        parts.append(f"{silent:.0%} of the groups have equal rewards")
    if entropy:
        parts.append(f"entropy is {fmean(entropy):.2g} nats per token in the first rounds")
    return Cause(
        "no variety",
        ", ".join(parts) + (f" ({given})" if given else ""),
        "--temperature 1, --top_p 1, no --top_k; more entropy (--entropy_coef); other prompts",
    )


def _answers_differ_little(past: Past, flags: Sequence[str]) -> bool:
    """Short answers repeat each other without harm: then length or flags must speak for the sampling."""
    lengths = past.values("completions/mean_length", 0)
    return bool(flags) or not lengths or fmean(lengths) > 8


def _sampling_differs(past: Past) -> Cause | None:
    mass = past.first("rollout/kept_mass", STILL_ROUNDS)
    if mass and fmean(mass) < CUT_MASS:
        given = [
            f"--{name} {past.args[name]}"
            for name in ("top_p", "top_k", "min_p")
            if past.args.get(name)
        ]
        return Cause(
            "sampling differs from training",
            f"sampling leaves {fmean(mass):.0%} of the policy's probability ({', '.join(given)}): what is trained is not "
            "what is sampled",
            "--top_p 1, no --top_k, no --min_p",
        )
    staleness = _mean(past, "rollout/staleness/mean")
    if staleness is not None and staleness >= 4:
        return Cause(
            "sampling differs from training",
            f"completions were written by weights {staleness:.1f} updates old on average",
            "less --max_staleness; --rollout_importance_sampling_mode token_truncate",
        )
    versions = [value for _, value in past.of_rounds("rollout/weight_version")]
    steady = sum(after == before for before, after in pairwise(versions))
    if len(versions) >= STILL_ROUNDS and steady > len(versions) / 2:
        return Cause(
            "sampling differs from training",
            f"{steady} of {len(versions)} rounds were written by the same weights as the round before",
            "look at the server's log: weights do not arrive",
        )
    return None


def _answers_first(past: Past) -> Cause | None:
    """Nothing is earned, whatever keeps it from that, and the rows have answers to learn from."""
    return _task_never_done(past) if past.rounds >= 3 and past.answers_first else None


def _no_signal(past: Past) -> Cause | None:
    """A few groups with a signal are hardly better than none."""
    silent = _mean(past, "frac_reward_zero_std")
    if silent is None or silent < SILENT or past.rounds < 4 or not past.compares_groups:
        return None
    groups = past.prompts
    left = f", which leaves {(1 - silent) * groups:.1f} of {groups} per round" if groups else ""
    mean = _mean(past, f"{past.right}/mean")
    level = "" if mean is None else f"; reward {past.right.removeprefix('rewards/')} is {mean:.2g}"
    harder = mean is not None and mean > 0.5
    return Cause(
        "no signal",
        f"{silent:.0%} of the groups have equal rewards{left}{level}",
        "harder prompts, --dynamic_sample true"
        if harder
        else f"{past.answers_first}easier prompts, a solved example in the prompt, more --num_generations, "
        f"--dynamic_sample true; {WARM_START}",
    )


def _policy_does_not_move(past: Past) -> Cause | None:
    moved = [value for _, value in past.of_rounds("policy/moved")]
    if past.rounds < STILL_ROUNDS or not moved:
        return None
    rate = _latest(past, "learning_rate") or 0.0
    told = float(past.args.get("learning_rate") or 0.0)
    norms = past.values("grad_norm", 0)
    limit = float(past.args.get("max_grad_norm") or 0.0)
    size = _mean(past, "advantages/mean_size")
    pull = _mean(past, "kl/pull")
    still = moved[-1] < STILL
    stands = moved[-1] < GROWTH * moved[0]
    evidence = f"log-probs of the first round's tokens have changed by {moved[-1]:.2g} nats since the start"
    if pull is not None and size and pull / size >= PULL and (still or stands):
        return Cause(
            "policy does not move",
            f"{evidence}, by {moved[0]:.2g} after the first round; the KL weight is too high: it pulls a token back with "
            f"{pull / size:.0%} of the force of its advantage (--beta {past.args.get('beta')})",
            "--beta 0 or 0.001",
        )
    if not still:
        return None
    teaching = 1 - (_mean(past, "frac_reward_zero_std") or 0.0)
    if past.compares_groups and teaching <= NO_TEACHING:
        return None  # there is nothing that would move it
    if norms and not any(norms):
        return Cause(
            "policy does not move",
            f"{evidence}; gradient cut: its norm is 0 in every step, though {teaching:.0%} of the groups have a signal",
            "look for what leaves no token: --overlong_filter, --off_policy_sequence_mask_delta, "
            "--rollout_importance_sampling_mode, --top_entropy_quantile",
        )
    if norms and limit and limit < CLIPPED * fmean(norms):
        return Cause(
            "policy does not move",
            f"{evidence}; gradient cut: a norm of {fmean(norms):.2g} is clipped to {limit:.2g} (--max_grad_norm)",
            "--max_grad_norm 1",
        )
    warms = f", which has not reached --learning_rate {told:.2g} yet" if rate < 0.3 * told else ""
    factor = min(1000.0, LOW_MOVE * len(moved) / moved[-1]) if moved[-1] else 1000.0
    return Cause(
        "policy does not move",
        f"{evidence}; learning rate too low: {rate:.2g}{warms}",
        f"--learning_rate {max(rate, told) * factor:.1g}; swift replay tries it on the recorded tokens",
    )


def _updates_too_large(past: Past) -> Cause | None:
    moved = [value for _, value in past.of_rounds("policy/moved")]
    if not moved:
        return None
    rate = float(past.args.get("learning_rate") or 0.0)
    entropy = past.change("entropy", min(WILD_ROUNDS, max(1, past.rounds // 3)))
    wild = entropy is not None and fmean(entropy.late) > WILD_ENTROPY * fmean(entropy.early)
    leap = moved[0]
    if leap < LEAP and moved[-1] < FAR and not (wild and moved[-1] > LEAP):
        return None
    factor = max(3.0, moved[-1] / max(1, past.rounds) / LOW_MOVE)
    evidence = (
        f"log-probs of the first round's tokens changed by {leap:.2g} nats in one round, by {moved[-1]:.2g} since the "
        "start"
    )
    if wild and entropy is not None:
        evidence += f"; entropy rose from {fmean(entropy.early):.2g} to {fmean(entropy.late):.2g} nats per token"
    lower = float(f"{rate / factor:.1g}")
    decay = float(past.args.get("weight_decay") or 0.0)
    advice = f"--learning_rate {lower:g}, fewer --num_iterations, --max_grad_norm 0.2"
    if decay > 1:
        advice = f"--weight_decay 0 ({decay:g} now), {advice}"
    return Cause("updates too large", evidence, advice)


def _task_never_done(past: Past) -> Cause | None:
    """Completions that are never right, while other rewards rise."""
    values = past.values(f"{past.right}/mean", 0)
    if not values or not 0 <= fmean(values) <= NEVER:
        return None
    return Cause(
        "no signal",
        f"reward {past.right.removeprefix('rewards/')} is {fmean(values):.2g} on average"
        + ": only other rewards can rise" * (len(past.rewards) > 1),
        f"{past.answers_first}easier prompts, a solved example in the prompt, more --num_generations; {WARM_START}",
    )


def _beside_the_task(past: Past, trend: Trend, others: Sequence[Trend]) -> Cause | None:
    """What is trained rises, and what it is to raise falls, or surely gains less than half of that."""
    for other in others:
        gains = (
            other.low > 0 or other.high > trend.change / 2 or other.kind in ("solved", "too early")
        )
        if trend.kind in ("rises", "solved") and trend.change > 0 and not gains:
            return Cause(
                "beside the task",
                f"{other.text}, while {trend.text}",
                "a smaller weight for the other rewards (--reward_weights), or give them only where the answer is right; "
                "read the completions with the highest reward; take the checkpoint of the best evaluation",
            )
    return None


def _too_few_completions(past: Past, trend: Trend) -> Cause | None:
    if trend.more_rounds is None:
        return None
    count = past.plan.get("completions_per_round")
    each = f" of {count} completions" if isinstance(count, int) else ""
    half = (trend.high - trend.low) / 2
    return Cause(
        "too few completions",
        f"the change is known to within {half:.2g}; {trend.more_rounds} more rounds{each} would tell a rise of "
        f"{trend.told:.2g}",
        "more rounds, or more prompts per round (--gradient_accumulation_steps)",
        fault=False,
    )
