"""Questions with their answers, of which the answers are learned: the rows of `--chord_sft_dataset`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swift_r1.data.conversations import ConversationEncoder
from swift_r1.data.loading import load_rows
from swift_r1.data.preprocessors import Row
from swift_r1.data.sampler import PromptSampler
from swift_r1.data.sources import DataFlags


@dataclass(frozen=True)
class ExpertAnswers:
    """Conversations, of which the last answers are learned, in the order of a `PromptSampler`."""

    rows: Sequence[Row]
    encoder: ConversationEncoder
    seed: int

    def drawn(self, first: int, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns the `first`th row that a run takes and those after it, as the tokens of prompt and answer."""
        order = PromptSampler(len(self.rows), count, seed=self.seed)
        order.load_state_dict(order.state_dict() | {"drawn": first})
        return [self._tokens(self.rows[number]) for number in next(order)]

    def _tokens(self, row: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
        last = self.encoder.sequences(row)[-1]
        return last.token_ids[: last.begin], last.token_ids[last.begin :]


def load_answers(
    values: Sequence[str], flags: DataFlags, encoder: ConversationEncoder
) -> ExpertAnswers:
    """Returns the rows of data sets, written like `--dataset`, that fit. Raises UsageError as `load_rows`, and where the
    chat template does not render an answer behind its prompt."""
    own = replace(
        flags,
        dataset=values,
        val_dataset=(),
        split_dataset_ratio=0.0,
        interleave_prob=None,
        columns={},
        streaming=False,
        evaluates=False,
        whole=True,
    )
    rows = encoder.fitting(load_rows(own).train, "expert")
    for row in rows:  # now, and not in the middle of the run
        encoder.sequences(row)
    return ExpertAnswers(rows, encoder, flags.seed)
