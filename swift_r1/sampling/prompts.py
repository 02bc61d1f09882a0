"""The stream of prompts a run trains on: sampled, rendered and tokenised, by worker processes if asked."""

from __future__ import annotations

import logging
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from swift_r1.data.preprocessors import Row
from swift_r1.data.prompts import Prompt, PromptEncoder
from swift_r1.data.sampler import PromptSampler, RowStream, chained
from swift_r1.errors import RunFailed, UsageError

logger = logging.getLogger("swift_r1.training")

T = TypeVar("T")


class Prompts(Protocol):
    """What the trainer takes its prompts from.

    Attributes:
        taken: prompts given out, those before a resume included.
        digest: a hash of what they were, where only reading the data again can tell; else empty.
    """

    taken: int
    digest: str

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; none is skipped, whatever the counts."""
        ...

    def close(self) -> None:
        """Ends the processes that prepare them."""


class _EncodedRows(Dataset[Prompt]):
    def __init__(self, rows: Sequence[Row], encoder: PromptEncoder) -> None:
        self.rows, self.encoder = rows, encoder

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self.encoder.encode(self.rows[index])
        # `PromptEncoder.fitting` has left out what is too long.
        assert prompt is not None
        return prompt


class PromptStream:
    """Prompts for ever, epoch after epoch, in the sampler's order.

    Args:
        rows: that fit (`PromptEncoder.fitting`).
        sampler: at the position that the stream begins with.
        workers: processes that encode the coming rounds (`--dataloader_num_workers`); 0 encodes here. They are
            forked at once, so make the stream before threads exist.
    """

    digest = ""

    def __init__(self, rows: Sequence[Row], encoder: PromptEncoder, sampler: PromptSampler, workers: int) -> None:
        self.taken = int(sampler.state_dict()["drawn"])  # the sampler itself runs ahead by what workers prepare
        self._waiting: list[Prompt] = []

        def load(workers: int) -> DataLoader[Any]:
            sampler.load_state_dict(sampler.state_dict() | {"drawn": self.taken + len(self._waiting)})
            return DataLoader(_EncodedRows(rows, encoder), batch_sampler=sampler, **_by(workers))

        self._rounds = _Rounds[Prompt](load, workers)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts in the sampler's order; none is skipped, whatever the counts."""
        while len(self._waiting) < count:
            self._waiting += next(self._rounds)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self.taken += count
        return taken

    def close(self) -> None:
        self._rounds.close()


@dataclass(frozen=True, slots=True)
class _Streamed:
    """A prompt, and the hash of the rows up to it; or why there is none."""

    prompt: Prompt | None
    digest: str
    fault: str = ""


class _EncodedStream(IterableDataset[_Streamed]):
    def __init__(self, rows: RowStream, encoder: PromptEncoder, taken: int, digest: str) -> None:
        self.rows, self.encoder, self.taken, self.digest = rows, encoder, taken, digest

    def __iter__(self) -> Iterator[_Streamed]:
        try:
            yield from self._prompts()
        except UsageError as error:  # from a worker process, an exception would come as its traceback
            yield _Streamed(None, "", str(error))

    def _prompts(self) -> Iterator[_Streamed]:
        digest = ""
        for number, row in enumerate(self.rows):
            digest = chained(digest, row)
            if number + 1 == self.taken and digest != self.digest:
                raise UsageError("the data that the run has read so far is not what it was: it cannot be resumed")
            if number >= self.taken:
                yield _Streamed(self.encoder.encode(row), digest)


class StreamedPrompts:
    """Prompts of rows that are read as they are needed (`--streaming true`).

    Args:
        rows: from the beginning.
        taken: how many of them the run has had; they are read again, and must be those that it had.
        digest: of these.
        round_size: prompts that are fetched at once.
        workers: a process reads ahead where it is more than 0; more than one would change the order.

    Raises:
        RunFailed: (from `take`) the data cannot be read on, or is not what it was.
    """

    def __init__(
        self, rows: RowStream, encoder: PromptEncoder, taken: int, digest: str, round_size: int, workers: int
    ) -> None:
        self.taken, self.digest = taken, digest
        self._waiting: list[_Streamed] = []

        def load(workers: int) -> DataLoader[Any]:
            stream = _EncodedStream(rows, encoder, self.taken, self.digest)  # nothing waits when a round is read
            return DataLoader(stream, batch_size=round_size, **_by(workers))

        self._rounds = _Rounds[_Streamed](load, min(workers, 1))

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts of the stream; none is skipped, whatever the counts."""
        prompts: list[Prompt] = []
        for _ in range(count):
            if not self._waiting:
                self._waiting = next(self._rounds)
            one = self._waiting.pop(0)
            if one.prompt is None:
                raise RunFailed(f"--streaming true: {one.fault}")
            prompts.append(one.prompt)
            self.taken, self.digest = self.taken + 1, one.digest
        return prompts

    def close(self) -> None:
        self._rounds.close()


class _Rounds(Generic[T]):
    """Rounds that processes prepare; where one of them dies, this process does from there on.

    Args:
        load: makes a loader with so many processes, at the place where reading goes on.
    """

    def __init__(self, load: Callable[[int], DataLoader[Any]], workers: int) -> None:
        self._load = load
        self._loaded: list[Iterator[list[T]]] = [iter(load(workers))]
        # A loader's iterator that is forgotten ends its processes. Python would wait for them before it forgets it.
        self.close = weakref.finalize(self, self._loaded.clear)
        if workers:  # torch's handler would raise the death of one wherever the trainer happens to be
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def __next__(self) -> list[T]:
        try:
            return next(self._loaded[0])
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            logger.warning("%s; the trainer's own process prepares prompts from here on", error)
            # Not by new processes: beside threads a fork may never come to work.
            self._loaded[:] = [iter(self._load(0))]
            return next(self._loaded[0])


def _by(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "collate_fn": list, "worker_init_fn": _leave_signals_to_the_trainer}


def _leave_signals_to_the_trainer(_worker: int) -> None:
    """Ctrl-C and the launcher's SIGTERM reach the whole process group; the trainer decides when its workers end,
    and they end by themselves when it dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
