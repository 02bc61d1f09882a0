"""How a run went: what `summary.json` says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Outcome:
    """`seconds` are those of the whole loop, evaluations included; `eval_before` and `eval_after` are accuracies
    from 0 to 1 (of several data sets, their mean), None where there was no such evaluation. `best_step` is that of the
    best checkpoint by `--metric_for_best_model`, `best_metric` its value. `last_evaluation` has all figures of the last
    one."""

    steps: int = 0
    seconds: float = 0.0
    first_reward: float | None = None
    last_reward: float | None = None
    eval_before: float | None = None
    eval_after: float | None = None
    best_step: int | None = None
    best_metric: float | None = None
    exit_code: int = 0
    last_evaluation: dict[str, float] = field(default_factory=dict)

    def saw_reward(self, reward: float) -> None:
        if not math.isnan(reward):
            self.first_reward = reward if self.first_reward is None else self.first_reward
            self.last_reward = reward

    def saw_evaluation(self, metrics: Mapping[str, float]) -> None:
        values = [value for name, value in metrics.items() if name.endswith("/accuracy")]
        accuracy = sum(values) / len(values)
        self.last_evaluation = {name: value for name, value in metrics.items() if not math.isnan(value)}
        if self.steps == 0:
            self.eval_before = accuracy
        else:
            self.eval_after = accuracy

    def saw_checkpoint(self, metrics: Mapping[str, float], name: str, greater_is_better: bool) -> None:
        """Whether the checkpoint of this step, which was evaluated, is the best so far; of equals the first is."""
        values = [value for key, value in metrics.items() if key.endswith(f"/{name}")]
        if not values:
            return
        value = sum(values) / len(values)
        if math.isnan(value):
            return
        best = self.best_metric
        if best is None or (value > best if greater_is_better else value < best):
            self.best_step, self.best_metric = self.steps, value

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
