"""The verdict on a run: whether its reward rises, by how much, and if not, why not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swift_r1.lab.diagnosis.causes import Cause, Signs, causes_of
from swift_r1.lab.diagnosis.past import Past
from swift_r1.lab.diagnosis.trend import Trend, evaluation_trends, movement_of, trend_of


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said of a run first. `functions` are its reward functions, where there are several; `causes` are in
    the order in which one brings about the next."""

    reward: Trend
    functions: Sequence[Trend]
    evaluations: Sequence[Trend]
    causes: Sequence[Cause]

    @property
    def is_good(self) -> bool:
        """Returns whether nothing needs to be done yet."""
        return self.reward.kind != "falls" and not any(cause.fault for cause in self.causes)

    @property
    def trends(self) -> list[Trend]:
        """Returns what has a trend beside the reward."""
        return [*self.functions, *self.evaluations]

    @property
    def line(self) -> str:
        """Returns the verdict in a line, with the first cause."""
        return "; ".join([self.reward.text, *(f"because: {one.line}" for one in self.causes[:1])])

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"text": self.reward.text}


_OF_PAIRS = {"rewards/accuracies": "pairs right", "rewards/margins": "margin"}
NO_VERDICT = "no verdict: it takes the rewards of two rounds"


def headline(verdict: Verdict | None, past: Past) -> str:
    """Returns the verdict on a run with this past in a sentence; of a run without rewards, how well it says, or tells
    apart, the answers that it learns from; of a replay, how far the policy has moved."""
    if verdict is not None:
        return verdict.reward.text
    log = past.log
    if past.replays:
        return movement_of(past)
    if log.get("rewards/accuracies"):
        does, shown = "compares answers", {"loss": "loss"} | _OF_PAIRS
        held_out = _OF_PAIRS
    elif log.get("token_accuracy"):
        does, shown = "learns answers", {"loss": "loss", "token_accuracy": "token accuracy"}
        held_out = {"perplexity": "perplexity"}
    else:
        return NO_VERDICT
    for benchmark in log.benchmarks():
        for metric, name in held_out.items():
            shown[f"eval/{benchmark}/{metric}"] = f"held-out {name} on {benchmark}"
    found = {name: [one for one in log.get(name).values if math.isfinite(one)] for name in shown}
    parts = [f"{shown[name]} {own[0]:.4g} to {own[-1]:.4g}" for name, own in found.items() if own]
    return f"{does}: {', '.join(parts)}"


def brief(verdict: Verdict | None, past: Past) -> str:
    """Returns the verdict in two words: "rises +0.14", "flat", "falls -0.2", "solved", "too early", "no verdict"; of a
    replay "moved 0.05"."""
    if verdict is None:
        moved = past.values("policy/moved", 0)[-1:] if past.replays else []
        return f"moved {moved[0]:.2g}" if moved else "no verdict"
    kind = verdict.reward.kind
    return f"{kind} {verdict.reward.change:+.2g}" if kind in ("rises", "falls") else kind


def headed(verdict: Verdict | None, past: Past) -> str:
    """Returns the verdict in two words behind what it is on."""
    return f"{'policy' if past.replays else 'reward'}: {brief(verdict, past)}"


def verdict_of(past: Past, signs: Signs) -> Verdict | None:
    """Returns the verdict on a run as far as it has come, given the signs that were found; None before its second
    round."""
    reward = trend_of(past, "reward")
    if reward is None:
        return None
    functions = []
    others = evaluations = evaluation_trends(past)
    if len(past.rewards) > 1:
        found = [trend_of(past, name) for name in past.rewards]
        functions = [trend for trend in found if trend is not None]
        by_name = dict(zip(past.rewards, found, strict=True))
        right = by_name.get(past.right)
        # what is only watched may be anything, but is not to fall
        fallen = [by_name[name] for name in past.watched if name in by_name]
        others = [
            *([right] if right is not None else []),
            *(trend for trend in fallen if trend is not None and trend.kind == "falls"),
            *evaluations,
        ]
    return Verdict(reward, functions, evaluations, causes_of(past, reward, others, signs))
