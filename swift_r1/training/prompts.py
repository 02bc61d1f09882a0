"""The stream of prompts a run trains on: sampled, rendered and tokenised, by worker processes if asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from swift_r1.data.prompts import PromptEncoder
from swift_r1.data.sampler import PromptSampler
from swift_r1.data.types import Prompt
from swift_r1.errors import RunFailed

logger = logging.getLogger(__name__)


class _EncodedRows(Dataset[Prompt | None]):
    """`--dataset` rows as prompts; None where a prompt is longer than `--max_length`."""

    def __init__(self, rows: Sequence[Any], encoder: PromptEncoder) -> None:
        self.rows, self.encoder = rows, encoder

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt | None:
        return self.encoder.encode(self.rows[index])


class PromptStream:
    """Rounds of `prompts_per_round` prompts for ever, epoch after epoch.

    A prompt that is too long is dropped, counted in `too_long`, and the next one takes its place.

    Args:
        workers: processes that encode the coming rounds (`--dataloader_num_workers`); 0 encodes here.
    """

    def __init__(
        self, rows: Sequence[Any], encoder: PromptEncoder, sampler: PromptSampler, prompts_per_round: int, workers: int
    ) -> None:
        self.prompts_per_round = prompts_per_round
        self.too_long = 0
        self._loader = DataLoader(
            _EncodedRows(rows, encoder), batch_sampler=sampler, num_workers=workers, collate_fn=_as_it_is
        )
        self._limit = len(rows)
        self._stream: Iterator[Prompt | None] | None = None

    def start(self) -> None:
        """Starts the worker processes; best before DeepSpeed and its threads exist, for they are forked."""
        self._stream = (prompt for batch in self._loader for prompt in batch)

    def next_round(self) -> list[Prompt]:
        """The coming round's prompts.

        Raises:
            RunFailed: if a whole epoch of prompts was too long.
        """
        if self._stream is None:
            self.start()
        assert self._stream is not None
        prompts: list[Prompt] = []
        dropped = 0
        while len(prompts) < self.prompts_per_round:
            prompt = next(self._stream)
            if prompt is not None:
                prompts.append(prompt)
                continue
            dropped += 1
            if dropped > self._limit:
                raise RunFailed("no prompt of a whole epoch fits into --max_length: raise it")
        if dropped:
            self.too_long += dropped
            logger.warning("%d prompts longer than --max_length dropped (%d so far)", dropped, self.too_long)
        return prompts


def encode_all(rows: Sequence[Any], encoder: Callable[[Any], Prompt | None]) -> list[Prompt]:
    """The rows that fit, as prompts (for evaluation)."""
    return [prompt for prompt in map(encoder, rows) if prompt is not None]


def _as_it_is(batch: list[Prompt | None]) -> list[Prompt | None]:
    return batch
