"""What is learned from rows with answers, a file for each objective; the loop knows none by name."""

from __future__ import annotations

from swift_r1.algorithms.preferences import PreferenceConfig
from swift_r1.algorithms.rewards import from_flags
from swift_r1.flags.preferences import PreferenceArguments
from swift_r1.flags.sft import SftArguments
from swift_r1.training.backends.base import Backend, ReferencePolicy
from swift_r1.training.objectives.answers import LearnedAnswers
from swift_r1.training.objectives.base import Objective
from swift_r1.training.objectives.preferences import Preferences


def objective_of(
    args: SftArguments, backend: Backend, reference: ReferencePolicy | None
) -> Objective:
    """Returns the objective that the flags name."""
    if isinstance(args, PreferenceArguments):
        config = from_flags(PreferenceConfig, args)
        return Preferences(config, backend, reference, backend.ranks)
    return LearnedAnswers(backend, backend.ranks)
