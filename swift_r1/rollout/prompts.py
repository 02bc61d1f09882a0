"""The prompts a run trains on: sampled, streamed or chosen, rendered and tokenised when they are taken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift_r1.data.choices import Choices
from swift_r1.data.preprocessors import Row
from swift_r1.data.prompts import Prompt, PromptEncoder, data_columns
from swift_r1.data.sampler import PromptSampler
from swift_r1.data.streaming import RowStream, chained
from swift_r1.errors import RunFailed, UsageError


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is in the prompts of a task.

    Attributes:
        taken: prompts given out, those before a resume included.
        digest: of streamed rows a hash of what they were, else empty.
    """

    taken: int = 0
    digest: str = ""


Positions = Mapping[str, Position]
"""By task."""


class Prompts(ABC):
    """Gives the trainer its prompts.

    Attributes:
        taken: prompts given out, those before a resume included.
        digest: of streamed rows a hash of what they were, else empty.
    """

    def __init__(self, encoder: PromptEncoder, taken: int, digest: str = "") -> None:
        self.taken = taken
        self.digest = digest
        self._encoder = encoder

    @abstractmethod
    def _next(self) -> Prompt:
        """Returns the prompt that comes after those taken."""

    def choose(self, count: int, round_: int) -> None:  # noqa: B027  most have nothing to choose
        """The next `count` prompts are for this round."""

    def columns_beside(self, prompt: Prompt, offset: int) -> Mapping[str, Any] | None:
        """Returns the columns of the row that stands so many rows after a prompt's; None where it is not known."""
        return None

    def take(self, count: int, round_: int = 0) -> list[Prompt]:
        """The next `count` prompts, for this round. Raises RunFailed where streamed data cannot be read, or is not what
        it was, or the sampler fails (`Choices`)."""
        self.choose(count, round_)
        prompts: list[Prompt] = []
        for _ in range(count):
            prompts.append(self._next())
            self.taken = self.taken + 1
        return prompts

    def _encode(self, row: Row) -> Prompt:
        prompt = self._encoder.encode(row)
        assert prompt is not None  # all rows fit
        return prompt


class PromptsOfRows(Prompts):
    """Prompts of rows that are all there."""

    def __init__(self, rows: Sequence[Row], encoder: PromptEncoder, taken: int) -> None:
        super().__init__(encoder, taken)
        self.rows = rows

    def columns_beside(self, prompt: Prompt, offset: int) -> Mapping[str, Any] | None:
        return data_columns(self.rows[(prompt.row + offset) % len(self.rows)])

    def _of_row(self, number: int) -> Prompt:
        return replace(self._encode(self.rows[number]), row=number)


class PromptStream(PromptsOfRows):
    """Prompts without end, epoch after epoch, in the sampler's order, from its position on; all rows fit
    (`PromptEncoder.fitting`)."""

    def __init__(self, rows: Sequence[Row], encoder: PromptEncoder, sampler: PromptSampler) -> None:
        super().__init__(rows, encoder, int(sampler.state_dict()["drawn"]))
        self._sampler = sampler

    def _next(self) -> Prompt:
        return self._of_row(self._sampler.draw())


class StreamedPrompts(Prompts):
    """Prompts of rows that are read, from the beginning, as they are needed (`--streaming true`). Of those that the run
    has `taken` the `digest` must be the same."""

    def __init__(self, rows: RowStream, encoder: PromptEncoder, taken: int, digest: str) -> None:
        super().__init__(encoder, taken, digest)
        self._rows = self._read(rows)

    def _read(self, rows: RowStream) -> Iterator[tuple[Row, str]]:
        """Yields the rows after those taken, each with the hash of all up to it. Raises UsageError as the rows do, and
        where those taken are not what they were."""
        before = self.taken
        expected = self.digest
        digest = ""
        for number, row in enumerate(rows):
            digest = chained(digest, row)
            if number + 1 == before and digest != expected:
                raise UsageError(
                    "the data that the run has read so far is not what it was: it cannot be resumed"
                )
            if number >= before:
                yield row, digest

    def _next(self) -> Prompt:
        try:
            row, digest = next(self._rows)
            prompt = self._encode(row)
        except UsageError as error:
            raise RunFailed(f"--streaming true: {error}") from error
        self.digest = digest
        return prompt


class ChosenPrompts(PromptsOfRows):
    """Prompts of the rows that a sampler chooses when they are taken."""

    def __init__(
        self, rows: Sequence[Row], encoder: PromptEncoder, choices: Choices, taken: int
    ) -> None:
        super().__init__(rows, encoder, taken)
        self._choices = choices

    def choose(self, count: int, round_: int) -> None:
        self._choices.choose(self.taken + count, round_)

    def _next(self) -> Prompt:
        return self._of_row(self._choices.row(self.taken))


class MixedPrompts:
    """The prompts of a run: those of each of its tasks."""

    def __init__(self, tasks: Mapping[str, Prompts]) -> None:
        self._tasks = tasks

    @property
    def positions(self) -> Positions:
        return {name: Position(one.taken, one.digest) for name, one in self._tasks.items()}

    def take(self, tasks: Sequence[str], round_: int) -> list[Prompt]:
        """Returns the next prompt of each of these tasks, for this round. Raises as `Prompts.take`."""
        coming = {
            name: iter(self._tasks[name].take(count, round_))
            for name, count in Counter(tasks).items()
        }
        return [replace(next(coming[name]), task=name) for name in tasks]

    def columns_beside(self, prompt: Prompt, offset: int) -> Mapping[str, Any] | None:
        """Returns as `Prompts.columns_beside`, of the prompt's own task."""
        return self._tasks[prompt.task].columns_beside(prompt, offset)
