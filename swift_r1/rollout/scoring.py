"""Gives conversations their rewards: what the reward functions see, and what the loop and the logs get back."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple, get_args

import numpy as np

from swift_r1.algorithms.rewards import (
    Composition,
    group_statistics,
    mean,
    sample_std,
    standard_error,
)
from swift_r1.data.images import COLUMN
from swift_r1.data.prompts import Prompt
from swift_r1.data.rows import TOOL_COLUMNS
from swift_r1.data.sampler import Outcome
from swift_r1.record.recorded import FIELDS
from swift_r1.rewards.batch import OpenRewardBatch, column_of
from swift_r1.rewards.types import RIGHT, RewardBatch, RewardColumn, reward_batch
from swift_r1.rollout.trajectory import FAILURES, TokenSequence, Trajectory
from swift_r1.wire.protocol import Limit

# takes the trainer state that rewards are called with
OpenRewards = Callable[[Mapping[str, int]], OpenRewardBatch]
N = 8  # tokens of an n-gram
_POWERS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(N, dtype=np.uint64)  # odd, so none is 0


@dataclass(frozen=True, slots=True)
class Grading:
    """Says how the completions of a task are judged."""

    open_rewards: OpenRewards
    compose: Composition  # makes one reward of those of the functions
    by_turns: bool = False  # what an agent returned counts turn by turn alone


Gradings = Mapping[str, Grading]
"""By task."""


class Judged(NamedTuple):
    """What the reward functions of a task were given, and answered."""

    task: str
    batch: RewardBatch
    columns: Sequence[RewardColumn]


@dataclass(frozen=True, slots=True)
class ScoredRound:
    """Holds all completions that were generated for a round; `calls` are what the reward functions were given and
    answered, for each task and each time that prompts were sampled."""

    trained: Sequence[Trajectory]  # whole groups, one after another
    calls: Sequence[Judged]
    # of groups without signal that others have replaced (`--dynamic_sample`)
    dropped: Sequence[Trajectory] = ()
    metrics: dict[str, float] = field(default_factory=dict)  # more to log of the round

    @property
    def generated(self) -> list[Trajectory]:
        return [*self.trained, *self.dropped]

    @property
    def no_reward(self) -> str | None:
        """Says why no completion has a reward; None where one has."""
        if not all(math.isnan(item.reward) for item in self.generated):
            return None
        failures = [
            trajectory.failure for trajectory in self.generated if trajectory.failure is not None
        ]
        invalid = [
            f"reward {one.name}: {one.invalid[0].cause}" for one in self.columns() if one.invalid
        ]
        return next(chain(failures, invalid), "each reward function returned None for all of them")

    def with_groups_replaced(
        self, places: Sequence[int], fresh: ScoredRound, size: int
    ) -> ScoredRound:
        """Returns the round with groups of `fresh` (of `size` completions each) in the place of those at `places`."""
        trained = list(self.trained)
        dropped = list(self.dropped)
        for number, place in enumerate(places):
            group = slice(place * size, (place + 1) * size)
            dropped += trained[group]
            trained[group] = fresh.trained[number * size : (number + 1) * size]
        return replace(self, trained=trained, dropped=dropped, calls=[*self.calls, *fresh.calls])

    def with_advantages(
        self,
        advantages: Sequence[float],
        entropies: Sequence[float] | None,
        of_turns: Sequence[Sequence[float | None]] | None,
    ) -> ScoredRound:
        """Returns the round with the advantage of each completion, NaN where nothing is trained on it, its entropy
        where that is logged, and the advantages of its turns where these differ."""
        trained = []
        for place, trajectory in enumerate(self.trained):
            advantage = advantages[place]
            trained.append(
                replace(
                    trajectory,
                    advantage=None if math.isnan(advantage) else advantage,
                    entropy=None if entropies is None else entropies[place],
                    turn_advantages=() if of_turns is None else of_turns[place],
                )
            )
        return replace(self, trained=trained)

    def columns(self) -> list[RewardColumn]:
        """Returns each function's answers to several calls as if they had been one."""
        answers: dict[str, list[RewardColumn]] = {}
        for call in self.calls:
            for column in call.columns:
                answers.setdefault(column.name, []).append(column)
        return [
            column_of(name, own, sum(column.seconds for column in own))
            for name, own in answers.items()
        ]

    def of_task(self, name: str) -> ScoredRound:
        """Returns the completions of one task alone."""
        return ScoredRound(
            [one for one in self.trained if one.prompt.task == name],
            [call for call in self.calls if call.task == name],
            [one for one in self.dropped if one.prompt.task == name],
        )


