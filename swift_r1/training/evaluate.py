"""Evaluation during training: the same engine on the weights of that step, other prompts.

What is evaluated is a list of sets: the held-out prompts of the run, and each of `--eval_datasets`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swift_r1.data.prompts import Prompt
from swift_r1.evaluation.answers import RULES
from swift_r1.evaluation.engines.base import evaluation_seeds
from swift_r1.evaluation.results import Graded, summarize
from swift_r1.rewards.combine import Composition
from swift_r1.rewards.types import RewardColumn
from swift_r1.sampling.base import OnDone, ignore_output
from swift_r1.sampling.multi_turn import Turns
from swift_r1.sampling.scoring import (
    OpenRewards,
    ScoredCompletion,
    Scoring,
    completion_metrics,
    completion_row,
    reward_metrics,
)
from swift_r1.wire.protocol import RolloutRequest, SamplingParams

MEAN = "mean"
"""The name in the metrics of the plain mean over several sets."""
_AVERAGED = ("accuracy", "reward", "completions/mean_length")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`metrics` under `eval/<name>/`, and one row a completion for `eval_completions.jsonl`."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]


class Decoder(Protocol):
    """What of the main rank is needed here."""

    @property
    def decode(self) -> Callable[[Sequence[int]], str]: ...


@dataclass(frozen=True)
class EvalSet:
    """Prompts that are evaluated in the same way.

    Attributes:
        name: in the metrics' names; None for the names of the prompts' own data sets.
        prompts: on the main rank; empty on the others.
        num_prompts: their number, known to every rank.
        num_generations: completions a prompt.
        open_rewards: of the functions that judge it, on the main rank; the first says what is right.
        weights: one a reward function.
    """

    name: str | None
    prompts: Sequence[Prompt]
    num_prompts: int
    num_generations: int
    sampling: SamplingParams
    open_rewards: OpenRewards | None
    weights: tuple[float, ...]

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.num_generations

    def names(self) -> list[str]:
        return [self.name] if self.name is not None else sorted({prompt.dataset for prompt in self.prompts})


@dataclass(frozen=True)
class Evaluator:
    """Evaluates all sets, one after the other.

    Attributes:
        batch_size: completions that are generated at once over all ranks; None leaves that to the engine.
        seed: of the completions.
    """

    sets: Sequence[EvalSet]
    batch_size: int | None
    run_id: str
    seed: int

    @property
    def num_completions(self) -> int:
        return sum(one.num_completions for one in self.sets)

    def run(self, turns: Turns, main: Decoder | None, step: int, max_steps: int, on_done: OnDone) -> Evaluation | None:
        """Collective; the result is on the main rank. The seeds do not depend on the step, so that two evaluations
        differ by their weights alone."""
        metrics: dict[str, float] = {}
        rows: list[dict[str, Any]] = []
        for one in self.sets:
            found = self._run(one, turns, main, step, max_steps, on_done)
            if found is not None:
                metrics |= found.metrics
                rows += found.rows
        return None if main is None else Evaluation(metrics | plain_means(metrics), rows)

    def _run(
        self, one: EvalSet, turns: Turns, main: Decoder | None, step: int, max_steps: int, on_done: OnDone
    ) -> Evaluation | None:
        scoring, requests = None, None
        if main is not None:
            assert one.open_rewards is not None
            requests = [self._request(one, prompt, step) for prompt in one.prompts]
            scoring = Scoring(
                one.prompts,
                [request.request_id for request in requests],
                main.decode,
                one.open_rewards,
                Composition(one.weights),
                {"global_step": step, "max_steps": max_steps},
            )
        on_output = scoring.add if scoring else ignore_output
        at_once = self._prompts_at_once(one)
        for start in range(0, one.num_prompts, at_once):
            part = slice(start, start + at_once)
            turns.generate(one.prompts[part], requests[part] if requests else None, on_done, on_output)
        if scoring is None:
            return None
        scored, columns, _batch = scoring.result()
        metrics: dict[str, float] = {}
        for name in one.names():
            chosen = [n for n, item in enumerate(scored) if one.name is not None or item.prompt.dataset == name]
            values = _metrics([scored[n] for n in chosen], columns, chosen)
            metrics |= {f"eval/{name}/{key}": value for key, value in values.items()}
        more = {} if one.name is None else {"benchmark": one.name}
        return Evaluation(metrics, [more | completion_row(item, step, None) for item in scored])

    def _prompts_at_once(self, one: EvalSet) -> int:
        if self.batch_size is None:
            return one.num_prompts
        return max(1, self.batch_size // one.num_generations)

    def _request(self, one: EvalSet, prompt: Prompt, step: int) -> RolloutRequest:
        return RolloutRequest(
            request_id=f"{self.run_id}/eval/{step}/{prompt.prompt_id}",
            prompt_token_ids=prompt.token_ids,
            n=one.num_generations,
            seeds=evaluation_seeds(self.seed, prompt.prompt_id, one.num_generations),
            sampling=one.sampling,
        )


def plain_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """`eval/mean/...` of several sets: accuracy, reward and length, each set counting alike; nothing for one set."""
    found: dict[str, list[float]] = {}
    for name, value in metrics.items():
        _, _name, key = name.split("/", 2)
        if key in _AVERAGED:
            found.setdefault(key, []).append(value)
    return {f"eval/{MEAN}/{key}": sum(values) / len(values) for key, values in found.items() if len(values) > 1}


def _metrics(
    scored: Sequence[ScoredCompletion], columns: Sequence[RewardColumn], chosen: Sequence[int]
) -> dict[str, float]:
    """The figures of one benchmark: those of the run's steps, and those of `swift eval`."""
    reward = next(iter(scored[0].rewards))
    result = summarize([_graded(item, reward) for item in scored], reward)
    values = {"reward": reward_metrics(scored, [])["reward"]} | completion_metrics(scored)
    values["accuracy"] = result.average.value
    for column in columns:
        values[f"rewards/{column.name}/mean"] = _mean_of_known([column.values[n] for n in chosen])
    values |= result.flat()
    return values | {"completions": float(len(scored)), "prompts": float(result.questions)}


def _graded(item: ScoredCompletion, reward: str) -> Graded:
    """An invalid reward is none: it is not right."""
    value, rule = item.rewards[reward], RULES.get(reward)
    return Graded(
        prompt_id=item.prompt.prompt_id,
        reward=None if value is None or math.isnan(value) else value,
        answer=rule.read(item.text) if rule is not None else None,
        tokens=len(item.completion.token_ids),
        truncated=item.completion.finish_reason == "length",
    )


def _mean_of_known(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None and value == value]
    return sum(known) / len(known) if known else float("nan")
