"""Completions from any endpoint of OpenAI's protocol: `/v1/models`, then chat completions, or completions of token ids.

One request a completion, each with its own seed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from swift_r1.arguments.server import LOOPBACK
from swift_r1.errors import RunFailed, ServerUnreachable, SwiftError, UsageError
from swift_r1.evaluation.engines.base import OnWritten, Question, Written, seeds_of

_logger = logging.getLogger("swift_r1.evaluation")

_CONNECT_S = 10.0
_TRANSIENT = frozenset((408, 409, 425, 429, *range(500, 600)))
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LONGEST_ASKED_S = 600.0  # that `Retry-After` may ask for
_STOP_TOKENS = "stop_token_ids"  # not OpenAI's, but vLLM's and SGLang's
_SEEDS = 2**31  # what every endpoint takes


class EndpointEngine:
    """The `Engine` of an endpoint.

    Args:
        base_url: without `/v1`.
        served: which of its models; None for the only one.
        concurrency: requests at once.
        timeout_s: seconds without one answer after which a failure is no longer transient.
        request_timeout_s: longest wait for one answer.
        tokenizer: renders the prompts, which are then sent as token ids (`/v1/completions`); None to send messages.

    Raises:
        ServerUnreachable: it does not answer within `timeout_s`.
        UsageError: another key is wanted, or the model must be named.
    """

    max_model_length: int | None = None

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        served: str | None,
        concurrency: int,
        timeout_s: float,
        request_timeout_s: float,
        seed: int,
        stop: Sequence[str],
        tokenizer: Any = None,
    ) -> None:
        self.base_url, self._concurrency, self._timeout_s = base_url.rstrip("/"), concurrency, timeout_s
        self._seed, self._stop, self.tokenizer = seed, list(stop), tokenizer
        self._render = tokenizer is not None
        self._options: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": httpx.Timeout(request_timeout_s, connect=_CONNECT_S),
            "limits": httpx.Limits(max_connections=concurrency),
            # Proxies of the environment are for the internet, not for a server beside us.
            "trust_env": httpx.URL(self.base_url).host not in LOOPBACK,
            "verify": ssl.create_default_context() if self.base_url.startswith("https:") else True,
        }
        self._limit = "max_tokens"
        self._stops_by_token = True
        self._model = self._chosen(asyncio.run(self._models()), served)
        self.facts: Mapping[str, Any] = {
            "engine": "openai",
            "endpoint": "completions" if self._render else "chat/completions",
            "served_model": self._model,
        }

    def start(self) -> None: ...

    def close(self) -> None: ...

    def generate(self, questions: Sequence[Question], on_written: OnWritten) -> None:
        """All questions, `concurrency` requests at a time, in their order.

        Raises:
            RunFailed: the endpoint refuses a request, or answers with something else.
            ServerUnreachable: nothing was answered for `timeout_s` seconds.
        """
        try:
            asyncio.run(self._generate(questions, on_written))
        except* SwiftError as errors:
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None

    async def _generate(self, questions: Sequence[Question], on_written: OnWritten) -> None:
        patience = _Patience(self._timeout_s)
        slots = asyncio.Semaphore(self._concurrency)
        async with httpx.AsyncClient(**self._options) as http, asyncio.TaskGroup() as group:

            async def one(question: Question, seed: int) -> Written:
                async with slots:
                    return await self._complete(http, question, seed, patience)

            async def whole(question: Question) -> None:
                seeds = seeds_of(self._seed, question)
                on_written(question, await asyncio.gather(*(one(question, seed) for seed in seeds)))

            # A question's requests are queued together, so the first questions are done first.
            for question in questions:
                group.create_task(whole(question))

    async def _complete(self, http: httpx.AsyncClient, question: Question, seed: int, patience: _Patience) -> Written:
        path = "/v1/completions" if self._render else "/v1/chat/completions"
        while True:
            answer = await self._post(http, path, self._body(question, seed), question.prompt.prompt_id, patience)
            if answer is None:
                continue
            written = self._read(answer, question.prompt.prompt_id)
            if written.finish_reason != "abort":
                patience.answered()
                return written
            patience.failed(f"{self.base_url} does not finish {question.prompt.prompt_id}: aborted")
            await asyncio.sleep(_pause(_FIRST_PAUSE_S, None))

    def _body(self, question: Question, seed: int) -> dict[str, Any]:
        task, prompt = question.task, question.prompt
        body: dict[str, Any] = {
            "model": self._model,
            self._limit: task.max_completion_length,
            "temperature": task.temperature,
            "top_p": task.top_p,
            "seed": seed % _SEEDS,
        }
        if self._stop:
            body["stop"] = self._stop
        if self._stops_by_token and prompt.turn_end is not None and prompt.turn_end != self.tokenizer.eos_token_id:
            body[_STOP_TOKENS] = [prompt.turn_end]
        if self._render:
            return body | {"prompt": list(prompt.token_ids)}
        return body | {"messages": list(map(dict, prompt.messages))}

    async def _post(
        self, http: httpx.AsyncClient, path: str, body: Mapping[str, Any], what: str, patience: _Patience
    ) -> Any:
        """The answer's JSON; None where the request is to be made anew in another form."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                response = await http.post(path, json=body)
            except httpx.HTTPError as error:
                cause, wait = f"{what}: {error or type(error).__name__}", None
            else:
                if response.status_code == 200:
                    return _json(response, self.base_url)
                cause, wait = f"{what}: {response.status_code} {_sentence(response)}", response.headers
                if response.status_code not in _TRANSIENT:
                    if self._limit == "max_tokens" and "max_completion_tokens" in _sentence(response):
                        self._limit = "max_completion_tokens"  # OpenAI's newer models know only this name
                    if self._limit not in body and response.status_code == 400:
                        return None
                    if _STOP_TOKENS in body and _STOP_TOKENS in _sentence(response):
                        _logger.warning("%s knows no %s: completions end at its own end tokens", path, _STOP_TOKENS)
                        self._stops_by_token = False
                        return None
                    raise RunFailed(f"{self.base_url} refuses {cause}")
            patience.failed(f"{self.base_url} does not answer {cause}")
            await asyncio.sleep(_pause(pause, wait))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _read(self, answer: Any, what: str) -> Written:
        try:
            (choice,) = answer["choices"]
            text = choice["text"] if self._render else choice["message"]["content"]
            reason = choice["finish_reason"]
        except (KeyError, TypeError, ValueError) as error:
            raise RunFailed(f"{self.base_url} answers {what} with no completion of OpenAI's form: {error!r}") from error
        if not isinstance(text, str | None) or not isinstance(reason, str | None):
            raise RunFailed(f"{self.base_url} answers {what} with a {type(text).__name__} as text")
        usage = answer.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return Written(text or "", tokens if isinstance(tokens, int) else None, reason or "stop")

    async def _models(self) -> list[str]:
        """Names of its models."""
        patience, pause = _Patience(self._timeout_s), _FIRST_PAUSE_S
        async with httpx.AsyncClient(**self._options) as http:
            while True:
                try:
                    response = await http.get("/v1/models", timeout=_CONNECT_S)
                    cause = f"{response.status_code} {_sentence(response)}"
                    if response.status_code == 200:
                        return _names(_json(response, self.base_url), self.base_url)
                    if response.status_code in (401, 403):
                        raise UsageError(f"{self.base_url} wants another API key (--api_key): {cause}")
                    if response.status_code not in _TRANSIENT:
                        raise UsageError(f"{self.base_url}/v1/models: {cause}: is it an endpoint of OpenAI's protocol?")
                except httpx.HTTPError as error:
                    cause = str(error) or type(error).__name__
                patience.failed(f"no answer from {self.base_url}/v1/models: {cause}")
                await asyncio.sleep(_pause(pause, None))
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _chosen(self, names: Sequence[str], served: str | None) -> str:
        if served is not None:
            if names and served not in names:
                raise UsageError(f"--served_model_name {served}: {self.base_url} has {', '.join(names[:10])}")
            return served
        if len(names) == 1:
            return names[0]
        shown = ", ".join(names[:10]) or "none that it lists"
        raise UsageError(f"{self.base_url} has {len(names)} models ({shown}): name one with --served_model_name")


