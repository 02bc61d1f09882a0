"""From completions to rewards: what the reward functions see, and what the loop and the logs get back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from swift_r1.data.types import Prompt
from swift_r1.rewards.combine import Composition
from swift_r1.rewards.types import InvalidReward, RewardBatch, RewardColumn
from swift_r1.rollout.protocol import Completion, RolloutOutput
from swift_r1.training.multi_turn import Trajectory


class Scores(NamedTuple):
    """A scored round: its completions, each function's answers, and what the functions were given."""

    completions: list[ScoredCompletion]
    columns: list[RewardColumn]
    batch: RewardBatch


@dataclass(slots=True)
class ScoredRound:
    """All completions that were generated for a round.

    Attributes:
        trained: whole groups, one after another.
        dropped: of groups without signal that others took the place of (`--dynamic_sample`).
        parts: each generation call's scores; together they hold the same completions.
        without_signal: groups among the trained ones that teach nothing, where that was counted.
    """

    trained: list[ScoredCompletion]
    dropped: list[ScoredCompletion]
    parts: list[Scores]
    without_signal: int

    def replace_groups(self, places: Sequence[int], fresh: Scores, size: int) -> None:
        """Puts the groups of `fresh` (of `size` completions each) where the groups at `places` are."""
        self.parts.append(fresh)
        for number, place in enumerate(places):
            group = slice(place * size, (place + 1) * size)
            self.dropped += self.trained[group]
            self.trained[group] = fresh.completions[number * size : (number + 1) * size]


Scorer = Callable[[RewardBatch], Sequence[RewardColumn]]


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """One completion with its prompt, text and rewards.

    Attributes:
        group: number of its prompt within the round; those of resampled prompts follow the first ones.
        rewards: each function's value by name; None for no opinion, NaN where invalid.
        reward: their weighted sum; NaN where no advantage can be computed from it.
        objective: what the advantage is computed from; the reward but for `normalize_then_sum`.
    """

    request_id: str
    group: int
    prompt: Prompt
    completion: Completion
    text: str
    rewards: Mapping[str, float | None]
    reward: float
    objective: float


def score(
    prompts: Sequence[Prompt],
    outputs: Sequence[RolloutOutput],
    decode: Callable[[Sequence[int]], str],
    scorer: Scorer,
    compose: Composition,
    trainer_state: Mapping[str, int],
    first_group: int = 0,
) -> Scores:
    """Scores all given completions in one call a function; groups stay together and in order, and are numbered from
    `first_group`."""
    pairs = [
        (group, completion.prompt if isinstance(completion, Trajectory) else prompt, output.request_id, completion)
        for group, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=first_group)
        for completion in output.completions
    ]
    texts = [
        completion.text if isinstance(completion, Trajectory) else decode(completion.token_ids)
        for *_, completion in pairs
    ]
    columns = {name: [prompt.columns.get(name) for _, prompt, *_ in pairs] for name in _column_names(prompts)}
    columns |= {
        "messages": [
            completion.messages
            if isinstance(completion, Trajectory)
            else [*map(dict, prompt.messages), {"role": "assistant", "content": text}]
            for (_, prompt, _, completion), text in zip(pairs, texts, strict=True)
        ],
        "prompt_id": [prompt.prompt_id for _, prompt, *_ in pairs],
        "request_id": [request_id for _, _, request_id, _ in pairs],
        "dataset": [prompt.dataset for _, prompt, *_ in pairs],
        "finish_reason": [completion.finish_reason for *_, completion in pairs],
        "is_truncated": [completion.finish_reason == "length" for *_, completion in pairs],
        "response_token_ids": [_written_ids(completion) for *_, completion in pairs],
    }
    if all(isinstance(completion, Trajectory) for *_, completion in pairs):
        columns["rollout_infos"] = [completion.infos for *_, completion in pairs]
    batch = RewardBatch(texts, columns, len(outputs[0].completions), trainer_state)
    results = list(scorer(batch))
    totals = compose(results, columns["is_truncated"], batch.group_size)
    scored = [
        ScoredCompletion(
            request_id,
            group,
            prompt,
            completion,
            text,
            {column.name: column.values[i] for column in results},
            totals.rewards[i],
            totals.objectives[i],
        )
        for i, ((group, prompt, request_id, completion), text) in enumerate(zip(pairs, texts, strict=True))
    ]
    return Scores(scored, results, batch)


