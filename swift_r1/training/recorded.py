"""Rounds that another run has recorded, in the place of those that are sampled (`swift replay`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from swift_r1.data.images import ImageFile, images_of, rewards_column
from swift_r1.data.prompts import Prompt
from swift_r1.errors import RunFailed, UsageError
from swift_r1.models.routing import routing_of
from swift_r1.record.episodes import recorded_calls
from swift_r1.record.recorded import RecordedRun, WholeCompletion, row_columns
from swift_r1.rewards.batch import RewardAnswer, RewardCall, RewardCaller, Submitted
from swift_r1.rewards.types import InvalidReward, Item, ItemOutcome
from swift_r1.rollout.base import NO_IMAGES, OnDone, OnOutput, still_wanted
from swift_r1.rollout.prompts import Position, Positions
from swift_r1.rollout.remote import explained_difference
from swift_r1.rollout.rounds import RoundSampler
from swift_r1.rollout.scoring import ScoredRound, Scoring
from swift_r1.rollout.trajectory import TokenSequence, Trajectory, turns_of_tokens
from swift_r1.training.backends.base import Backend
from swift_r1.training.batching import Batching, everywhere, round_batch
from swift_r1.training.movement import logprobs_of
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest, RoutesAsked
from swift_r1.wire.routes import bytes_per_token, of_bytes


class NothingGenerated:
    """The `Rollouts` of a run that generates nothing."""

    max_model_length: int | None = None
    weight_version = 0
    unwanted = staticmethod(still_wanted)

    def publish_weights(self) -> None: ...

    def resume(self, weight_version: int) -> None:
        self.weight_version = weight_version

    def take_metrics(self) -> dict[str, float]:
        return {}

    def generate(
        self,
        requests: Sequence[RolloutRequest] | None,
        on_done: OnDone,
        on_output: OnOutput,
        images: Mapping[str, ImageFile] = NO_IMAGES,
    ) -> list[RolloutOutput] | None:
        raise NotImplementedError("this run generates nothing")


class RecordedRewards(RewardCaller):
    """Answers with what the reward functions of a recorded run gave: nothing is called.

    Attributes:
        rows: of each completion, as the column `request_id` names it, the line of `completions.jsonl`.
        invalid: what `completions.jsonl` has as null, as it has no opinion; see `RecordedRun`.
    """

    rows: Mapping[str, Mapping[str, Any]] = {}
    invalid: Mapping[tuple[str, str], Mapping[str, Any]] = {}

    def start(self) -> None: ...

    def close(self) -> None: ...

    def wait_ready(self) -> None: ...

    def run(
        self,
        calls: Sequence[RewardCall],
        state: Mapping[str, int],
        deadline: float,
        submitted: Sequence[Submitted] = (),
    ) -> Iterator[RewardAnswer]:
        for call in calls:
            yield RewardAnswer(call, [self._outcome(call.name, item) for item in call.items], 0.0)

    def _outcome(self, name: str, item: Item) -> ItemOutcome:
        ids = item.columns["request_id"]
        found = [(at, self.invalid.get((name, one))) for at, one in enumerate(ids)]
        bad = tuple(
            InvalidReward(at, str(row["cause"]), str(row["kind"]))
            for at, row in found
            if row is not None
        )
        values = (
            self.rows[one][f"rewards/{name}"] if row is None else math.nan
            for one, (_, row) in zip(ids, found, strict=True)
        )
        return ItemOutcome(tuple(values), bad)


class RecordedRounds:
    """`RoundSampler` of a replay. All methods are collective.

    Args:
        run: on rank 0, None elsewhere.
        rewards: recorded ones, where they are; functions are called by `sampler`.
        begun: how many rounds were begun before, and how far they were in the prompts.
        fresh: the weights are to be those that the run had then.
    """

    def __init__(
        self,
        sampler: RoundSampler,
        backend: Backend,
        batching: Batching,
        run: RecordedRun | None,
        rewards: RewardCaller | None,
        begun: tuple[int, Position],
        fresh: bool,
    ) -> None:
        self.sampler = sampler
        self.backend = backend
        self.batching = batching
        self.run = run
        self.rewards = rewards
        rounds, self._position = begun
        self._rounds = None if run is None else run.rounds(rounds)
        if isinstance(rewards, RecordedRewards) and run is not None:
            rewards.invalid = run.invalid_rewards()
        self._unchecked = fresh

    @property
    def positions(self) -> Positions:
        return {"": self._position}

    def publish_weights(self, begun: int, in_the_middle: bool) -> None:
        """Nobody generates with them; the first ones must be those of the run."""
        if self._unchecked:
            self._check_weights(begun)
        self._unchecked = False

    def _check_weights(self, number: int) -> None:
        """Raises UsageError where the policy does not give the log-probs that it had before round `number`."""
        ranks = self.sampler.ranks
        args = self.sampler.args
        first = None
        told = None
        if self.run is not None:
            one, row = next(self.run.rounds(number)).completions[0]
            whole = _trajectory(one, row, self.sampler.routes)
            first = round_batch(whole.sequences, rewards=[0.0])
            told = [torch.tensor(one.logps)[torch.tensor(one.written)]]
        batch = everywhere(first, ranks)
        [recorded] = ranks.broadcast(told)
        own = logprobs_of(batch, self.backend, self.batching, ranks, args.temperature)
        if self.sampler.routes is not None:
            routing_of(self.backend.model).take_counts()  # this pass is of no step
        difference = (own - recorded).abs().mean().item() if len(recorded) else 0.0
        explained = explained_difference(str(self.backend.model.dtype).removeprefix("torch."))
        if not difference <= explained:
            raise UsageError(
                f"--model {args.model} is not the model of the record: its log-probs of a completion of the first step "
                f"differ by {difference:.3g} nats on average, and rounding explains {explained:g}"
            )

    def sample(self, number: int, step: int) -> ScoredRound | None:
        """The recorded completions of the next round with their rewards, on rank 0. Raises UsageError as
        `RecordedRun.rounds`."""
        sampler = self.sampler
        if self._rounds is None:
            return None
        sampler.progress("the record")
        with sampler.ranks.busy(), sampler.stopwatch.timed("reward"):
            recorded = next(self._rounds, None)
            if recorded is None:
                raise RunFailed(f"round {number} is no longer in the record")
            taken = self._position.taken + recorded.prompts
            self._position = replace(self._position, taken=taken)
            if isinstance(self.rewards, RecordedRewards):
                self.rewards.rows = {
                    f"{one.request_id}/{one.number}": row for one, row in recorded.completions
                }
            trajectories = [
                _trajectory(one, row, sampler.routes) for one, row in recorded.completions
            ]
            size = sampler.plan.num_generations
            groups = [trajectories[at : at + size] for at in range(0, len(trajectories), size)]
            state = {"global_step": step, "max_steps": sampler.plan.scheduled_steps}
            prompts = [one[0].prompt for one in groups]
            names = [one[0].request_id for one in groups]
            assert sampler.gradings is not None
            scoring = Scoring(prompts, names, sampler.gradings, state)
            for group in groups:
                scoring.add(group)
            return scoring.result()


def _trajectory(
    one: WholeCompletion, row: Mapping[str, Any], routes: RoutesAsked | None = None
) -> Trajectory:
    """Returns what was sampled. Of the prompt's messages only their text is recorded where there was one turn. Raises
    UsageError where there are no such `routes`."""
    ids = tuple(one.token_ids)
    text = row["completion"]
    images = images_of(row)
    prompt = Prompt(
        prompt_id=str(one.prompt_id),
        dataset=str(one.prompt_id).rpartition(":")[0],
        messages=({"role": "user", "content": row["prompt"]},),
        text=row["prompt"],
        token_ids=tuple(one.prompt_token_ids),
        columns=row_columns(row) | rewards_column(images),
        images=images,
    )
    calls = recorded_calls(row)
    starts = [call.prompt_tokens - len(prompt.token_ids) for call in calls]
    spans = [slice(start, start + call.tokens) for start, call in zip(starts, calls, strict=True)]
    sequence = TokenSequence(
        prompt_token_ids=prompt.token_ids,
        token_ids=ids,
        logprobs=tuple(one.rollout_logps),
        loss_mask=one.written,
        versions=tuple(map(tuple, row.get("weight_versions", ((0, row["weight_version"]),)))),
        turns=turns_of_tokens(spans, len(ids)) if spans else (),
        images=images,
        routes=None if routes is None else _routes(one, routes),
    )
    turns = row.get("turns")
    return Trajectory(
        request_id=str(one.request_id),
        prompt=prompt,
        sequences=(sequence,),
        turns=(ids,) if turns is None else ((),) * turns,
        messages=row.get("messages")
        or [*map(dict, prompt.messages), {"role": "assistant", "content": text}],
        text=text,
        calls=calls,
        limit=row.get("limit"),
        finish_reason=row["finish_reason"],
        infos=None
        if turns is None
        else {name: row[name] for name in ("tool_calls", "turn_rewards") if name in row}
        | {"num_turns": turns},
    )


def _routes(one: WholeCompletion, asked: RoutesAsked) -> np.ndarray:
    """Returns the experts of a recorded completion. Raises UsageError where it has none, or such of another model."""
    if one.routes is None:
        raise UsageError(
            "--router_replay_mode R3: the record has no experts of its tokens, as a run with R3 and --log_tokens all has "
            "them; give R2, or disabled"
        )
    tokens = len(one.prompt_token_ids) + len(one.token_ids)
    if len(one.routes) != tokens * bytes_per_token(asked):
        raise UsageError(
            f"--model is not the model of the record: {len(one.routes)} bytes are not the experts of {tokens} tokens in "
            f"{asked.layers} layers"
        )
    return of_bytes(one.routes, asked)
