"""Completions from any endpoint of OpenAI's protocol: `/v1/models`, then chat completions, or completions of token ids.

One request per completion, each with its own seed.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import httpx

from swift_r1.data.images import ImageFile, in_parts
from swift_r1.data.prompt_templates import template_arguments
from swift_r1.data.prompts import Prompt
from swift_r1.errors import RunFailed, ServerUnreachable, SwiftError, UsageError, a_kind
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.lab.evaluation.engine import BenchmarkQuestion, EvalEngine, OnWritten, Written
from swift_r1.training.evaluation.questions import evaluation_seeds
from swift_r1.wire.client import other_key
from swift_r1.wire.urls import is_loopback

_logger = logging.getLogger("swift_r1.lab.evaluation")

_CONNECT_S = 10.0
_TRANSIENT = frozenset((408, 409, 425, 429, *range(500, 600)))
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LONGEST_ASKED_S = 600.0  # that `Retry-After` may ask for
_STOP_TOKENS = "stop_token_ids"  # not OpenAI's, but vLLM's and SGLang's
_KINDS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"RIFF": "webp"}
"""Of images by how their files begin; there are no others (`data/image_files.py`)."""
_SEEDS = 2**31  # what every endpoint takes


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Returns a prompt's messages in OpenAI's form, its images in data URLs."""
    if not prompt.images:
        return list(map(dict, prompt.messages))
    coming = iter(prompt.images)
    messages = list(map(in_parts, prompt.messages))
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [
                _image_part(next(coming)) if part["type"] == "image" else part
                for part in message["content"]
            ]
    return messages


