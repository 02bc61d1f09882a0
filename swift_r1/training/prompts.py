"""The stream of prompts a run trains on: sampled, rendered and tokenised, by worker processes if asked."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from torch.utils.data import DataLoader, Dataset

from swift_r1.data.prompts import PromptEncoder
from swift_r1.data.rows import Row
from swift_r1.data.sampler import PromptSampler
from swift_r1.data.types import Prompt


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
    """Prompts for ever, epoch after epoch.

    Args:
        rows: that fit (`PromptEncoder.fitting`).
        sampler: at the position that the stream begins with.
        workers: processes that encode the coming rounds (`--dataloader_num_workers`); 0 encodes here. They are
            forked at once, so make the stream before threads exist.

    Attributes:
        taken: prompts given out, those before a resume included; the sampler itself runs ahead by what workers prepare.
    """

    def __init__(self, rows: Sequence[Row], encoder: PromptEncoder, sampler: PromptSampler, workers: int) -> None:
        self.taken = int(sampler.state_dict()["drawn"])
        loader = DataLoader(
            _EncodedRows(rows, encoder),
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=list,
            worker_init_fn=_leave_signals_to_the_trainer,
        )
        self._rounds: Iterator[list[Prompt]] = iter(loader)
        self._waiting: list[Prompt] = []

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts in the sampler's order; none is skipped, whatever the counts."""
        while len(self._waiting) < count:
            self._waiting += next(self._rounds)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self.taken += count
        return taken


def _leave_signals_to_the_trainer(_worker: int) -> None:
    """Ctrl-C and the launcher's SIGTERM reach the whole process group; the trainer decides when its workers end,
    and they end by themselves when it dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