class Scoring:
    """Gives the conversations of each prompt to the reward functions of its task as they come, and returns all of them
    at the end, in the order of `prompts`, which are numbered from `first_group`. `trainer_state` is what rewards are
    told of the run."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        request_ids: Sequence[str],
        gradings: Gradings,
        trainer_state: Mapping[str, int],
        first_group: int = 0,
    ) -> None:
        if len(set(request_ids)) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts have {len(set(request_ids))} different request ids"
            )
        numbers: dict[str, dict[str, int]] = defaultdict(dict)
        columns: dict[str, set[str]] = defaultdict(set)
        asked = zip(prompts, request_ids, strict=True)
        for number, (prompt, request_id) in enumerate(asked, start=first_group):
            numbers[prompt.task][request_id] = number
            columns[prompt.task].update(prompt.columns)
        self._tasks = {
            name: _ScoredTask(name, gradings[name], trainer_state, own, sorted(columns[name]))
            for name, own in numbers.items()
        }

    def add(self, group: Sequence[Trajectory]) -> None:
        """Takes all conversations of one prompt; does not wait for their rewards."""
        self._tasks[group[0].prompt.task].add(group)

    def result(self) -> ScoredRound:
        """Waits for the rewards. Raises ValueError where conversations of a prompt were not added."""
        found = [task.result() for task in self._tasks.values()]
        scored = [trajectory for one in found for trajectory in one.trained]
        calls = [call for one in found for call in one.calls]
        return ScoredRound(sorted(scored, key=lambda one: one.group), calls)


class _ScoredTask:
    """The conversations of a task, whose groups have `numbers` by their request ids; `names` are the columns of its
    data."""

    def __init__(
        self,
        task: str,
        grading: Grading,
        trainer_state: Mapping[str, int],
        numbers: Mapping[str, int],
        names: Sequence[str],
    ) -> None:
        self._task = task
        self._grading = grading
        self._numbers = list(numbers.values())
        self._places = {request_id: place for place, request_id in enumerate(numbers)}
        self._names = names
        self._batch = grading.open_rewards(trainer_state)
        self._groups: dict[int, Sequence[Trajectory]] = {}

    def add(self, group: Sequence[Trajectory]) -> None:
        place = self._places[group[0].request_id]
        self._groups[place] = group
        self._batch.add(place, self._reward_batch(group))

    def result(self) -> ScoredRound:
        if len(self._groups) != len(self._places):
            raise ValueError(f"{len(self._places) - len(self._groups)} prompts have no completions")
        batch, columns = self._batch.result()
        trajectories = [
            replace(trajectory, group=self._numbers[place], number=number)
            for place in sorted(self._groups)
            for number, trajectory in enumerate(self._groups[place])
        ]
        failed = {
            place for place, trajectory in enumerate(trajectories) if trajectory.failure is not None
        }
        columns = [_without(column, failed) for column in columns] if failed else columns
        more = batch.columns["is_truncated"], batch.group_size
        compose = self._grading.compose
        totals = compose([column.values for column in columns], *more)
        outcomes = totals.objectives
        if self._grading.by_turns:
            outcomes = compose([_without_turns(column) for column in columns], *more).objectives
        scored = [
            replace(
                trajectory,
                rewards={column.name: column.values[place] for column in columns},
                reward=math.nan if place in failed else totals.rewards[place],
                objective=math.nan if place in failed else totals.objectives[place],
                outcome=math.nan if place in failed else outcomes[place],
            )
            for place, trajectory in enumerate(trajectories)
        ]
        return ScoredRound(scored, [Judged(self._task, batch, columns)])

    def _reward_batch(self, group: Sequence[Trajectory]) -> RewardBatch:
        turns = [list(map(list, one.turns)) for one in group]
        scheduled = group[0].infos is not None
        more: dict[str, Any] = {}
        if scheduled:
            more = {
                "rollout_infos": [{"limit": one.limit, **(one.infos or {})} for one in group],
                "episode_steps": [one.steps for one in group],
            }
        if all(made_calls(one) is not None for one in group):
            more |= {name: [(one.infos or {})[name] for one in group] for name in TOOL_COLUMNS}
        return reward_batch(
            [one.text for one in group],
            [one.prompt.columns for one in group],
            self._names,
            len(group),
            messages=[one.messages for one in group],
            prompt_id=[one.prompt.prompt_id for one in group],
            # a scheduler's uuid
            request_id=[f"{one.request_id}/{number}" for number, one in enumerate(group)],
            dataset=[one.prompt.dataset for one in group],
            finish_reason=[one.finish_reason for one in group],
            # with a scheduler a list per turn
            response_token_ids=turns if scheduled else [own[0] for own in turns],
            **more,
        )


def _without(column: RewardColumn, failed: Collection[int]) -> RewardColumn:
    """Leaves out what a function said of episodes that failed: it is no reward, and no fault of its own."""
    values = tuple(None if place in failed else value for place, value in enumerate(column.values))
    return replace(
        column,
        values=values,
        invalid=tuple(bad for bad in column.invalid if bad.index not in failed),
    )


def _without_turns(column: RewardColumn) -> list[float | None]:
    """Returns the values of a function, 0 for those that are sums of their turns' rewards."""
    factor = 0.0 if column.name in ("agent_reward", "gym_reward") else 1.0
    return [None if value is None else factor * value for value in column.values]


