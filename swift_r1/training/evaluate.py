"""Held-out evaluation during training: the same engine, the same rewards, other prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swift_r1.data.types import Prompt
from swift_r1.rewards.combine import Composition
from swift_r1.rollout.protocol import RolloutRequest, SamplingParams
from swift_r1.rollout.seeds import completion_seed
from swift_r1.training.multi_turn import Turns
from swift_r1.training.rollouts import OnDone, ignore_output
from swift_r1.training.scoring import (
    OpenRewards,
    ScoredCompletion,
    Scoring,
    completion_metrics,
    completion_row,
    reward_metrics,
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`metrics` under `eval/<dataset>/`, and one row a completion for `eval_completions.jsonl`."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]


class Judge(Protocol):
    """What scoring needs; only the main rank has it."""

    @property
    def open_rewards(self) -> OpenRewards: ...

    @property
    def decode(self) -> Callable[[Sequence[int]], str]: ...


@dataclass(frozen=True)
class Evaluator:
    """Evaluates on `prompts` (empty on all but the main rank).

    Attributes:
        num_prompts: their number, known to every rank.
        num_generations: completions a prompt.
        chunk: prompts that are generated at once.
    """

    prompts: Sequence[Prompt]
    num_prompts: int
    num_generations: int
    chunk: int
    sampling: SamplingParams
    run_id: str
    seed: int

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.num_generations

    def run(
        self,
        turns: Turns,
        main: Judge | None,
        weights: Sequence[float],
        step: int,
        max_steps: int,
        on_done: OnDone,
    ) -> Evaluation | None:
        """Collective; the result is on the main rank. The seeds do not depend on the step, so that two
        evaluations differ by their weights alone."""
        scoring, requests = None, None
        if main:
            requests = [self._request(prompt, step) for prompt in self.prompts]
            state = {"global_step": step, "max_steps": max_steps}
            scoring = Scoring(
                self.prompts,
                [request.request_id for request in requests],
                main.decode,
                main.open_rewards,
                Composition(tuple(weights)),
                state,
            )
        on_output = scoring.add if scoring else ignore_output
        for start in range(0, self.num_prompts, self.chunk):
            part = slice(start, start + self.chunk)
            turns.generate(self.prompts[part], requests[part] if requests else None, on_done, on_output)
        if scoring is None:
            return None
        scored, columns, _batch = scoring.result()
        metrics: dict[str, float] = {}
        for dataset in sorted({item.prompt.dataset for item in scored}):
            chosen = [number for number, item in enumerate(scored) if item.prompt.dataset == dataset]
            part = [scored[number] for number in chosen]
            values = (
                {"reward": reward_metrics(part, [])["reward"]} | completion_metrics(part) | {"accuracy": accuracy(part)}
            )
            for column in columns:
                values[f"rewards/{column.name}/mean"] = _mean_of_known([column.values[n] for n in chosen])
            values["completions"] = float(len(part))
            values["prompts"] = float(len({item.prompt.prompt_id for item in part}))
            metrics |= {f"eval/{dataset}/{name}": value for name, value in values.items()}
        return Evaluation(metrics, [completion_row(item, step, None) for item in scored])

    def _request(self, prompt: Prompt, step: int) -> RolloutRequest:
        return RolloutRequest(
            request_id=f"{self.run_id}/eval/{step}/{prompt.prompt_id}",
            prompt_token_ids=prompt.token_ids,
            n=self.num_generations,
            seeds=tuple(
                completion_seed(self.seed, "eval", prompt.prompt_id, index) for index in range(self.num_generations)
            ),
            sampling=self.sampling,
        )


def accuracy(scored: Sequence[ScoredCompletion]) -> float:
    """Share of completions to which the first reward function gives 1 or more."""
    first = [next(iter(item.rewards.values())) for item in scored]
    return sum(value is not None and value >= 1.0 for value in first) / len(first)


def _mean_of_known(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None and value == value]
    return sum(known) / len(known) if known else float("nan")
