"""From completions to rewards: what the reward functions see, and what the loop and the logs get back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from swift_r1.data.prompts import Prompt
from swift_r1.rewards.combine import Composition
from swift_r1.rewards.types import InvalidReward, RewardBatch, RewardColumn
from swift_r1.sampling.multi_turn import Trajectory
from swift_r1.wire.protocol import Completion, RolloutOutput


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
        metrics: more to log of the round.
    """

    trained: list[ScoredCompletion]
    dropped: list[ScoredCompletion]
    parts: list[Scores]
    without_signal: int
    metrics: dict[str, float] = field(default_factory=dict)

    def replace_groups(self, places: Sequence[int], fresh: Scores, size: int) -> None:
        """Puts the groups of `fresh` (of `size` completions each) where the groups at `places` are."""
        self.parts.append(fresh)
        for number, place in enumerate(places):
            group = slice(place * size, (place + 1) * size)
            self.dropped += self.trained[group]
            self.trained[group] = fresh.completions[number * size : (number + 1) * size]


class OpenBatch(Protocol):
    """A batch that reward functions score while its groups are added."""

    def add(self, first: int, part: RewardBatch) -> None: ...

    def result(self) -> tuple[RewardBatch, Sequence[RewardColumn]]: ...


OpenRewards = Callable[[Mapping[str, int]], OpenBatch]
"""Opens a batch; takes the trainer state that its rewards are called with."""


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


class Scoring:
    """Gives each prompt's completions to the reward functions as they come, and puts all of it together at the end.

    The result does not depend on the order in which they came.

    Args:
        prompts: those that completions are asked for, in order; they are numbered from `first_group`.
        request_ids: of the prompts; the outputs' tell whose they are.
        decode: token ids to text.
        open_rewards: of the reward functions.
        compose: their values to one reward.
        trainer_state: what the rewards are told of the run.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        request_ids: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        open_rewards: OpenRewards,
        compose: Composition,
        trainer_state: Mapping[str, int],
        first_group: int = 0,
    ) -> None:
        self._prompts, self._decode, self._compose, self._first = prompts, decode, compose, first_group
        self._places = {request_id: place for place, request_id in enumerate(request_ids)}
        if len(self._places) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts have {len(self._places)} different request ids")
        self._names = sorted({name for prompt in prompts for name in prompt.columns})
        self._batch = open_rewards(trainer_state)
        self._groups: dict[int, list[ScoredCompletion]] = {}

    def add(self, output: RolloutOutput) -> None:
        """Takes all completions of one prompt; does not wait for their rewards."""
        place = self._places[output.request_id]
        group = [self._unscored(place, output.request_id, completion) for completion in output.completions]
        self._groups[place] = group
        self._batch.add(place, self._reward_batch(group))

    def result(self) -> Scores:
        """Everything scored, in the order of the prompts; waits for the rewards.

        Raises:
            ValueError: completions of a prompt were not added.
        """
        if len(self._groups) != len(self._prompts):
            raise ValueError(f"{len(self._prompts) - len(self._groups)} prompts have no completions")
        batch, columns = self._batch.result()
        totals = self._compose(columns, batch.columns["is_truncated"], batch.group_size)
        completions = [item for place in sorted(self._groups) for item in self._groups[place]]
        scored = [
            replace(
                item,
                rewards={column.name: column.values[i] for column in columns},
                reward=totals.rewards[i],
                objective=totals.objectives[i],
            )
            for i, item in enumerate(completions)
        ]
        return Scores(scored, list(columns), batch)

    def _unscored(self, place: int, request_id: str, completion: Completion) -> ScoredCompletion:
        played = completion if isinstance(completion, Trajectory) else None
        prompt = played.prompt if played else self._prompts[place]
        text = played.text if played else prompt.response_prefix + self._decode(completion.token_ids)
        return ScoredCompletion(request_id, self._first + place, prompt, completion, text, {}, math.nan, math.nan)

    def _reward_batch(self, group: Sequence[ScoredCompletion]) -> RewardBatch:
        columns: dict[str, list[Any]] = {
            name: [item.prompt.columns.get(name) for item in group] for name in self._names
        }
        columns |= {
            "messages": [_messages(item) for item in group],
            "prompt_id": [item.prompt.prompt_id for item in group],
            "request_id": [item.request_id for item in group],
            "dataset": [item.prompt.dataset for item in group],
            "finish_reason": [item.completion.finish_reason for item in group],
            "is_truncated": [item.completion.finish_reason == "length" for item in group],
            "response_token_ids": [_written_ids(item.completion) for item in group],
        }
        played = [item.completion for item in group if isinstance(item.completion, Trajectory)]
        if len(played) == len(group):
            columns["rollout_infos"] = [one.infos for one in played]
        return RewardBatch([item.text for item in group], columns, len(group))


def _messages(item: ScoredCompletion) -> list[dict[str, Any]]:
    if isinstance(item.completion, Trajectory):
        return item.completion.messages
    return [*map(dict, item.prompt.messages), {"role": "assistant", "content": item.text}]


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
    """The line of `completions.jsonl`; one that was generated but not trained on says `"dropped": true`.

    `completion` is the text as the rewards saw it, a response prefix included, which is the end of `prompt` too.
    """
    played = item.completion
    row = {
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
        "weight_version": played.weight_version,
        **_several_versions(played),
        **({"turns": played.turns, "messages": played.messages} if isinstance(played, Trajectory) else {}),
        **({"dropped": True} if dropped else {}),
    }
    # A column of the data may have the name of a field: both are kept.
    return row | {f"columns/{name}" if name in row else name: value for name, value in item.prompt.columns.items()}


def _several_versions(completion: Completion) -> dict[str, Any]:
    """What there is to say beside the oldest version: nothing of a completion that one wrote."""
    if completion.newest_weight_version is None:
        return {}
    spans = completion.weight_versions
    return {"newest_weight_version": completion.newest_weight_version} | ({"weight_versions": spans} if spans else {})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for fewer than two values or equal ones."""
    if len(values) < 2 or min(values) == max(values):
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
