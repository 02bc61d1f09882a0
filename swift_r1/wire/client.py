"""The client of one rollout server. Nothing here waits without a deadline. Importing it loads no torch."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from swift_r1.errors import RunFailed, ServerUnreachable, UsageError, one_line
from swift_r1.wire import protocol as wire
from swift_r1.wire.connections import KEEP_ALIVE, LIMITS, AsyncClient, ThreadTurns
from swift_r1.wire.protocol import ServerRefused

Answer = TypeVar("Answer", bound=BaseModel)
logger = logging.getLogger(__name__)

QUICK_S = 30.0  # for what a server answers at once, even when busy
WORK_S = 600.0  # for what takes it long, whatever the model's size
_CONCURRENT_REQUESTS = 256
_POLL_S = 0.5
_REPORT_EVERY_S = 5.0
_CONNECT_S = 10.0
_HEALTH_EVERY_S = 2.0
_LOOKS_A_SECOND = 25  # at all servers together
_JSON = {"Content-Type": "application/json"}
_quick_calls = ThreadTurns(32)


class RolloutClient:
    """Talks to one `swift rollout` server.

    Args:
        silence_s: seconds without an answer from `/health` after which generations are no longer waited for. They have
            no other deadline.

    Attributes:
        lease: token of the lease that this client's generations belong to: the server stops those of others for an
            update.
    """

    def __init__(self, base_url: str, api_key: str | None = None, silence_s: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.silence_s = silence_s
        self.lease: str | None = None
        # Proxies of the environment are for the internet, not for the server beside us.
        self._options: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": httpx.Timeout(None, connect=_CONNECT_S),
            "trust_env": False,
        }
        self._connections: dict[str, Any] = {
            "socket_options": KEEP_ALIVE,
            # The system's certificates, or those that SSL_CERT_FILE names. Reading them takes 30 ms, which plain HTTP,
            # with its new connections each round, has no use for.
            "verify": ssl.create_default_context() if httpx.URL(self.base_url).scheme == "https" else False,
        }
        self._http = httpx.Client(**self._options, transport=httpx.HTTPTransport(limits=LIMITS, **self._connections))

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its connections; as a context manager it does so at the end."""
        self._http.close()

    def info(self) -> wire.ServerInfo:
        """Model, limits and weight version. Raises ServerUnreachable; ServerRefused while the model loads."""
        return self.call("GET", "/info", wire.ServerInfo, timeout_s=QUICK_S)

    def wait_until_ready(
        self, deadline_s: float, report: Callable[[str], None] = logger.info, or_asleep: bool = False
    ) -> wire.ServerInfo:
        """Waits until the server serves, or (`or_asleep`) its engine sleeps; raises as `wait`.

        Raises:
            UsageError: at once, if the server wants another API key.
        """

        def look() -> wire.ServerInfo | str:
            why = self.why_not_ready()
            if why is not None and not or_asleep:
                return why
            try:
                info = self.info()
            except ServerRefused as error:  # it is still loading
                return why or str(error)
            return info if why is None or info.asleep else why

        return self.wait(deadline_s, look, report)

    def wait(
        self, deadline_s: float, look: Callable[[], wire.ServerInfo | str], report: Callable[[str], None]
    ) -> wire.ServerInfo:
        """Repeats `look` until it returns the server's info in place of the reason why not; `report` gets a line with a
        countdown every few seconds, and what it raises ends the wait.

        Raises:
            ServerUnreachable: after `deadline_s` seconds, with what was last seen.
        """
        next_report = time.monotonic()
        end = next_report + deadline_s
        while True:
            try:
                seen = look()
            except ServerUnreachable as error:  # it went away between two questions
                seen = str(error)
            if isinstance(seen, wire.ServerInfo):
                return seen
            left = end - time.monotonic()
            if left <= 0:
                raise ServerUnreachable(
                    f"the rollout server at {self.base_url} was not ready within {deadline_s:g} s: {seen}; "
                    "start it with `swift rollout`, or check host and port"
                )
            if time.monotonic() >= next_report:
                report(f"waiting for the rollout server at {self.base_url}: {seen}; {left:.0f} s left")
                next_report = time.monotonic() + _REPORT_EVERY_S
            time.sleep(min(_POLL_S, left))

    def generate(
        self,
        requests: Sequence[wire.RolloutRequest],
        on_answer: Callable[[wire.RolloutOutput], None] = lambda _output: None,
    ) -> list[wire.RolloutOutput]:
        """Completions of all requests, in order. `on_answer` gets each output as it comes, and must not wait; what it
        raises, like any other failure, cancels the other requests, here and in the engine.

        Raises:
            ServerUnreachable: the connection broke, or the server fell silent.
            ServerRefused: the server refused a request.
        """
        return asyncio.run(self._generate(requests, on_answer))

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, top: int = 0, *, every_copy: bool = True
    ) -> wire.ScoreResponse:
        """The server's log-probs of given tokens: `L - 1` for a sequence of `L`, natural log, after temperature; and of
        the `top` likeliest in each place."""
        body = wire.ScoreRequest(
            sequences=tuple(map(tuple, sequences)), temperature=temperature, top=top, every_copy=every_copy
        )
        return self.call("POST", "/v1/score", wire.ScoreResponse, body, self._own)

    async def _generate(
        self, requests: Sequence[wire.RolloutRequest], on_answer: Callable[[wire.RolloutOutput], None]
    ) -> list[wire.RolloutOutput]:
        slots = asyncio.Semaphore(_CONCURRENT_REQUESTS)
        async with self.open_async() as http:

            async def one(request: wire.RolloutRequest) -> wire.RolloutOutput:
                async with slots:
                    output = await self.answer(http, request)
                on_answer(output)
                return output

            tasks = [asyncio.create_task(one(request)) for request in requests]
            everything = asyncio.gather(*tasks)
            watch = asyncio.create_task(self.watch())
            try:
                first: set[asyncio.Future[Any]] = {everything, watch}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if not everything.done():
                    watch.result()
                return list(await everything)
            finally:
                for task in (watch, *tasks):
                    task.cancel()
                await asyncio.gather(watch, everything, *tasks, return_exceptions=True)

    def open_async(self) -> AsyncClient:
        return AsyncClient(self._options, self._connections)

    async def answer(self, http: httpx.AsyncClient, request: wire.RolloutRequest) -> wire.RolloutOutput:
        """The completions of one request; asks a full server again. Raises as `generate` does."""
        body = wire.RolloutBatch(requests=(request,)).model_dump_json()
        while True:
            try:
                response = await http.post("/v1/rollouts", content=body, headers=_JSON | self._own)
            except httpx.HTTPError as error:
                raise self._unreachable(error, "the completions of a prompt") from error
            if wire.FULL_HEADER not in response.headers:
                return self._parse(response, wire.RolloutResponse).outputs[0]
            await asyncio.sleep(float(response.headers[wire.FULL_HEADER]))

    async def put_bucket(
        self, http: httpx.AsyncClient, headers: Mapping[str, str], chunks: AsyncIterable[bytes], timeout_s: float
    ) -> None:
        """Sends a bucket of weights, within `timeout_s` seconds of silence; raises as `call`."""
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        try:
            response = await http.put("/v1/weights/bucket", content=chunks, headers=dict(headers), timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(error, "a bucket of weights to be taken") from error
        self._parse(response, wire.UpdateStatus)

    def is_alive(self, timeout_s: float) -> bool:
        """Whether `/health` answers, whatever it says."""
        try:
            self._http.get("/health", timeout=timeout_s)
        except httpx.HTTPError:
            return False
        return True

    async def watch(
        self, servers: Callable[[], int] = lambda: 1, last_answer: Callable[[], float] = lambda: 0.0
    ) -> None:
        """Raises ServerUnreachable once `/health` has not answered for `silence_s`: a stopped process keeps its
        connections open. Uses a connection of its own, since those of the requests may all be in use.

        With many `servers` that are watched, each is looked at less often; after an answer to something else (its
        `time.monotonic`) not before it has been quiet for as long.
        """
        heard = time.monotonic()
        async with AsyncExitStack() as stack:
            http: httpx.AsyncClient | None = None
            while True:
                apart = max(_HEALTH_EVERY_S, servers() / _LOOKS_A_SECOND)
                await asyncio.sleep(apart)
                asked = time.monotonic()
                heard = max(heard, last_answer())
                if asked - heard < apart / 2:
                    continue
                if http is None:
                    http = await stack.enter_async_context(self.open_async())
                try:
                    await http.get("/health", timeout=min(_CONNECT_S, self.silence_s))
                    heard = time.monotonic()
                except httpx.HTTPError as error:
                    # As of the question: where this process was stopped since then, the silence was its own.
                    if asked - heard > self.silence_s:
                        raise self._unreachable(error, "completions") from error

    def call(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        body: BaseModel | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = WORK_S,
    ) -> Answer:
        """One request and its answer, within `timeout_s` seconds of silence.

        Raises:
            ServerRefused: another status than 200.
            ServerUnreachable: no answer.
        """
        content = body.model_dump_json() if isinstance(body, BaseModel) else body
        sent = dict(headers or {}) | (_JSON if isinstance(body, BaseModel) else {})
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        try:
            with _quick_calls.one() if timeout_s <= QUICK_S else nullcontext():
                response = self._http.request(method, path, content=content, headers=sent, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(error, f"{method} {path}") from error
        return self._parse(response, answer)

    def _parse(self, response: httpx.Response, answer: type[Answer]) -> Answer:
        if response.status_code == 200:
            try:
                return answer.model_validate_json(response.content)
            except ValidationError as error:
                raise RunFailed(
                    f"the rollout server at {self.base_url} answers as none of this version does ({one_line(error)}): "
                    "is it another version of swift-r1?"
                ) from error
        raise ServerRefused(
            response.status_code,
            f"the rollout server at {self.base_url} answered {response.status_code}: {_why(response)}",
            int(after) if (after := response.headers.get("Retry-After", "")).isdigit() else None,
        )

    @property
    def _own(self) -> dict[str, str]:
        return {wire.LEASE_HEADER: self.lease} if self.lease is not None else {}

    def why_not_ready(self) -> str | None:
        """None for a server that serves.

        Raises:
            UsageError: it wants another API key.
        """
        try:
            response = self._http.get("/ready", timeout=_CONNECT_S)
        except httpx.HTTPError as error:
            return f"no answer ({one_line(error)})"
        if response.status_code == 401:
            raise UsageError(other_key(f"the rollout server at {self.base_url}", bool(self._options["headers"])))
        return None if response.status_code == 200 else _why(response)

    def _unreachable(self, error: httpx.HTTPError, waited_for: str) -> ServerUnreachable:
        return ServerUnreachable(
            f"the trainer waited for {waited_for}, but the rollout server at {self.base_url} is gone: {one_line(error)}"
        )


def other_key(address: str, given: bool) -> str:
    """Returns the sentence about a 401, for one who has given a key or has not."""
    return f"{address} wants {'another' if given else 'an'} API key: put it into SWIFT_API_KEY, or give --api_key"


def _why(response: httpx.Response) -> str:
    """The server's sentence, or what came instead of one."""
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code} (not a swift rollout server?)"
