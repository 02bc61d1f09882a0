"""The lengths of a recorded run, and how its seconds compare with the formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from swift_r1.lab.estimate.chips import Chip
from swift_r1.lab.estimate.job import AverageLengths, assumed, of_run, recorded_lines
from swift_r1.lab.estimate.layout import estimate_layout
from swift_r1.lab.estimate.work import Efficiency


def seconds_of(
    folder: Path, updates: int = 1, of: Callable[[Iterable[float]], float] = median
) -> Mapping[str, float]:
    """Returns the median seconds of a round of `updates` optimizer steps (or another figure `of` all rounds):
    `generate`, `train` (with the log-probs before it), `push`, `reward` and `step`. Where rounds were prefetched,
    `generate` is what the server took, not the wait for it."""
    lines = recorded_lines(folder)
    names = {
        "generate": "generate",
        "train": "train",
        "push": "sync",
        "reward": "reward",
        "step": "step",
    }
    found = {
        name: updates * of(line.get(f"time/{logged}", 0.0) for line in lines)
        for name, logged in names.items()
    }
    ahead = [line["rollout/ahead_seconds"] for line in lines if line.get("rollout/ahead_seconds")]
    return found | ({"generate": of(ahead)} if ahead else {})


def read_measured(
    folder: Path, chip: Chip, of: Callable[[Iterable[float]], float] = median
) -> Efficiency:
    """Returns the assumptions for this chip with the factors by which the run's phases took longer, or shorter. Raises
    UsageError: as `of_run`."""
    use = assumed(chip)
    job, layout = of_run(folder, chip, use)
    found = estimate_layout(job, layout)
    seconds = seconds_of(folder, job.round.updates, of)

    def factor(measured: float, predicted: float) -> float:
        return measured / predicted if measured > 0 and predicted > 0 else 1.0

    return replace(
        use,
        generate_factor=factor(seconds["generate"], found.phases["generate"]),
        train_factor=factor(seconds["train"], found.phases["train"] + found.phases["log-probs"]),
        push_factor=factor(seconds["push"], found.phases.get("push", 0.0)),
        reward_seconds=seconds["reward"] / job.round.completions,
    )


def lengths_of(folder: Path, chip: Chip) -> AverageLengths:
    """Returns the lengths of the run's prompts and completions. Raises UsageError: the folder has none."""
    job, _ = of_run(folder, chip, assumed(chip))
    return AverageLengths(job.round.prompt_tokens, job.round.completion_tokens, job.round.recorded)
