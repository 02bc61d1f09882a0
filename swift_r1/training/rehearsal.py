"""What `swift forecast` does with a run's own parts: it samples answers to the first prompts and has them judged, keeps
the good ones as rows for `swift sft`, and takes two optimizer steps. No weights are kept."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from swift_r1.flags.forecast import SAMPLED, ForecastArguments
from swift_r1.flags.plan import prompts_at_a_time
from swift_r1.record.metrics import standard_json
from swift_r1.record.recorder import Recorder
from swift_r1.rollout.prompts import Positions
from swift_r1.rollout.rounds import RoundSampler
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.runtime.terminal import duration
from swift_r1.training.checkpoint.resume import RunSummary
from swift_r1.training.loop import Trainer

logger = logging.getLogger("swift_r1.training")


class Rehearsal(Trainer):
    """Samples before it trains, and saves nothing."""

    def run(self) -> RunSummary:
        """Writes `SAMPLED` and `--output_file`, then trains. Collective. Raises as `Trainer.run`."""
        args = self.args
        assert isinstance(args, ForecastArguments)
        seen = []
        draft = None if args.output_file is None else Path(f"{args.output_file}.part")
        if draft is not None and self.ranks.is_rank0:
            draft.write_bytes(b"")  # what one that was stopped has left is not added to
        count = 0
        for group in self.sampled(args):
            seen += [_figures(answer) for answer in group]
            if draft is not None:
                best = kept(group, args.n_best_to_keep, args.reward_threshold)
                count += len(best)
                with draft.open("a", encoding="utf-8") as file:
                    file.writelines(f"{_row(answer)}\n" for answer in best)
        if self.ranks.is_rank0 and not self.stop.reason:
            lines = (json.dumps(standard_json(one)) for one in seen)
            text = "".join(f"{line}\n" for line in lines)
            (self.books.run_dir / SAMPLED).write_text(text, encoding="utf-8")
            if draft is not None:
                draft.replace(str(args.output_file))
                logger.info("%d of %d answers are in %s", count, len(seen), args.output_file)
        return super().run()

    def sampled(self, args: ForecastArguments) -> Iterator[Sequence[Trajectory]]:
        """Yields on rank 0 the answers to each prompt with their rewards, until all are there or a stop is asked for.
        Collective."""
        sampler = self.rounds
        assert isinstance(sampler, RoundSampler)
        self.publish()
        self.device.to_generate()
        parts = prompts_at_a_time(args, self.plan)
        self.recorder.phase("sampling", sum(parts) * args.num_completions)
        began = time.monotonic()
        done = 0
        for number, prompts in enumerate(parts):
            if self.stop_asked():
                break
            # all groups count here, and ids are others than those of the rounds that are trained
            apart = replace(
                sampler,
                args=replace(args, dynamic_sample=False),
                plan=replace(
                    self.plan, prompts_per_round=prompts, num_generations=args.num_completions
                ),
                run_id=f"{sampler.run_id}-sampled",
                recorder=Recorder(),
            )
            scored = apart.sample(number, 0)
            self.stopwatch.take()
            before, done = done, done + prompts
            if scored is None:
                continue
            for _, answers in groupby(scored.trained, key=lambda answer: answer.group):
                yield list(answers)
            if not before or 4 * before // sum(parts) < 4 * done // sum(parts):
                left = (time.monotonic() - began) * (sum(parts) - done) / done
                more = f", about {duration(left)} left" if done < sum(parts) else ""
                logger.info("%d of %d prompts are answered and judged%s", done, sum(parts), more)
        self.recorder.phase_end()

    def save(self, last: bool, positions: Positions | None) -> None:
        """Does nothing: these weights are of no use."""


def _figures(answer: Trajectory) -> dict[str, Any]:
    """Returns the line of an answer in `SAMPLED`."""
    return {
        "prompt": answer.prompt.prompt_id,
        "reward": answer.reward,
        "rewards": answer.rewards,
        "cut": answer.finish_reason == "length",
    }


def kept(answers: Sequence[Trajectory], most: int, threshold: float | None) -> list[Trajectory]:
    """Returns the best of a prompt's answers that are good enough, each text once."""
    good = {item.text: item for item in reversed(answers) if _is_good(item, threshold)}
    return sorted(good.values(), key=lambda item: (-item.reward, item.number))[:most]


def _is_good(answer: Trajectory, threshold: float | None) -> bool:
    """Returns whether an answer's reward is `threshold` at least; without one, whether the first reward function gave
    it 1. No valid reward (NaN) is not good, nor is an answer that was cut at its length: it has no end to learn."""
    if answer.finish_reason == "length":
        return False
    if threshold is not None:
        return answer.reward >= threshold
    return next(iter(answer.rewards.values())) == 1


def _row(answer: Trajectory) -> str:
    """Returns the row of a kept answer: its whole conversation, the columns of its prompt, its reward."""
    columns = dict(answer.prompt.columns) | {"reward": answer.reward}
    row = {"messages": [dict(one) for one in answer.messages], **columns}
    return json.dumps(standard_json(row), ensure_ascii=False)
