"""What other flags would have changed in the first rounds of a run: two replays of its tokens, with the run's flags and
with the others, beside each other; and the command of a new run, which alone can show what they earn."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_r1.flags.fields import as_words, spellings
from swift_r1.flags.parser import is_flag, spelling
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.lab.diagnosis.past import Past

SAME = 0.02  # a smaller share of a value, or of the larger one, is no change worth a word
FAR = 0.1  # effective share of the completions below which they say little of the policy
_METRICS = {
    "policy/moved": "change of a token's log-prob since the start, nats",
    "rollout/k3_kl": "KL of the recorded policy to this one, nats per token",
    "rollout/ratio_mean": "p(policy) / p(recorded) of a token, mean",
    "ratio": "p(policy) / p(policy before the round), mean",
    "rollout/ess_seq": "effective share of the completions",
    "grad_norm": "norm of the gradient",
    "entropy": "nats per token",
}
# what the advice against a cause is to raise, or to lower
_MEANT = {
    "policy does not move": ("policy/moved", True),
    "updates too large": ("policy/moved", False),
    "entropy collapse": ("entropy", True),
    "repetition": ("entropy", True),
}


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """A metric by round, with the run's flags and with others; NaN where a round has none."""

    name: str
    meaning: str
    before: Sequence[float]
    after: Sequence[float]

    @property
    def ends(self) -> tuple[float, float] | None:
        """Returns both values of the last round that has both; None where there is none."""
        known = [
            pair
            for pair in zip(self.before, self.after, strict=True)
            if not math.isnan(pair[0] + pair[1])
        ]
        return known[-1] if known else None

    @property
    def change(self) -> int:
        """Returns 1 where the other flags end higher, -1 where they end lower, 0 where that is not worth a word."""
        if self.ends is None:
            return 0
        before, after = self.ends
        if abs(after - before) <= SAME * max(abs(before), abs(after)):
            return 0
        return 1 if after > before else -1


def compared(before: Past, after: Past, begin: int, rounds: int) -> list[ComparedMetric]:
    """Returns the metrics that both replays have, of the rounds after step `begin`."""
    found = []
    for name, meaning in _METRICS.items():
        sides = [_by_round(past, name, begin, rounds) for past in (before, after)]
        if not any(all(map(math.isnan, values)) for values in sides):
            found.append(ComparedMetric(name, meaning, *sides))
    return found


def _by_round(past: Past, name: str, begin: int, rounds: int) -> list[float]:
    values = {math.ceil((step - begin) / past.round): value for step, value in past.of_rounds(name)}
    return [values.get(number, math.nan) for number in range(1, rounds + 1)]


def told(found: Sequence[ComparedMetric], rounds: int, cause: str | None) -> Iterator[str]:
    """Yields what a comparison shows, and what it cannot, in words; `cause` is what the flags are to help against."""
    by_name = {one.name: one for one in found}
    if all(_equal(one) for one in found):
        yield (
            f"in {rounds} rounds the flags change nothing at all: what they act on did not occur, or the learning rate "
            "was still 0"
        )
        return
    moved = by_name.get("policy/moved")
    if moved is not None and moved.ends is not None:
        was, became = moved.ends
        times = f", {became / was:.2g} times as far" if was else ""
        yield f"the policy moves by {became:.2g} nats per token instead of {was:.2g}{times}"
    for name, what in (("entropy", "entropy is"), ("grad_norm", "the gradient's norm is")):
        if name in by_name and by_name[name].change:
            was, became = by_name[name].ends or (math.nan, math.nan)
            yield f"{what} {became:.3g} instead of {was:.3g}"
    share = by_name.get("rollout/ess_seq")
    if share is not None and share.ends is not None:
        was, became = share.ends
        far = (
            f": under {FAR:.0%}, the later of these rounds say little of it" if became < FAR else ""
        )
        yield (
            f"{became:.0%} of the recorded completions count for the policy in the last round, {was:.0%} with the run's "
            f"flags{far}"
        )
    meant = by_name.get(_MEANT[cause][0]) if cause in _MEANT else None
    if cause is not None and meant is not None:
        wanted = 1 if _MEANT[cause][1] else -1
        direction = "higher" if wanted > 0 else "lower"
        says = {wanted: "it is", 0: "it hardly changes", -wanted: "it is not"}[meant.change]
        yield f"against {cause!r} {meant.name} was to be {direction}: {says}"


def _equal(one: ComparedMetric) -> bool:
    return all(
        was == became or math.isnan(was + became)
        for was, became in zip(one.before, one.after, strict=True)
    )


def new_command(content: Mapping[str, Any], flags: Mapping[str, Any], processes: int) -> str:
    """Returns the command of a new run: the one in the content of an args.json, with these flags in the place of its
    own; from the beginning, and in a folder of its own."""
    args = content["args"]
    start, command, *words = content["command"]
    new = dict(flags)
    if not args["add_version"]:
        new.setdefault("output_dir", f"{args['output_dir']}-tried")
    known = spellings(RlhfArguments)
    replaced = {*new, "resume_from_checkpoint", "resume_only_model", "resume_force"}
    kept: list[str] = []
    skips = False
    for word in words:
        if is_flag(word):
            spec = known.get(spelling(word.partition("=")[0]))
            skips = spec is not None and spec.name in replaced
        if not skips:
            kept.append(word)
    told_in_words = any(spelling(word.partition("=")[0]) == "nproc_per_node" for word in kept)
    before = f"NPROC_PER_NODE={processes} " if processes > 1 and not told_in_words else ""
    return before + shlex.join([start, command, *kept, *as_words(new)])
