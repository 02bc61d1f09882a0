"""Who answers a question from the page: the run's rollout server, or a process of its own with a checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import httpx
import psutil

from swift_r1.errors import RunFailed, ServerUnreachable, UsageError, one_line
from swift_r1.flags.adapters import adapters_base
from swift_r1.flags.parser import API_KEY_VARIABLE
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.server import LOOPBACK
from swift_r1.record.folder import checkpoints_of
from swift_r1.runtime.processes import module_words
from swift_r1.wire.server_file import servers_of

T = TypeVar("T")
DEADLINE_S = 120.0  # of an answer
LOAD_S = 600.0  # of a checkpoint's first answer
IDLE_S = 600.0  # after which a checkpoint's process ends
ALTERNATIVES = 5  # the most that /v1/completions gives
_LIBRARIES = 400 << 20  # bytes that a process with PyTorch takes before it has weights
_WORKER = "swift_r1.lab.view.checkpoint_worker"
_LINE_BYTES = 64 << 20
_QUIET = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class PageQuestion:
    """A prompt (raw text, or with `chat` a user's message that the model's template renders) and how to sample."""

    prompt: str
    chat: bool = True
    n: int = 1
    temperature: float = 1.0
    max_tokens: int = 256


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One completion: its text, and its tokens' text and log-probs (natural log, after temperature)."""

    text: str  # without special tokens
    pieces: tuple[str, ...]
    logps: tuple[float, ...]
    finish_reason: str


class AnswerSource(Protocol):
    """Answers questions. Every call has a deadline, and being cancelled ends the work. Raises SwiftError in one
    line."""

    name: str  # who answers, weights included

    def ask(self, question: PageQuestion) -> Coroutine[Any, Any, list[ModelAnswer]]: ...

    async def alternatives(
        self, token_ids: Sequence[int], temperature: float
    ) -> list[tuple[str, float]]:
        """Returns the likeliest next tokens after these, and their log-probs."""
        ...


class ServerSource:
    """A `swift rollout` server, by its OpenAI routes: those who use them wait behind the trainer's own requests, and an
    update of the weights stops what they run (docs/server.md). `/v1/score` is not used, since it may keep the
    engine for itself."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self.name = f"the server at {url}"
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": httpx.Timeout(DEADLINE_S, connect=10.0),
            "trust_env": False,
            "verify": ssl.create_default_context() if url.startswith("https:") else True,
        }

    async def ask(self, question: PageQuestion) -> list[ModelAnswer]:
        body: dict[str, Any] = {
            "n": question.n,
            "temperature": question.temperature,
            "max_tokens": question.max_tokens,
        }
        if question.chat:
            body |= {"messages": [{"role": "user", "content": question.prompt}], "logprobs": True}
        else:
            body |= {"prompt": question.prompt, "logprobs": 0}
        path = "/v1/chat/completions" if question.chat else "/v1/completions"
        return await self._choices(
            path, body, lambda choices: [self._answer(choice) for choice in choices]
        )

    async def alternatives(
        self, token_ids: Sequence[int], temperature: float
    ) -> list[tuple[str, float]]:
        body = {
            "prompt": list(token_ids),
            "max_tokens": 1,
            "logprobs": ALTERNATIVES,
            "temperature": temperature,
        }
        top = await self._choices(
            "/v1/completions", body, lambda choices: dict(choices[0]["logprobs"]["top_logprobs"][0])
        )
        return sorted(top.items(), key=lambda one: -one[1])

    async def _choices(
        self, path: str, body: Mapping[str, Any], read: Callable[[list[Any]], T]
    ) -> T:
        """Returns what `read` makes of the answer's choices."""
        try:
            async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(**self._options) as http:
                models = self._content(await http.get("/v1/models"))["data"]
                answer = self._content(
                    await http.post(path, json={"model": models[0]["id"]} | dict(body))
                )
            self.name = (
                f"the server at {self.url}, weight version {answer.get('weight_version', '?')}"
            )
            return read(answer["choices"])
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise RunFailed(
                f"{self.url} does not answer as a `swift rollout` server does: {error!r}"
            ) from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise ServerUnreachable(
                f"{self.url} gave no answer within {DEADLINE_S:g} s: {one_line(error)}"
            ) from error

    def _content(self, response: httpx.Response) -> dict[str, Any]:
        try:
            content: dict[str, Any] = response.json()
        except ValueError as error:
            raise RunFailed(
                f"{self.url} answers with no JSON: is it a `swift rollout` server?"
            ) from error
        if response.status_code == 200:
            return content
        said = content.get("error", "no reason given")
        raise RunFailed(
            f"{self.url} refuses: {said.get('message', said) if isinstance(said, dict) else said}"
        )

    @staticmethod
    def _answer(choice: Mapping[str, Any]) -> ModelAnswer:
        logprobs = choice["logprobs"]
        if "content" in logprobs:
            pairs = [(one["token"], one["logprob"]) for one in logprobs["content"]]
        else:
            pairs = list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
        return ModelAnswer(
            choice["message"]["content"] if "message" in choice else choice["text"],
            tuple(text for text, _ in pairs),
            tuple(value for _, value in pairs),
            choice["finish_reason"] or "stop",
        )