class _Patience:
    """How long failures are borne: until nothing was answered for `seconds`, counted from the first failure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def answered(self) -> None:
        self._since = None

    def failed(self, cause: str) -> None:
        """Raises ServerUnreachable where it is over."""
        if self._since is None:
            self._since = time.monotonic()
            _logger.warning("%s; trying again for up to %g s", cause, self._seconds)
        if time.monotonic() - self._since >= self._seconds:
            raise ServerUnreachable(f"{cause} (nothing was answered for {self._seconds:g} s)")


def _pause(seconds: float, headers: Mapping[str, str] | None) -> float:
    """What the endpoint asks for, else a growing time; spread, so that not all come back at once."""
    try:
        asked = float((headers or {}).get("retry-after", ""))
    except ValueError:
        asked = 0.0
    return min(max(asked, 0.0), _LONGEST_ASKED_S) + seconds * random.uniform(0.5, 1.0)


def _json(response: httpx.Response, base_url: str) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise RunFailed(f"{base_url} answers with no JSON: {response.text[:100]!r}") from error


def _names(answer: Any, base_url: str) -> list[str]:
    try:
        return [str(one["id"]) for one in answer["data"]]
    except (KeyError, TypeError) as error:
        raise UsageError(f"{base_url}/v1/models answers with no list of models") from error


def _sentence(response: httpx.Response) -> str:
    """The endpoint's own words in one line."""
    try:
        content = response.json()
        error = content.get("error", content.get("detail", content)) if isinstance(content, dict) else content
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:300]
