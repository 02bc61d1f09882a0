"""The rounds of a run as it recorded them, to be trained on again: tokens from the token record, texts and rewards from
`completions.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from swift_r1.errors import UsageError, one_line
from swift_r1.record.folder import find_runs
from swift_r1.record.lines import read_rows
from swift_r1.record.token_reader import TokenRecord
from swift_r1.runtime.files import read_text, regular

_PLAN = (
    *("completions_per_round", "completions_per_optimizer_step", "num_generations"),
    *("optimizer_steps_per_round", "rounds", "total_steps", "dataset_size"),
)
_NEEDED = (
    *("step", "prompt_id", "request_id", "group", "number", "prompt", "completion", "reward"),
    *("finish_reason", "weight_version"),
)
IMAGES = "images"
_OF_IMAGE = ("path", "sha256", "width", "height")
FIELDS = frozenset(
    (
        *(
            *_NEEDED,
            "advantage",
            "tokens",
            "newest_weight_version",
            "weight_versions",
            "turns",
            "messages",
        ),
        *(
            "tool_calls",
            "calls",
            "turn_rewards",
            "turn_advantages",
            "returned",
            "limit",
            "dropped",
            "entropy",
            "sequences",
            "other_messages",
            "failure",
            "invalid",
            "task",
            IMAGES,
        ),
    )
)
"""Of a line of `completions.jsonl`, beside `rewards/<name>`; a column of the data of such a name gets `columns/` before
it."""


@dataclass(frozen=True)
class Replay:
    """How a recorded run is trained on again."""

    run: str  # its folder
    scored_anew: bool  # by the reward functions; else with the recorded rewards
    scheduled_steps: int  # of the learning-rate schedule
    dataset_size: int | None  # as of `arguments.plan.Plan`


class WholeCompletion(NamedTuple):
    """A completion in its first optimizer step, `T` tokens long, as the token record has it."""

    prompt_id: str
    request_id: str
    number: int  # its place in the group
    prompt_token_ids: list[int]
    token_ids: list[int]  # `T`, as all below
    written: list[bool]  # by the policy, which may be trained on them
    rollout_logps: list[float]  # the engine's
    logps: list[float]  # the trainer's before that step
    # of prompt and completion, as `wire.routes.of_bytes` reads them; None in a run without R3
    routes: bytes | None = None


@dataclass(frozen=True)
class RecordedRound:
    """What a round was trained on, in its order, each with its row of `completions.jsonl`. Of the last round it may be
    what its first optimizer steps were on."""

    completions: Sequence[tuple[WholeCompletion, Mapping[str, Any]]]
    prompts: int  # that it took from the data, those that were dropped included


@dataclass(frozen=True)
class RecordedRun:
    """A run with `--log_tokens all`. Its round `r`, from 0 on, has the `S` optimizer steps from `r * S + 1` on; the
    files of its first pass hold all of its completions."""

    path: Path
    content: Mapping[str, Any]  # of args.json

    @classmethod
    def open(cls, path: str | Path) -> RecordedRun:
        """Raises UsageError: no folder of one run, or one of a version that wrote down less."""
        found = [run for run in find_runs([path]) if not run.supervised]
        if not found:
            raise UsageError(f"{path} is a run of swift sft, which samples nothing")
        if len(found) > 1:
            raise UsageError(
                f"{path} holds {len(found)} runs: name the folder of one, such as {found[0].path}"
            )
        [folder] = found
        if not folder.args or folder.problems:
            raise UsageError(
                f"{folder.path}: {', '.join(folder.problems) or 'args.json has no flags'}"
            )
        missing = [name for name in _PLAN if name not in folder.plan]
        if missing:
            raise UsageError(
                f"{folder.path} is of another version: the plan in its args.json has no {missing[0]}"
            )
        return cls(folder.path, json.loads(read_text(folder.path / "args.json")))

    @cached_property
    def tokens(self) -> TokenRecord:
        return TokenRecord(self.path)

    @property
    def args(self) -> Mapping[str, Any]:
        flags: Mapping[str, Any] = self.content["args"]
        return flags

    @property
    def plan(self) -> Mapping[str, Any]:
        """Returns the fields of `arguments.plan.Plan`."""
        fields: Mapping[str, Any] = self.content["plan"]
        return fields

    @property
    def scheduled_steps(self) -> int:
        """Returns the steps of the learning-rate schedule; a run that is itself a replay may have taken fewer."""
        return int(self.plan.get("scheduled_steps") or self.plan["total_steps"])

    def last_step(self, after: int) -> int:
        """Returns the last optimizer step up to which, from the one after `after` on, the completions of each are
        recorded. Raises UsageError where there is none, or one lacks what a replay needs."""
        recorded = frozenset(self.tokens.steps())
        last = after + sum(
            1 for _ in takewhile(lambda step: self._file(step) in recorded, count(after + 1))
        )
        if last == after:
            raise UsageError(self.why_not(after + 1))
        self._of_file(self._file(last))
        return last

    def whole_rounds(self, first: int) -> int:
        """Returns how many rounds are recorded from round `first` on. Raises UsageError as `last_step`."""
        recorded = frozenset(self.tokens.steps())
        rounds = sum(
            1
            for _ in takewhile(
                lambda number: recorded.issuperset(self._first_pass(number)), count(first)
            )
        )
        if rounds:
            self.first_of(first)
        return rounds

    def why_not(self, step: int) -> str:
        """Returns why an optimizer step is not in the record, and what would have recorded it."""
        steps = self.tokens.steps()
        if not steps:
            flag = self.args.get("log_tokens")
            return f"{self.path} has no token record (--log_tokens {flag}): a run with --log_tokens all has one"
        if step > steps[-1]:
            return f"{self.path}: its record ends with step {steps[-1]}"
        from swift_r1.record.token_record import stride_of

        if stride_of(self.tokens.folder) > 1:
            limit = self.args.get("log_tokens_limit")
            why = f"the record went over --log_tokens_limit {limit} GiB, and a higher limit would have kept every step"
        else:
            why = "it was left out while the run trained, for a full or slow disk"
        return f"{self.path}: step {step} is not in the token record: {why}"

    def rounds(self, first: int) -> Iterator[RecordedRound]:
        """Yields the rounds from `first` on, read one by one. Raises UsageError: a file cannot be read, or does not
        hold what it should."""
        lines = self._lines()
        recorded = frozenset(self.tokens.steps())
        for number in count(first):
            steps = self._first_pass(number)
            found = [
                row
                for step in takewhile(recorded.__contains__, steps)
                for row in self._of_file(step)
            ]
            if not found:
                return
            rows = next((own for step, own in lines if step == steps[0]), [])
            by_key = {(row["request_id"], row["number"]): row for row in rows}
            missing = [one for one in found if (one.request_id, one.number) not in by_key]
            if missing:
                raise UsageError(
                    f"{self.path}: completions.jsonl has no completion {missing[0].request_id}/{missing[0].number} at "
                    f"step {steps[0]}, which is in the token record"
                )
            completions = [(one, by_key[one.request_id, one.number]) for one in found]
            yield RecordedRound(completions, 1 + max(row["group"] for row in rows))

    def invalid_rewards(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        """Returns the lines of `invalid_rewards.jsonl` by the reward's name and the completion's
        `request_id/number`."""
        rows, _ = read_rows(self.path / "invalid_rewards.jsonl")
        return {(str(row.get("reward")), str(row.get("request_id"))): row for row in rows}

    def first_row(self) -> Mapping[str, Any]:
        """Returns the first line of `completions.jsonl`; empty where there is none."""
        return next((row for _, own in self._lines() for row in own), {})

    def has_images(self) -> bool:
        """Returns whether a prompt has images. Reads `completions.jsonl` up to the first one that has."""
        return any(IMAGES in row for _, own in self._lines() for row in own)

    def first_of(self, number: int) -> WholeCompletion:
        """Returns the first completion of a round."""
        return self._of_file(self._first_pass(number)[0])[0]

    def _first_pass(self, number: int) -> range:
        """Returns the optimizer steps of the first pass over a round."""
        first = number * int(self.plan["optimizer_steps_per_round"]) + 1
        return range(
            first,
            first
            + self.plan["completions_per_round"] // self.plan["completions_per_optimizer_step"],
        )

    def _file(self, step: int) -> int:
        """Returns the step whose file has the completions that an optimizer step is on."""
        number, place = divmod(step - 1, int(self.plan["optimizer_steps_per_round"]))
        steps = self._first_pass(number)
        return steps[place % len(steps)]

    def _of_file(self, step: int) -> list[WholeCompletion]:
        """Returns what the file of an optimizer step holds. Raises UsageError: it cannot be read, not all of the step,
        or less of a completion than a replay needs."""
        rows = self.tokens.columns(step, WholeCompletion._fields)
        size = self.plan["completions_per_optimizer_step"]
        if self.tokens.problems:
            raise UsageError(f"{self.path}: {self.tokens.problems[0]}")
        if len(rows) != size:
            flag = self.args.get("log_tokens")
            raise UsageError(
                f"{self.path}: {len(rows)} of the {size} completions of step {step} are recorded (--log_tokens {flag}):"
                " a run with --log_tokens all has them all"
            )
        lacking = [
            name
            for name in WholeCompletion._fields
            if name not in WholeCompletion._field_defaults
            and any(row[name] is None for row in rows)
        ]
        if lacking:
            raise UsageError(
                f"{self.path} is of another version: its token record has no column {lacking[0]}"
            )
        return [WholeCompletion(**row) for row in rows]

    def _lines(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yields the rows of each round, in the file's order, and their `step`. A last line that is half-written is no
        part of a round that is recorded. Raises UsageError: the file cannot be read."""
        path = self.path / "completions.jsonl"
        number = 0

        def rows() -> Iterator[dict[str, Any]]:
            nonlocal number
            with open(path, encoding="utf-8", opener=regular) as file:
                for number, line in enumerate(file, start=1):  # noqa: B007
                    if line.endswith("\n"):
                        row = json.loads(line)
                        lacking = [name for name in _NEEDED if name not in row]
                        lacking += [
                            name
                            for image in row.get(IMAGES, ())
                            for name in _OF_IMAGE
                            if name not in image
                        ]
                        if lacking:
                            raise KeyError(lacking[0])
                        yield row

        try:
            for step, own in groupby(rows(), key=lambda row: int(row["step"])):
                yield step, list(own)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path}: line {number} is damaged, or of another version ({one_line(error)})"
            ) from error


def row_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data's columns in a line of `completions.jsonl`."""
    own = {
        name: value
        for name, value in row.items()
        if name not in FIELDS and not name.startswith("rewards/")
    }
    return {name.removeprefix("columns/"): value for name, value in own.items()}