class CheckpointSource:
    """A checkpoint in a process of its own, which starts with the first question and ends with this process, with
    `close`, with the start of another, or after `IDLE_S` seconds without a question. One question at a time.

    Args:
        device: `auto` for the GPU where there is one.
    """

    _loaded: ClassVar[CheckpointSource | None] = None

    def __init__(self, folder: Path, device: Literal["cpu", "auto"] = "auto") -> None:
        self.folder = folder
        self.name = folder.name
        self._device = device
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def ask(self, question: PageQuestion) -> list[ModelAnswer]:
        answers = await self._answer({"ask": asdict(question)})
        return [
            ModelAnswer(
                one["text"], tuple(one["pieces"]), tuple(one["logps"]), one["finish_reason"]
            )
            for one in answers
        ]

    async def alternatives(
        self, token_ids: Sequence[int], temperature: float
    ) -> list[tuple[str, float]]:
        asked = {
            "token_ids": list(token_ids),
            "temperature": temperature,
            "count": ALTERNATIVES,
        }
        return [(text, value) for text, value in await self._answer({"alternatives": asked})]

    def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
        self._process = None

    async def _answer(self, message: Mapping[str, Any]) -> Any:
        async with self._turn:
            process = await self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                async with asyncio.timeout(DEADLINE_S):
                    process.stdin.write(json.dumps(message).encode() + b"\n")
                    await process.stdin.drain()
                    line = await process.stdout.readline()
            except BaseException as error:
                # or the answer that nobody reads would be taken for the next question's
                self.close()
                if isinstance(error, TimeoutError):
                    raise RunFailed(
                        f"{self.name} gave no answer within {DEADLINE_S:g} s"
                    ) from error
                if isinstance(error, OSError):
                    raise RunFailed(
                        f"the process with {self.name} is gone: {one_line(error)}"
                    ) from error
                raise
        return self._content(line)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        before = CheckpointSource._loaded
        CheckpointSource._loaded = self
        if before is not None and (left := before._process) is not None:
            before.close()
            await left.wait()  # its memory is free then
        check_memory(self.folder)
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                *module_words(_WORKER, str(self.folder.absolute()), self._device, str(IDLE_S)),
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
            env=os.environ | _QUIET,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one
        )
        assert process.stdout is not None
        self._process = process
        if CheckpointSource._loaded is not self:  # meanwhile another page asked another one
            self.close()
        try:
            async with asyncio.timeout(LOAD_S):
                self._content(await process.stdout.readline())
        except BaseException as error:
            self.close()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise RunFailed(f"{self.name} was not loaded within {LOAD_S:g} s") from error
            raise
        return process

    def _content(self, line: bytes) -> Any:
        if not line:
            raise RunFailed(
                f"the process with {self.name} has ended; its message is in the page's log"
            )
        content = json.loads(line)
        if "error" in content:
            raise RunFailed(f"{self.name}: {content['error']}")
        return content["answer"]


def newest_checkpoint(run: Path, step: int | None = None) -> Path | None:
    """Returns the run's last checkpoint, or the one nearest to `step`."""
    found = checkpoints_of(run)
    if not found:
        return None
    if step is None:
        return found[max(found)]
    return found[min(found, key=lambda saved: (abs(saved - step), saved))]


def weight_bytes(folder: Path) -> int:
    """Returns the size of a model's weights on disk, and of those under its adapters where they lie in a folder."""
    size = 0
    for path in folder.glob("*.safetensors"):
        with suppress(FileNotFoundError):  # a run that goes on removes its oldest checkpoints
            size += path.stat().st_size
    base = adapters_base(str(folder))
    if base is not None and Path(base).is_dir():
        size += weight_bytes(Path(base))
    return size


def needed_bytes(folder: Path) -> int:
    """Returns about how much memory the process of a checkpoint takes: its weights, and the libraries."""
    return weight_bytes(folder) + _LIBRARIES


def check_memory(folder: Path) -> None:
    """Raises RunFailed where the process of the checkpoint in `folder` would not fit into the memory that is free."""
    needed = needed_bytes(folder)
    free = psutil.virtual_memory().available
    if needed > 0.8 * free:
        raise RunFailed(
            f"{folder.name} needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
        )


def server_urls(args: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the rollout servers of a run with these arguments; none where they are of another version, or in a file
    that is not here."""
    try:
        known = RlhfArguments.from_dict(args)
        return (
            known.rollout_base_urls
            if known.vllm_server_file is None
            else servers_of(known.vllm_server_file).urls
        )
    except (TypeError, ValueError, OSError, UsageError):
        return ()


def own_key(url: str) -> str | None:
    """Returns the key of the environment, for a server on this machine: a copied run may name any other address."""
    return os.environ.get(API_KEY_VARIABLE) if httpx.URL(url).host in LOOPBACK else None
