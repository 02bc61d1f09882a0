"""Engines of `swift eval`: their interface, and transformers in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.data.prompts import Prompt
from swift_r1.flags.adapters import adapters_base
from swift_r1.flags.eval_tasks import EvalTask
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.training.evaluation.questions import evaluation_seeds
from swift_r1.wire.protocol import Completion, RolloutOutput, RolloutRequest, SamplingParams

if TYPE_CHECKING:
    from swift_r1.serving.engines.transformers import TransformersEngine

_OWN_FILES = frozenset((".safetensors", ".bin", ".json", ".model", ".jinja", ".txt"))


@dataclass(frozen=True, slots=True)
class BenchmarkQuestion:
    """A prompt, which is asked `task.num_generations` times."""

    task: EvalTask
    prompt: Prompt

    @property
    def key(self) -> tuple[str, str]:
        return self.task.name, self.prompt.prompt_id


@dataclass(frozen=True, slots=True)
class Written:
    """One completion. `tokens` and `weight_version` are None where the endpoint does not tell."""

    text: str
    tokens: int | None
    finish_reason: str
    weight_version: int | None = None


OnWritten = Callable[[BenchmarkQuestion, Sequence[Written]], None]
"""Given all completions of a question, in the order of their seeds; called from the thread that generates."""


class EvalEngine:
    """Writes completions."""

    # what the completions depend on, for the report; a folder is continued only with the same
    facts: Mapping[str, Any]
    # tokens of prompt and completion; None where it is not known
    max_model_length: int | None = None
    tokenizer: Any  # None where the other end renders the prompts

    def start(self) -> None:
        """Loads what has to be loaded, or raises SwiftError; not called where nothing is left to write."""

    def generate(self, questions: Sequence[BenchmarkQuestion], on_written: OnWritten) -> None:
        """Completions of all questions, each question's as soon as all of them are there. Raises SwiftError: one
        failed; those of other questions were handed over."""
        raise NotImplementedError

    def close(self) -> None: ...


def rollout_request(
    question: BenchmarkQuestion,
    request_id: str,
    args: EvalArguments,
    stop_token_ids: Sequence[int] = (),
) -> RolloutRequest:
    """Returns the question as token ids for an engine that takes them; its template's end of a turn ends it too."""
    task = question.task
    end = question.prompt.turn_end
    return RolloutRequest(
        request_id=request_id,
        prompt_token_ids=question.prompt.token_ids,
        n=task.num_generations,
        seeds=evaluation_seeds(args.seed, question.prompt.prompt_id, task.num_generations),
        sampling=SamplingParams(
            max_tokens=task.max_completion_length,
            temperature=task.temperature,
            top_p=task.top_p,
            stop=tuple(args.stop_words),
            stop_token_ids=(*stop_token_ids, *(() if end is None else (end,))),
        ),
    )


def written_of(
    completions: Iterable[Completion], tokenizer: Any, with_version: bool
) -> list[Written]:
    texts = (
        (one, tokenizer.decode(one.token_ids, skip_special_tokens=True)) for one in completions
    )
    return [
        Written(
            text,
            len(one.token_ids),
            one.finish_reason,
            one.weight_version if with_version else None,
        )
        for one, text in texts
    ]


def model_sha256(model: str) -> str:
    """Hashes the names and contents of a model's own files, in order; with adapters, those of the base model too."""
    folder = Path(model).expanduser()
    if not folder.is_dir():  # an id, which the check of `--model` has put into the hub's cache
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, local_files_only=True))
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _OWN_FILES:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
    base = adapters_base(model)
    if base is not None:
        digest.update(f"base {model_sha256(base)}\n".encode())
    return digest.hexdigest()


def config_of(args: EvalArguments) -> tuple[str, int | None]:
    from swift_r1.models.shape import transformers_config

    config = transformers_config(adapters_base(args.model) or args.model)
    own = str(config.dtype or "float32").removeprefix("torch.")
    return args.torch_dtype or own, getattr(
        config.get_text_config(), "max_position_embeddings", None
    )


class InProcessEngine(EvalEngine):
    """A model folder through transformers in this process, the engine of training without a server."""

    def __init__(self, args: EvalArguments) -> None:
        from swift_r1.models.loading import load_tokenizer

        self._args = args
        self.tokenizer = load_tokenizer(args.model)
        dtype, self.max_model_length = config_of(args)
        self.facts = {
            "engine": "transformers",
            "engine_version": version("transformers"),
            "dtype": dtype,
        }
        self._engine: TransformersEngine | None = None

    def start(self) -> None:
        import torch

        from swift_r1.lab.folder_engine import load_folder_engine
        from swift_r1.serving.engines.checks import check_engine

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._engine = load_folder_engine(
            self._args.model, self.tokenizer, self._args.torch_dtype, device
        )
        check_engine(self._engine)

    def generate(self, questions: Sequence[BenchmarkQuestion], on_written: OnWritten) -> None:
        """Answers the questions in order, as many of one task at once as the batch size holds."""
        assert self._engine is not None
        parts: list[list[BenchmarkQuestion]] = []
        for question in questions:
            size = max(1, self._args.per_device_eval_batch_size // question.task.num_generations)
            if not parts or parts[-1][0].task != question.task or len(parts[-1]) == size:
                parts.append([])
            parts[-1].append(question)
        ends = self._engine.eos.tolist()
        for part in parts:
            requests = [
                rollout_request(question, str(number), self._args, ends)
                for number, question in enumerate(part)
            ]

            def ended(
                number: int, output: RolloutOutput, part: Sequence[BenchmarkQuestion] = part
            ) -> None:
                on_written(
                    part[number], written_of(output.completions, self.tokenizer, with_version=False)
                )

            self._engine.generate(requests, 0, on_output=ended)

    def close(self) -> None:
        self._engine = None