def outcomes_of(scored: ScoredRound, step: int, task: str = "") -> list[Outcome]:
    """Returns what became of each group of a task in a round, also of those that others have replaced; `step` is the
    first optimizer step on them."""
    total = math.fsum(abs(trajectory.advantage or 0.0) for trajectory in scored.trained) or 1.0
    groups = groupby(scored.of_task(task).generated, key=lambda trajectory: trajectory.group)
    return [_outcome(list(group), step, total) for _, group in groups]


def _outcome(group: Sequence[Trajectory], step: int, total: float) -> Outcome:
    """Returns what became of a group of a round whose absolute advantages sum to `total`."""
    valid = [trajectory.reward for trajectory in group if not math.isnan(trajectory.reward)]
    objectives = {
        trajectory.objective for trajectory in group if not math.isnan(trajectory.objective)
    }
    judged = [next(iter(trajectory.rewards.values())) for trajectory in group]
    return Outcome(
        row=group[0].prompt.row,
        step=step,
        reward=mean(valid) if valid else None,
        pass_rate=mean([float(value is not None and value >= RIGHT) for value in judged]),
        has_signal=len(objectives) > 1,
        gradient_share=math.fsum(abs(trajectory.advantage or 0.0) / total for trajectory in group),
    )


def reward_metrics(
    scored: Sequence[Trajectory], columns: Sequence[RewardColumn]
) -> dict[str, float]:
    """Returns `reward`, `reward_stderr`, `reward_std` (mean of the groups' standard deviations),
    `frac_reward_zero_std`, `frac_groups_all_invalid` (groups without one usable reward), and under `rewards/<name>/`
    mean, stderr, std, invalid share (in all and by kind), seconds, and `equal_differ`: of the completions that equal an
    earlier one of their group, the share that got another value than it; left out without any."""
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in scored:
        groups[trajectory.group].append(trajectory)
    totals = [_known(one.reward for one in group) for group in groups.values()]
    metrics = group_statistics(totals)
    for column in columns:
        name = column.name
        known = _known(column.values)
        of_groups = [_known(one.rewards.get(name) for one in group) for group in groups.values()]
        metrics[f"rewards/{name}/mean"] = mean(known)
        metrics[f"rewards/{name}/stderr"] = standard_error(of_groups)
        metrics[f"rewards/{name}/std"] = sample_std(known)
        metrics[f"rewards/{name}/invalid"] = len(column.invalid) / len(column.values)
        for kind, count in Counter(bad.kind for bad in column.invalid).items():
            metrics[f"rewards/{name}/invalid/{kind}"] = count / len(column.values)
        metrics[f"rewards/{name}/seconds"] = column.seconds
        differs = [differ for group in groups.values() for differ in _equal_differ(group, name)]
        if differs:
            metrics[f"rewards/{name}/equal_differ"] = mean(differs)
    return metrics


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and not math.isnan(value)]


