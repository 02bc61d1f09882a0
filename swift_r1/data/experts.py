"""Questions with their answers, of which the answers are learned: the rows of `--chord_sft_dataset`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swift_r1.data.prepare import report_drops, require_rows
from swift_r1.data.preprocessors import Preprocess, Row, RowFault, preprocess_row
from swift_r1.data.prompts import PromptEncoder
from swift_r1.data.resolve import open_sources
from swift_r1.data.rows import Drops, as_list, preprocessed
from swift_r1.data.sampler import PromptSampler, permutation
from swift_r1.data.sources import DataFlags

_logger = logging.getLogger("swift_r1.data")
_ANSWER = "answer of an expert"  # a column's name, which no data set has


@dataclass(frozen=True)
class ExpertAnswers:
    """Prompts with answers, in the order of a `PromptSampler`."""

    rows: Sequence[Row]
    encoder: PromptEncoder
    longest: int  # tokens of an answer; it is cut to them
    seed: int

    def drawn(self, first: int, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns the `first`th row that a run takes and those after it, as the tokens of prompt and answer."""
        order = PromptSampler(len(self.rows), count, seed=self.seed)
        order.load_state_dict(order.state_dict() | {"drawn": first})
        return [self._tokens(self.rows[number]) for number in next(order)]

    def _tokens(self, row: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
        prompt = self.encoder.encode(row)
        assert prompt is not None  # longer ones are left out
        return prompt.token_ids, self._answer(row)[: self.longest]

    def _answer(self, row: Row) -> tuple[int, ...]:
        """Returns an answer as the model would write it, with what ends its turn."""
        encoder = self.encoder
        text = row[_ANSWER].removeprefix(encoder.response_prefix)
        return encoder.tokenize(text + encoder.plain_end.written)

    def too_long(self) -> int:
        """Returns how many answers are cut; few are tokenised, since there are never more tokens than bytes."""
        long = (row for row in self.rows if len(row[_ANSWER].encode()) >= self.longest)
        return sum(len(self._answer(row)) > self.longest for row in long)


def load_answers(
    values: Sequence[str], flags: DataFlags, encoder: PromptEncoder, longest: int
) -> ExpertAnswers:
    """Returns the rows of data sets, written like `--dataset`, whose last message is an answer. Raises UsageError as
    `load_rows`, and where no row has one."""
    rows: list[Row] = []
    for source in open_sources(values, use_hf=flags.use_hf):
        drops = Drops()
        wanted = source.spec.sample
        of_subset = {name: _with_answer(one) for name, one in source.of_subset.items()}
        answered = replace(source, preprocess=_with_answer(source.preprocess), of_subset=of_subset)
        raws = source.rows("train", wanted, flags.seed)
        found = list(preprocessed(answered, raws, flags, drops))
        require_rows(source, len(found), drops)
        report_drops(source, drops)
        if wanted is not None:
            order = (
                permutation(len(found), f"{flags.seed}:experts")
                if flags.dataset_shuffle
                else range(len(found))
            )
            found = [found[order[place % len(found)]] for place in range(wanted)]
        rows += found
    answers = ExpertAnswers(encoder.fitting(rows, "expert"), encoder, longest, flags.seed)
    cut = answers.too_long()
    if cut:
        text = "--chord_sft_dataset: %d of %d answers are cut to --max_completion_length %d tokens"
        _logger.warning(text, cut, len(answers.rows), longest)
    return answers


def _with_answer(preprocess: Preprocess) -> Preprocess:
    """`preprocess`, whose rows keep their last message, an answer, as a column."""

    def keeping(row: Row) -> list[Row]:
        return [{**one, _ANSWER: _answer(one)} for one in as_list(preprocess_row(preprocess, row))]

    return keeping


def _answer(row: Row) -> str:
    messages = row.get("messages") or [{}]
    if messages[-1].get("role") != "assistant" or not messages[-1].get("content"):
        raise RowFault("no answer: the last message is not the assistant's")
    return str(messages[-1]["content"])
