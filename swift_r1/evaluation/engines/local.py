"""Completions from a transformers model in this process: the engine that training without a server evaluates with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from swift_r1.evaluation.engines.base import OnWritten, Question, Written, request_of
from swift_r1.evaluation.model import base_of
from swift_r1.wire.protocol import RolloutOutput


class LocalEngine:
    """The `Engine` of a model folder.

    Args:
        dtype: of the weights; None as the model's config says.
        batch_size: completions that are written together.
        stop: strings that end a completion.
    """

    def __init__(self, model: str, dtype: str | None, batch_size: int, seed: int, stop: Sequence[str]) -> None:
        from transformers import AutoConfig

        from swift_r1.models.loading import load_tokenizer

        self._path, self._dtype, self._batch_size, self._seed, self._stop = model, dtype, batch_size, seed, stop
        self.tokenizer = load_tokenizer(model)
        config = AutoConfig.from_pretrained(base_of(model) or model)
        self.max_model_length: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
        own = str(config.dtype or "float32").removeprefix("torch.")
        self.facts: Mapping[str, Any] = {
            "engine": "transformers",
            "engine_version": version("transformers"),
            "dtype": dtype or own,
        }
        self._engine: Any = None
        self._ends: tuple[int, ...] = ()

    def start(self) -> None:
        import torch

        from swift_r1.inference.engines.checks import check_engine
        from swift_r1.inference.engines.transformers import TransformersEngine
        from swift_r1.models.loading import end_tokens, load_model

        model = load_model(self._path, self._dtype, gradient_checkpointing=False)
        model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu")).requires_grad_(False)
        self._ends = end_tokens(model, self.tokenizer)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self._ends[0]
        self._engine = TransformersEngine(model, self.tokenizer, self._ends, pad)
        check_engine(self._engine, self._engine.config.vocab_size)

    def generate(self, questions: Sequence[Question], on_written: OnWritten) -> None:
        """In the order given, so many questions at once as the batch size holds, of one task at a time."""
        for part in self._parts(questions):
            requests = [request_of(one, str(i), self._seed, self._stop, self._ends) for i, one in enumerate(part)]

            def ended(number: int, output: RolloutOutput, part: Sequence[Question] = part) -> None:
                on_written(part[number], [self._written(completion) for completion in output.completions])

            self._engine.generate(requests, 0, on_output=ended)

    def close(self) -> None:
        self._engine = None

    def _parts(self, questions: Sequence[Question]) -> list[list[Question]]:
        parts: list[list[Question]] = []
        for one in questions:
            size = questions_at_once(self._batch_size, one.task.num_generations)
            if not parts or parts[-1][0].task != one.task or len(parts[-1]) == size:
                parts.append([])
            parts[-1].append(one)
        return parts

    def _written(self, completion: Any) -> Written:
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return Written(text, len(completion.token_ids), completion.finish_reason)


def questions_at_once(batch_size: int, n: int) -> int:
    """Questions whose completions make a batch, at least one."""
    return max(1, batch_size // n)
