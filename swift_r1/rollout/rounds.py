"""One round's completions and rewards: prompts out of the data, through the engine and the reward functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from swift_r1.algorithms.advantages import groups_without_signal
from swift_r1.data.mixture import Share, tasks_of_round
from swift_r1.errors import RunFailed
from swift_r1.flags import Plan, RunFlags
from swift_r1.record.recorder import Recorder
from swift_r1.record.spans import Stopwatch
from swift_r1.rollout.base import GroupRequest, OnDone, Rollouts
from swift_r1.rollout.multi_turn import Turns
from swift_r1.rollout.prompts import MixedPrompts, Positions
from swift_r1.rollout.scoring import Gradings, ScoredRound, Scoring
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.rollout.turn_credit import turn_credit
from swift_r1.runtime.ranks import Ranks
from swift_r1.wire.protocol import RoutesAsked, SamplingParams, completion_seed


@dataclass(frozen=True)
class RoundSampler:
    """Samples and scores rounds, each when it is asked for. All methods are collective; `prompts` and `gradings` are on
    rank 0, None elsewhere; `shares`, `sampling` and `gradings` are by task. `progress` is told what comes now, see
    `Watchdog`; request ids begin with `run_id`."""

    args: RunFlags
    plan: Plan
    ranks: Ranks
    rollouts: Rollouts
    turns: Turns
    shares: Mapping[str, Share]
    sampling: Mapping[str, SamplingParams]
    run_id: str
    prompts: MixedPrompts | None
    gradings: Gradings | None
    recorder: Recorder
    stopwatch: Stopwatch
    progress: Callable[[str], None]
    on_done: OnDone
    routes: RoutesAsked | None = None  # of the completions that are trained (R3)

    def publish_weights(self, begun: int, in_the_middle: bool) -> None:
        """Sends the weights to the engine; `begun` rounds were begun, of which the last may not be over."""
        self.rollouts.publish_weights()

    @property
    def positions(self) -> Positions:
        """How far the sampled rounds are in the prompts; on rank 0."""
        assert self.prompts is not None
        return self.prompts.positions

    def sample(self, number: int, step: int) -> ScoredRound | None:
        """Completions and rewards of round `number`, from 0, begun after `step` optimizer steps; on rank 0.

        With `--dynamic_sample`, prompts whose group has no signal are replaced by the next prompts of their tasks, and
        those again, at most `--max_resample_times` times.
        """
        asked = self.plan.prompts_per_round
        tasks = tasks_of_round(self.shares, number, asked)
        scored = self._generate_and_score(number, step, tasks, 0)
        if self.args.dynamic_sample:
            silent = self._without_signal(scored)
            for _ in range(self.args.max_resample_times):
                if not silent:
                    break
                again = [tasks[place] for place in silent]
                fresh = self._generate_and_score(number, step, again, asked)
                asked += len(silent)
                if scored is not None and fresh is not None:
                    scored = scored.with_groups_replaced(silent, fresh, self.plan.num_generations)
                silent = self._without_signal(scored)
            if scored is not None:
                scored.metrics["dynamic_sample/resampled"] = (
                    len(scored.dropped) / self.plan.num_generations
                )
                scored.metrics["dynamic_sample/kept_without_signal"] = float(len(silent))
        if scored is not None:
            _check_episodes(scored.generated)
        if self.args.async_generate and not self.args.max_staleness and scored is not None:
            scored.metrics.update(
                dict.fromkeys(("rollout/staleness/mean", "rollout/staleness/max"), 0.0)
            )
        return scored

    def _generate_and_score(
        self, number: int, step: int, tasks: Sequence[str], first: int
    ) -> ScoredRound | None:
        """Completions of the next prompts of these `tasks` and their rewards, on rank 0; this round has asked for
        `first` already. Rewards are computed while other completions are still generated; `time/reward` is what is left
        of that."""
        count = len(tasks)
        with self.ranks.busy():  # streamed ones may come from far away
            prompts = self.prompts.take(tasks, number) if self.prompts is not None else []
        groups = []
        for position, prompt in enumerate(prompts, start=first):
            seeds = [
                completion_seed(self.args.seed, number, position, prompt.prompt_id, index)
                for index in range(self.plan.num_generations)
            ]
            request_id = f"{self.run_id}/{number}/{position}"
            sampling = self.sampling[prompt.task]
            groups.append(GroupRequest.of(prompt, request_id, seeds, sampling, self.routes))
        self.recorder.phase("generating", count * self.plan.num_generations)
        self.progress("generation")
        waits = self.args.use_vllm and self.prompts is None  # rank 0 alone asks a server
        with self.stopwatch.timed("generate", "wait" if waits else None):
            scoring = self.generate(groups, count, count, self.gradings, step, first)
        self.recorder.phase_end()
        if scoring is None:
            return None
        self.progress("the rewards")
        with self.stopwatch.timed("reward"), self.ranks.busy():
            return scoring.result()

    def generate(
        self,
        groups: Sequence[GroupRequest],
        count: int,
        at_once: int,
        gradings: Gradings | None,
        step: int,
        first_group: int = 0,
        look: Callable[[], None] = lambda: None,
    ) -> Scoring | None:
        """Generates the conversations of `count` prompts, `at_once` together, and gives them to the reward functions as
        they come; on rank 0, which has the prompts, the rewards to wait for. Collective, as `look` may be, which is
        called after those that were generated together."""
        scoring = None
        if gradings is not None:
            state = {"global_step": step, "max_steps": self.plan.total_steps}
            scoring = Scoring(
                [group.prompt for group in groups],
                [group.request.request_id for group in groups],
                gradings,
                state,
                first_group,
            )

        def add(group: Sequence[Trajectory]) -> None:
            if scoring is not None and not self.rollouts.unwanted():
                scoring.add(group)

        for start in range(0, count, at_once):
            part = None if scoring is None else groups[start : start + at_once]
            self.turns.generate(part, self.on_done, add)
            look()
        return scoring

    def _without_signal(self, scored: ScoredRound | None) -> list[int]:
        """Places of the round's groups without signal, on every rank."""
        found = None
        if scored is not None:
            credit = turn_credit(scored.trained, self.args)
            silent = silent_groups(scored, self.plan.num_generations, credit)
            found = [torch.tensor(silent, dtype=torch.long)]
        places: list[int] = self.ranks.broadcast(found)[0].tolist()
        return places


def silent_groups(
    scored: ScoredRound, num_generations: int, credit: Sequence[Sequence[float]] | None = None
) -> list[int]:
    """Places of the groups that teach nothing: `groups_without_signal`, and with the `credit` of turns (`turn_credit`)
    those alone of whose episodes no turn has any either."""
    rewards = torch.tensor([trajectory.objective for trajectory in scored.trained])
    silent: list[int] = groups_without_signal(rewards, num_generations).nonzero().flatten().tolist()
    if credit is None:
        return silent
    ends = {place: (place * num_generations, (place + 1) * num_generations) for place in silent}
    return [
        place
        for place, (first, end) in ends.items()
        if not any(chain.from_iterable(credit[first:end]))
    ]


def _check_episodes(episodes: Sequence[Trajectory]) -> None:
    """Raises RunFailed where all episodes of a round failed; what is not an agent's never does."""
    failures = [trajectory.failure for trajectory in episodes]
    if failures and failures[0] is not None and all(failure is not None for failure in failures):
        raise RunFailed(
            f"all {len(failures)} episodes of the round failed, the first one: {failures[0]}"
        )
