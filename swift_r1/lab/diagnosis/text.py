"""Signs in what the policy writes, and in what it is asked."""

from __future__ import annotations

from statistics import fmean

from swift_r1.lab.diagnosis.past import Past, Sign, detector

REPEATED = 0.5  # share of n-grams that came before in their completion
# share of letters of scripts that prompts lack, and more of it than at first
FOREIGN = 0.2
FOREIGN_MORE = 0.1
# share of completions that are cut off; tokens of a completion that says nothing
NEVER_ENDS = 0.95
EMPTY = 2.0
NO_FORMAT = 0.05  # reward for the format
LONGER = 2.0
TRUNCATED = 0.3
TRUNCATED_MORE = 0.2
MOSTLY_TRUNCATED = 0.5


@detector("repetition", 3, "completions/repetition")
def repetition(past: Past, rounds: int) -> Sign | None:
    """Loops: most of what is written was there before."""
    late = past.last("completions/repetition", rounds)
    if not late or min(late) < REPEATED:
        return None
    return Sign(
        f"{fmean(late):.0%} of what a completion says it has said before (n-grams of 8 tokens)",
        "read the longest completions; a reward that repeating earns must not pay for it (--reward_funcs repetition), "
        "a lower --learning_rate, a higher --beta",
    )


@detector("language broken", 3, "completions/foreign_letters")
def language_broken(past: Past, rounds: int) -> Sign | None:
    """Letters of another script than the prompts have."""
    change = past.change("completions/foreign_letters", rounds)
    if change is None or min(change.late) < max(FOREIGN, FOREIGN_MORE + fmean(change.early)):
        return None
    return Sign(
        f"{fmean(change.late):.0%} of the letters are of scripts that the prompts lack, at first "
        f"{fmean(change.early):.0%}",
        "a reward for the language, a higher --beta, a lower --learning_rate; read the completions for what pays",
    )


@detector("template broken", 5, "completions/clipped_ratio", "rewards/*format*/mean")
def template_broken(past: Past, rounds: int) -> Sign | None:
    """From the first round on completions never end, say nothing, or never have the format."""
    advice = "look at a prompt as the model sees it (swift check): --model's chat template, --system, --prompt_template, "
    if past.rounds < rounds:
        return None
    cut = past.first("completions/clipped_ratio", rounds)
    length = past.first("completions/mean_length", rounds)
    if cut and min(cut) >= NEVER_ENDS:
        return Sign(
            f"{fmean(cut):.0%} of the completions of the first rounds were cut off: they do not end by themselves",
            advice + "--stop_words; or a longer --max_completion_length",
        )
    if length and max(length) <= EMPTY:
        return Sign(
            f"completions of the first rounds had {fmean(length):.1f} tokens",
            advice + "--response_prefix",
        )
    for name in (one for one in past.rewards if "format" in one.lower()):
        formatted = past.last(f"{name}/mean", rounds)
        if (
            formatted
            and max(formatted) <= NO_FORMAT
            and max(past.first(f"{name}/mean"), default=0.0) <= NO_FORMAT
        ):
            return Sign(
                f"reward {name.removeprefix('rewards/')} was {fmean(formatted):.2g} on average: the model never "
                "produces the expected format",
                advice + "--response_prefix, a solved example in the prompt",
            )
    return None


@detector("length explosion", 5, "completions/mean_length", under=("repetition", "template broken"))
def length_explosion(past: Past, rounds: int) -> Sign | None:
    """Sees completions that get longer and longer, and no better: where length helps, the first reward rises with
    it."""
    length = past.change("completions/mean_length", rounds)
    right = past.change(f"{past.right}/mean", rounds)
    if (
        length is None
        or min(length.late) < LONGER * fmean(length.early)
        or right is None
        or right.gain > 0
    ):
        return None
    return Sign(
        f"completions have {fmean(length.late):.0f} tokens, at first {fmean(length.early):.0f}, and reward "
        f"{past.right.removeprefix('rewards/')} did not rise: {fmean(right.early):.3g} to {fmean(right.late):.3g}",
        "--loss_type dr_grpo or dapo, --reward_funcs soft_overlong in addition; look whether a reward pays for length",
    )


@detector(
    "truncation",
    5,
    "completions/clipped_ratio",
    under=("repetition", "template broken", "length explosion"),
)
def truncation_growing(past: Past, rounds: int) -> Sign | None:
    """Sees that more and more completions are cut off, or most are."""
    change = past.change("completions/clipped_ratio", rounds)
    if change is None:
        return None
    least = min(change.late)
    if least < MOSTLY_TRUNCATED and least < max(TRUNCATED, TRUNCATED_MORE + fmean(change.early)):
        return None
    longest = past.args.get("max_completion_length", "")
    return Sign(
        f"{fmean(change.late):.0%} of the completions were cut off, at first {fmean(change.early):.0%}",
        f"a longer --max_completion_length ({longest} now), --overlong_filter true, --reward_funcs soft_overlong",
    )


@detector("data repeated", 16, "prompts/repeated")
def data_repeated(past: Past, rounds: int) -> Sign | None:
    """Sees the same prompts in one round: of `n` prompts drawn from `d` different ones about n (n - 1) / 2 d are
    repeated, so that `d` is known long before all data were seen."""
    shares = past.last("prompts/repeated", rounds)
    asked = past.prompts
    size = past.plan.get("prompts_per_epoch")
    if (
        not shares
        or asked is None
        or past.args.get("use_gym_env")
        or sum(map(bool, shares)) < min(3, len(shares))
    ):
        return None
    different = (asked - 1) / (2 * fmean(shares))
    seen = past.rounds * asked
    known = min(size, seen) if isinstance(size, int) else seen
    if different > known / 2:
        return None
    return Sign(
        f"{fmean(shares):.2%} of the prompts of a round came in it before: there are about {different:.0f} different "
        f"ones, where {known:,} were expected",
        "look for the same rows in --dataset more than once; a #N larger than the data repeats them",
    )