def _equal_differ(group: Sequence[Trajectory], name: str) -> list[float]:
    """Returns, for each completion of a group that equals an earlier one, whether its value is another (1 or 0)."""
    first: dict[tuple[str, str], float] = {}
    differs = []
    for trajectory in group:
        key = trajectory.text, trajectory.finish_reason
        for value in _known([trajectory.rewards.get(name)]):
            if key in first:
                differs.append(float(value != first[key]))
            first.setdefault(key, value)
    return differs


def completion_metrics(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Returns lengths in tokens and the share that was cut off; with a scheduler also turns, and the share of trained
    tokens."""
    metrics: dict[str, float] = {}
    lengths = [trajectory.length for trajectory in scored]
    led = [trajectory for trajectory in scored if trajectory.infos is not None]
    if led:
        turns = [len(trajectory.turns) for trajectory in led]
        masks = [sequence.loss_mask for trajectory in led for sequence in trajectory.sequences]
        tokens = sum(trajectory.length for trajectory in led)
        metrics["multi_turn/mean_turns"] = mean(turns)
        metrics["multi_turn/max_turns"] = float(max(turns))
        metrics["multi_turn/trained_tokens"] = sum(map(sum, masks)) / max(1, tokens)
        reached = Counter(trajectory.limit for trajectory in led)
        metrics |= {f"limits/{limit}": float(reached[limit]) for limit in get_args(Limit)}
    metrics |= tool_metrics(scored)
    metrics |= agent_metrics(scored)
    metrics["completions/mean_length"] = mean(lengths)
    metrics["completions/max_length"] = float(max(lengths))
    metrics["completions/clipped_ratio"] = mean(
        [float(trajectory.finish_reason == "length") for trajectory in scored]
    )
    return metrics


def made_calls(trajectory: Trajectory) -> list[dict[str, Any]] | None:
    """Returns the calls of `tool_scheduler`; another scheduler may note anything under that name."""
    calls = (trajectory.infos or {}).get("tool_calls")
    own = isinstance(calls, list) and all(
        isinstance(one, dict) and "outcome" in one for one in calls
    )
    return calls if own else None


def tool_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns metrics of the model's calls: under `tools/<name>/` calls, and those that gave an error, ran out of time
    or were cut, and the seconds of all; `tools/unknown_calls` are of names that are no tools, `tools/unread_calls`
    turns with a call that could not be read."""
    of_each = [made_calls(trajectory) for trajectory in trajectories]
    if all(calls is None for calls in of_each):
        return {}
    every = [call for calls in of_each for call in calls or ()]
    metrics = {}
    for kind in ("unknown", "unread"):
        metrics[f"tools/{kind}_calls"] = float(sum(call["outcome"] == kind for call in every))
    made = [call for call in every if call["outcome"] not in ("unknown", "unread")]
    described = {
        tool["function"]["name"] for trajectory in trajectories for tool in trajectory.prompt.tools
    }
    for name in sorted(described | {call["name"] for call in made}):
        own = [call for call in made if call["name"] == name]
        outcomes = Counter(call["outcome"] for call in own)
        metrics |= {
            f"tools/{name}/calls": float(len(own)),
            f"tools/{name}/errors": float(outcomes["error"]),
            f"tools/{name}/timeouts": float(outcomes["timeout"]),
            f"tools/{name}/cut": float(sum(call["cut"] for call in own)),
            f"tools/{name}/seconds": math.fsum(call.get("seconds", 0.0) for call in own),
        }
    return metrics


def agent_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns, under `agent/`, failed episodes by kind, those that ran into a limit, and means of their sequences and
    seconds (without those of the model); calls that were forced, and by kind those that extend no
    earlier one; means of the numbers that agents returned. Nothing without an agent."""
    trajectories = [one for one in trajectories if "agent" in (one.infos or {})]
    episodes = [(trajectory.infos or {})["agent"] for trajectory in trajectories]
    if not episodes:
        return {}
    returned: dict[str, list[float]] = defaultdict(list)
    for one in trajectories:
        for name, value in one.returned.items():
            if isinstance(value, float):
                returned[name].append(value)
    failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
    failed = Counter(failure.partition(":")[0] for failure in failures)
    metrics = {"agent/failed": float(len(failures))}
    for kind in FAILURES:
        metrics[f"agent/{kind}"] = float(failed[kind])
    metrics["agent/limited"] = float(sum(one.limit is not None for one in trajectories))
    metrics["agent/sequences"] = sum(
        len(trajectory.sequences) for trajectory in trajectories
    ) / len(episodes)
    metrics["agent/seconds"] = sum(episode["seconds"] for episode in episodes) / len(episodes)
    metrics["agent/constrained"] = float(sum(episode["constrained"] for episode in episodes))
    calls: Counter[str] = Counter()
    for episode in episodes:
        calls += Counter(episode["kinds"])
    for kind, count in sorted(calls.items()):
        if kind != "extends":
            metrics[f"agent/calls/{kind}"] = float(count)
    for name, values in sorted(returned.items()):
        metrics[f"agent/returned/{name}"] = sum(values) / len(values)
    return metrics


def round_metrics(scored: ScoredRound) -> dict[str, float]:
    """Returns what to log of a round, over all that was generated."""
    everything = scored.generated
    metrics = reward_metrics(everything, scored.columns()) | completion_metrics(everything)
    metrics |= text_metrics(everything) | task_metrics(scored)
    versions = [
        sequence.oldest_version for trajectory in everything for sequence in trajectory.sequences
    ]
    metrics["rollout/weight_version"] = float(min(versions))
    return metrics | scored.metrics


def task_metrics(scored: ScoredRound) -> dict[str, float]:
    """Returns, under `tasks/<task>/`, `prompts` (of the round, replaced ones too) and the metrics of rewards and
    completions; nothing in a run of one task."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(call.task for call in scored.calls):
        own = scored.of_task(name)
        found = {"prompts": float(len({one.group for one in own.generated}))}
        found |= reward_metrics(own.generated, own.columns()) | completion_metrics(own.generated)
        metrics |= {f"tasks/{name}/{key}": value for key, value in found.items() if name}
    return metrics


def completion_row(trajectory: Trajectory, step: int, dropped: bool = False) -> dict[str, Any]:
    """Returns the line of `completions.jsonl`. `completion` is the text as the rewards saw it, a response prefix
    included, which is the end of `prompt` too."""
    sequences = trajectory.sequences
    oldest = min((sequence.oldest_version for sequence in sequences), default=None)
    newest = max((sequence.newest_version for sequence in sequences), default=None)
    row: dict[str, Any] = {
        "step": step,
        "prompt_id": trajectory.prompt.prompt_id,
        **({"task": trajectory.prompt.task} if trajectory.prompt.task else {}),
        "request_id": trajectory.request_id,
        "group": trajectory.group,
        "number": trajectory.number,
        "prompt": trajectory.prompt.text,
        "completion": trajectory.text,
        **{f"rewards/{name}": value for name, value in trajectory.rewards.items()},
        "reward": trajectory.reward,
        "advantage": trajectory.advantage,
        "tokens": trajectory.length,
        "finish_reason": trajectory.finish_reason,
        "weight_version": oldest,
    }
    if newest != oldest:
        row["newest_weight_version"] = newest
        if len(sequences) == 1 and len(sequences[0].versions) > 1:
            row["weight_versions"] = sequences[0].versions
    if len(sequences) != 1:
        row["sequences"] = len(sequences)
    invalid = [
        name
        for name, value in trajectory.rewards.items()
        if value is not None and math.isnan(value)
    ]
    if invalid:
        row["invalid"] = invalid
    if trajectory.failure is not None:
        row["failure"] = trajectory.failure
    if trajectory.limit is not None:
        row["limit"] = trajectory.limit
    if trajectory.infos is not None:
        row |= {"turns": len(trajectory.turns), "messages": trajectory.messages}
        row |= {"other_messages": trajectory.other_messages} if trajectory.other_messages else {}
        row["calls"] = [asdict(call) for call in trajectory.calls]
        for name in ("turn_rewards", "turn_advantages"):
            if getattr(trajectory, name):
                row[name] = list(getattr(trajectory, name))
        if trajectory.returned:
            row["returned"] = trajectory.returned
        calls = made_calls(trajectory)
        if calls is not None:  # without what a repeated run has otherwise
            row["tool_calls"] = [
                {key: value for key, value in call.items() if key != "seconds"} for call in calls
            ]
    if dropped:
        row["dropped"] = True
    columns = dict(trajectory.prompt.columns)
    if trajectory.prompt.images:
        columns.pop(COLUMN, None)
        row[COLUMN] = [image.stored() for image in trajectory.prompt.images]
    # A column of the data may have the name of a field, also of one that this line lacks: they are told apart.
    row |= {
        f"columns/{name}" if name in row or name in FIELDS else name: value
        for name, value in columns.items()
    }
    return row if trajectory.entropy is None else row | {"entropy": trajectory.entropy}


def episode_times(trajectory: Trajectory, step: int) -> dict[str, Any] | None:
    """Returns the line of `episode_times.jsonl`: what a repeated run has otherwise. None for a single turn."""
    if not trajectory.call_seconds or trajectory.infos is None:
        return None
    own = trajectory.infos.get("agent")
    return {
        "step": step,
        "request_id": trajectory.request_id,
        "number": trajectory.number,
        "calls": list(trajectory.call_seconds),
        "tools": [call.get("seconds") for call in made_calls(trajectory) or ()],
        "own": own["seconds"] if isinstance(own, dict) else None,
    }


def text_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns `completions/repetition`: the share of n-grams of 8 tokens, within turns of the policy, that were in
    their completion before, of all of them together; left out where turns are shorter. `completions/foreign_letters`:
    the share of letters of scripts that are not in the prompt. `prompts/repeated`: the share of prompts that came
    before in the round. `completions/repeated`: the share of completions that equal an earlier one of their group."""
    ngrams = 0
    repeats = 0
    letters = 0
    foreign = 0
    prompts = {trajectory.request_id: trajectory.prompt for trajectory in trajectories}
    scripts = {
        request_id: letter_counts(prompt.text).keys() for request_id, prompt in prompts.items()
    }
    for trajectory in trajectories:
        found, again = repeated_ngrams(*chain.from_iterable(map(_own, trajectory.sequences)))
        ngrams += found
        repeats += again
        for script, count in letter_counts(trajectory.text).items():
            letters += count
            foreign += count * (script not in scripts[trajectory.request_id])
    different = len({(prompt.token_ids, prompt.images) for prompt in prompts.values()})
    metrics = {"prompts/repeated": 1 - different / len(prompts)}
    texts = {(trajectory.request_id, trajectory.text) for trajectory in trajectories}
    metrics["completions/repeated"] = 1 - len(texts) / len(trajectories)
    if ngrams:
        metrics["completions/repetition"] = repeats / ngrams
    if letters:
        metrics["completions/foreign_letters"] = foreign / letters
    return metrics


def _own(sequence: TokenSequence) -> list[Sequence[int]]:
    """Returns the tokens of each turn of the policy; none of its environment's."""
    if not sequence.turns:
        return [sequence.token_ids]
    by_turn = groupby(zip(sequence.turns, sequence.token_ids, strict=True), key=itemgetter(0))
    return [[token for _, token in pairs] for turn, pairs in by_turn if turn >= 0]


def repeated_ngrams(*turns: Sequence[int]) -> tuple[int, int]:
    """Returns how many n-grams the turns of a completion have, and how many of them came before in it, by a 64-bit
    hash."""
    hashes = [np.zeros(0, dtype=np.uint64)]
    for token_ids in turns:
        count = max(0, len(token_ids) - N + 1)
        ids = np.array(token_ids, dtype=np.uint64) + np.uint64(1)
        parts = [ids[place : place + count] * power for place, power in enumerate(_POWERS)]
        hashes.append(np.sum(parts, axis=0, dtype=np.uint64))
    found = np.concatenate(hashes)
    return len(found), len(found) - len(np.unique(found))


def letter_counts(text: str) -> Counter[str]:
    """Counts letters by script (the first word of Unicode's names: LATIN, CJK, CYRILLIC)."""
    counts: Counter[str] = Counter()
    for letter, count in Counter(text).items():
        if letter.isalpha():
            counts[_script(letter)] += count
    return counts


@cache
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]