def reward_metrics(scored: Sequence[ScoredCompletion], columns: Sequence[RewardColumn]) -> dict[str, float]:
    """`reward`, `reward_std` (mean of the groups' standard deviations), `frac_reward_zero_std`,
    `frac_groups_all_invalid` (groups without one usable reward, which teach nothing), and each function's mean, std,
    invalid share (in all and by kind) and seconds under `rewards/<name>/`."""
    groups: dict[int, list[float]] = {}
    for item in scored:
        groups.setdefault(item.group, [])
        if not math.isnan(item.reward):
            groups[item.group].append(item.reward)
    stds = [_std(values) for values in groups.values()]
    metrics = {
        "reward": _mean([value for values in groups.values() for value in values]),
        "reward_std": _mean(stds),
        "frac_reward_zero_std": _mean([float(std == 0.0) for std in stds]),
        "frac_groups_all_invalid": _mean([float(not values) for values in groups.values()]),
    }
    for column in columns:
        known = [value for value in column.values if value is not None and not math.isnan(value)]
        metrics[f"rewards/{column.name}/mean"] = _mean(known)
        metrics[f"rewards/{column.name}/std"] = _std(known)
        metrics[f"rewards/{column.name}/invalid"] = len(column.invalid) / len(column.values)
        for kind, count in Counter(bad.kind for bad in column.invalid).items():
            metrics[f"rewards/{column.name}/invalid/{kind}"] = count / len(column.values)
        metrics[f"rewards/{column.name}/seconds"] = column.seconds
    return metrics


def _written_ids(completion: Completion) -> list[Any]:
    """The tokens that the policy wrote; of several turns a list each."""
    if isinstance(completion, Trajectory):
        return list(map(list, completion.turn_token_ids))
    return list(completion.token_ids)


def loss_mask(completion: Completion) -> Sequence[bool]:
    """One a token, True where the policy wrote it and it is to be trained."""
    return completion.loss_mask if isinstance(completion, Trajectory) else (True,) * len(completion.token_ids)


def completion_metrics(scored: Sequence[ScoredCompletion]) -> dict[str, float]:
    """Lengths in tokens and the share that was cut off; of several turns also their number, and the share of the tokens
    that is trained."""
    lengths = [len(item.completion.token_ids) for item in scored]
    turns = [item.completion.turns for item in scored if isinstance(item.completion, Trajectory)]
    several = {}
    if turns:
        several = {
            "multi_turn/mean_turns": _mean(turns),
            "multi_turn/max_turns": float(max(turns)),
            "multi_turn/trained_tokens": sum(sum(loss_mask(item.completion)) for item in scored) / sum(lengths),
        }
    return several | {
        "completions/mean_length": _mean(lengths),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": _mean([float(item.completion.finish_reason == "length") for item in scored]),
    }


def pooled_columns(parts: Sequence[Scores]) -> list[RewardColumn]:
    """Each function's answers of several calls as if they had been one."""
    pooled = []
    for answers in zip(*(part.columns for part in parts), strict=True):
        values: list[float | None] = []
        invalid: list[InvalidReward] = []
        for column in answers:
            invalid += [replace(item, index=len(values) + item.index) for item in column.invalid]
            values += column.values
        seconds = sum(column.seconds for column in answers)
        pooled.append(RewardColumn(answers[0].name, tuple(values), tuple(invalid), seconds))
    return pooled


def completion_row(item: ScoredCompletion, step: int, advantage: float | None, dropped: bool = False) -> dict[str, Any]:
    """The line of `completions.jsonl`; one that was generated but not trained on says `"dropped": true`."""
    played = item.completion
    return {
        "step": step,
        "prompt_id": item.prompt.prompt_id,
        "request_id": item.request_id,
        "group": item.group,
        "prompt": item.prompt.text,
        "completion": item.text,
        **{f"rewards/{name}": value for name, value in item.rewards.items()},
        "reward": item.reward,
        "advantage": advantage,
        "finish_reason": item.completion.finish_reason,
        "weight_version": item.completion.weight_version,
        **({"turns": played.turns, "messages": played.messages} if isinstance(played, Trajectory) else {}),
        **({"dropped": True} if dropped else {}),
        **item.prompt.columns,
    }


def _column_names(prompts: Sequence[Prompt]) -> list[str]:
    return sorted({name for prompt in prompts for name in prompt.columns})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for fewer than two values or equal ones."""
    if len(values) < 2 or min(values) == max(values):
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
