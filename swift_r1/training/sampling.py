"""Rejection sampling: answers of the run's engine, graded by its rewards, of which the best are kept as rows that
`swift sft` reads (`swift sample`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from swift_r1.flags.forecast import SampleArguments
from swift_r1.record.metrics import standard_json
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.training.loop import Trainer
from swift_r1.training.rehearsal import sampled

SAMPLED_FILE = "sampled.json"
"""In the run's folder: `prompts` answered, `solved` of them with an answer that was kept; `answers`, and how many of
those were `cut`, `good` and `kept`."""


def write_samples(trainer: Trainer, args: SampleArguments) -> None:
    """Writes after each round what it gave, and at the end, when `--output_file` is whole and gets its name,
    `SAMPLED_FILE`. Collective."""
    draft = Path(f"{args.output_file}.part")
    if trainer.ranks.is_rank0:
        draft.write_bytes(b"")  # what one that was stopped has left is not added to
    counts = dict.fromkeys(("prompts", "solved", "answers", "cut", "good", "kept"), 0)
    for _, scored in sampled(trainer, args):
        if scored is None:
            continue
        rows = []
        for _, items in groupby(scored.trained, key=lambda item: item.group):
            answers = list(items)
            best = kept(answers, args.n_best_to_keep, args.reward_threshold)
            counts["prompts"] += 1
            counts["solved"] += bool(best)
            counts["answers"] += len(answers)
            counts["cut"] += sum(item.finish_reason == "length" for item in answers)
            counts["good"] += sum(is_good(item, args.reward_threshold) for item in answers)
            counts["kept"] += len(best)
            rows += [json.dumps(standard_json(row_of(item)), ensure_ascii=False) for item in best]
        with trainer.ranks.busy(), draft.open("a", encoding="utf-8") as file:
            file.writelines(f"{row}\n" for row in rows)
    if trainer.ranks.is_rank0:
        draft.replace(args.output_file)
        path = trainer.books.run_dir / SAMPLED_FILE
        path.write_text(json.dumps(counts) + "\n", encoding="utf-8")


def kept(answers: Sequence[Trajectory], most: int, threshold: float | None) -> list[Trajectory]:
    """Returns the best of a prompt's answers that are good enough, each text once."""
    good = {item.text: item for item in reversed(answers) if is_good(item, threshold)}
    return sorted(good.values(), key=lambda item: (-item.reward, item.number))[:most]


def is_good(answer: Trajectory, threshold: float | None) -> bool:
    """Returns whether an answer's reward is `threshold` at least; without one, whether the first reward function gave
    it 1. No valid reward (NaN) is not good, nor is an answer that was cut at its length: it has no end to learn."""
    if answer.finish_reason == "length":
        return False
    if threshold is not None:
        return answer.reward >= threshold
    return next(iter(answer.rewards.values())) == 1


def row_of(answer: Trajectory) -> dict[str, Any]:
    """Returns the row of a kept answer: its whole conversation, the columns of its prompt, its reward."""
    columns = dict(answer.prompt.columns) | {"reward": answer.reward}
    return {"messages": [dict(one) for one in answer.messages], **columns}
