"""What the loop works with, built by `run.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swift_r1.arguments import Plan, RlhfArguments
from swift_r1.data.types import Prompt
from swift_r1.rewards.monitor import InvalidRewardMonitor
from swift_r1.runtime.ranks import Ranks
from swift_r1.runtime.stopping import StopRequest, Watchdog
from swift_r1.sampling.base import Rollouts
from swift_r1.sampling.multi_turn import Stage, Turns
from swift_r1.sampling.prompts import Prompts
from swift_r1.sampling.scoring import OpenRewards
from swift_r1.tracking.recorder import Recorder
from swift_r1.training.backends.base import Backend, CriticBackend, ReferencePolicy
from swift_r1.training.batch.batching import Cut
from swift_r1.training.checkpoint.run_state import Fingerprint
from swift_r1.training.checkpoint.saving import Saver
from swift_r1.training.eval_sets import Rewards
from swift_r1.training.evaluate import Evaluator
from swift_r1.training.optimizer import LearningRate
from swift_r1.wire.protocol import SamplingParams


@dataclass(frozen=True)
class MainRank:
    """What only the main rank has: the prompts and the rewards.

    Attributes:
        rewards: the functions of the run and those that only the evaluation needs.
        open_rewards: those of the run.
        eval_prompts: held out of the run's data, then those of each of `--eval_datasets`.
        stage_ahead: where several turns of coming rounds are played (`--async_generate`).
    """

    prompts: Prompts
    rewards: Rewards
    open_rewards: OpenRewards
    eval_prompts: list[list[Prompt]]
    monitor: InvalidRewardMonitor
    decode: Callable[[Sequence[int]], str]
    stage_ahead: Stage | None = None


@dataclass(frozen=True)
class CriticParts:
    """The critic of PPO and the course of its learning rate."""

    backend: CriticBackend
    learning_rate: LearningRate


@dataclass(frozen=True)
class Parts:
    """What every rank has; `main` is None on the other ranks."""

    args: RlhfArguments
    plan: Plan
    ranks: Ranks
    backend: Backend
    reference: ReferencePolicy | None
    critic: CriticParts | None
    rollouts: Rollouts
    turns: Turns
    learning_rate: LearningRate
    sampling: SamplingParams
    cut: Cut
    evaluator: Evaluator | None
    recorder: Recorder
    saver: Saver
    stop: StopRequest
    watchdog: Watchdog
    run_id: str
    fingerprint: Fingerprint
    main: MainRank | None

    def completions_done(self, count: int) -> None:
        """`count` more completions have ended."""
        self.watchdog.progress("generation")
        self.recorder.phase_advance(count)