def _image_part(image: ImageFile) -> dict[str, Any]:
    data = image.read()
    kind = next(kind for beginning, kind in _KINDS.items() if data.startswith(beginning))
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def http_options(args: EvalArguments) -> dict[str, Any]:
    """Returns the options of an httpx client for `--model URL`."""
    return {
        "base_url": args.base_url,
        "headers": {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {},
        # Proxies of the environment are for the internet, not for a server on this machine.
        "trust_env": not is_loopback(args.base_url),
        "verify": ssl.create_default_context() if args.base_url.startswith("https:") else True,
    }


class EndpointEngine(EvalEngine):
    """An endpoint. `tokenizer` renders the prompts, which are then sent as token ids (`/v1/completions`); without one
    messages are sent. Raises ServerUnreachable: it does not answer within `--vllm_server_timeout`; UsageError: another
    key is wanted, or the model must be named."""

    def __init__(self, args: EvalArguments, tokenizer: Any = None) -> None:
        self._args = args
        self.tokenizer = tokenizer
        self._path = "/v1/chat/completions" if tokenizer is None else "/v1/completions"
        self._options = http_options(args) | {
            "timeout": httpx.Timeout(args.request_timeout, connect=_CONNECT_S),
            "limits": httpx.Limits(max_connections=args.max_concurrent_requests),
        }
        self._limit = "max_tokens"
        self._stops_by_token = True
        self._failing_since: float | None = None
        self._model = self._chosen(asyncio.run(self._models()))
        self.facts = {
            "engine": "openai",
            "endpoint": self._path.removeprefix("/v1/"),
            "served_model": self._model,
        }

    def generate(self, questions: Sequence[BenchmarkQuestion], on_written: OnWritten) -> None:
        """Asks all questions, `--max_concurrent_requests` at a time, in their order. Raises RunFailed: the endpoint
        refuses a request, or answers with something else; ServerUnreachable: nothing was answered for
        `--vllm_server_timeout` seconds."""
        self._failing_since = None
        try:
            asyncio.run(self._generate(questions, on_written))
        except* SwiftError as errors:
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None

    async def _generate(
        self, questions: Sequence[BenchmarkQuestion], on_written: OnWritten
    ) -> None:
        slots = asyncio.Semaphore(self._args.max_concurrent_requests)
        async with httpx.AsyncClient(**self._options) as http, asyncio.TaskGroup() as group:

            async def one(question: BenchmarkQuestion, seed: int) -> Written:
                async with slots:
                    return await self._complete(http, question, seed)

            async def whole(question: BenchmarkQuestion) -> None:
                seeds = evaluation_seeds(
                    self._args.seed, question.prompt.prompt_id, question.task.num_generations
                )
                on_written(question, await asyncio.gather(*(one(question, seed) for seed in seeds)))

            # A question's requests are queued together, so the first questions are done first.
            for question in questions:
                group.create_task(whole(question))

    async def _complete(
        self, http: httpx.AsyncClient, question: BenchmarkQuestion, seed: int
    ) -> Written:
        what = question.prompt.prompt_id
        while True:
            body = self._body(question, seed)
            response = await self._answer(http, self._path, what, body)
            if response.status_code == 200:
                written = self._read(self._json(response), what)
                if written.finish_reason != "abort":
                    self._failing_since = None
                    return written
                await self._pause(f"{self._args.base_url} does not finish {what}: aborted", 0)
            elif not self._adapts(body, response):
                raise RunFailed(
                    f"{self._args.base_url} refuses {what}: {response.status_code} {_sentence(response)}"
                )

    def _body(self, question: BenchmarkQuestion, seed: int) -> dict[str, Any]:
        task = question.task
        prompt = question.prompt
        body: dict[str, Any] = {
            "model": self._model,
            self._limit: task.max_completion_length,
            "temperature": task.temperature,
            "top_p": task.top_p,
            "seed": seed % _SEEDS,
        }
        if self._args.stop_words:
            body["stop"] = list(self._args.stop_words)
        if (
            self._stops_by_token
            and prompt.turn_end is not None
            and prompt.turn_end != self.tokenizer.eos_token_id
        ):
            body[_STOP_TOKENS] = [prompt.turn_end]
        if self.tokenizer is None:
            arguments = template_arguments(task.enable_thinking, task.chat_template_kwargs)
            if arguments:
                body["chat_template_kwargs"] = arguments  # not OpenAI's, but vLLM's and SGLang's
            return body | {"messages": _messages(prompt)}
        return body | {"prompt": list(prompt.token_ids)}

    def _adapts(self, body: Mapping[str, Any], refused: httpx.Response) -> bool:
        """Returns whether to repeat a refused request in another form, which the next body has."""
        said = _sentence(refused)
        if self._limit == "max_tokens" and "max_completion_tokens" in said:
            self._limit = "max_completion_tokens"  # OpenAI's newer models know only this name
        if self._limit not in body and refused.status_code == 400:
            return True
        if _STOP_TOKENS not in body or _STOP_TOKENS not in said:
            return False
        _logger.warning(
            "%s knows no %s: completions end at its own end tokens", self._path, _STOP_TOKENS
        )
        self._stops_by_token = False
        return True

    async def _answer(
        self,
        http: httpx.AsyncClient,
        path: str,
        what: str,
        body: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        """Returns the first answer that is not a transient failure."""
        for attempt in count():
            asked = ""
            try:
                response = await (
                    http.get(path, timeout=_CONNECT_S)
                    if body is None
                    else http.post(path, json=body)
                )
                if response.status_code not in _TRANSIENT:
                    return response
                cause = f"{response.status_code} {_sentence(response)}"
                asked = response.headers.get("retry-after", "")
            except httpx.HTTPError as error:
                cause = str(error) or type(error).__name__
            await self._pause(
                f"{self._args.base_url} does not answer {what}: {cause}", attempt, asked
            )
        raise AssertionError("unreachable")

    async def _pause(self, cause: str, attempt: int, asked: str = "") -> None:
        """Before the next attempt; `asked` is what `Retry-After` said, in seconds. Raises ServerUnreachable where too
        much time has passed since the first failure without an answer."""
        longest = self._args.vllm_server_timeout
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            _logger.warning("%s; trying again for up to %g s", cause, longest)
        if time.monotonic() - self._failing_since >= longest:
            raise ServerUnreachable(f"{cause} (nothing was answered for {longest:g} s)")
        try:
            least = min(max(float(asked), 0.0), _LONGEST_ASKED_S)
        except ValueError:
            least = 0.0
        pause = min(_FIRST_PAUSE_S * 2 ** min(attempt, 10), _LONGEST_PAUSE_S)
        await asyncio.sleep(least + pause * random.uniform(0.5, 1.0))

    def _read(self, answer: Any, what: str) -> Written:
        url = self._args.base_url
        try:
            (choice,) = answer["choices"]
            text = choice["message"]["content"] if self.tokenizer is None else choice["text"]
            reason = choice["finish_reason"]
        except (KeyError, TypeError, ValueError) as error:
            raise RunFailed(
                f"{url} answers {what} with no completion of OpenAI's form: {error!r}"
            ) from error
        if not isinstance(text, str | None) or not isinstance(reason, str | None):
            raise RunFailed(f"{url} answers {what} with {a_kind(text)} as text")
        usage = answer.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return Written(text or "", tokens if isinstance(tokens, int) else None, reason or "stop")

    async def _models(self) -> list[str]:
        url = self._args.base_url
        async with httpx.AsyncClient(**self._options) as http:
            response = await self._answer(http, "/v1/models", "/v1/models")
        if response.status_code != 200:
            cause = f"{response.status_code} {_sentence(response)}"
            if response.status_code in (401, 403):
                raise UsageError(f"{other_key(url, bool(self._args.api_key))}: {cause}")
            raise UsageError(f"{url}/v1/models: {cause}: is it an endpoint of OpenAI's protocol?")
        try:
            return [str(one["id"]) for one in self._json(response)["data"]]
        except (KeyError, TypeError) as error:
            raise UsageError(f"{url}/v1/models answers with no list of models") from error

    def _chosen(self, names: Sequence[str]) -> str:
        served = self._args.served_model_name
        shown = ", ".join(names[:10])
        if served is not None:
            if names and served not in names:
                raise UsageError(f"--served_model_name {served}: {self._args.base_url} has {shown}")
            return served
        if len(names) == 1:
            return names[0]
        raise UsageError(
            f"{self._args.base_url} has {len(names)} models ({shown or 'none that it lists'}): "
            "name one with --served_model_name"
        )

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise RunFailed(
                f"{self._args.base_url} answers with no JSON: {response.text[:100]!r}"
            ) from error


def _sentence(response: httpx.Response) -> str:
    """Returns the endpoint's message in one line."""
    try:
        content = response.json()
        error = (
            content.get("error", content.get("detail", content))
            if isinstance(content, dict)
            else content
        )
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:300]
