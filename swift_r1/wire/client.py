"""The client of one rollout server. Nothing here waits without a deadline. Importing it loads no torch."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from swift_r1.errors import RunFailed, ServerUnreachable, UsageError, one_line
from swift_r1.wire import protocol as wire
from swift_r1.wire.connections import ServerLoop, pieces_of
from swift_r1.wire.protocol import ServerRefused

Answer = TypeVar("Answer", bound=BaseModel)
logger = logging.getLogger(__name__)

QUICK_S = 30.0  # for what a server answers at once, even when busy
WORK_S = 600.0  # for what takes it long, whatever the model's size
CONCURRENT_REQUESTS = 256  # of one server
_POLL_S = 0.5
_REPORT_EVERY_S = 5.0
_CONNECT_S = 10.0
_HEALTH_EVERY_S = 2.0
_LOOKS_A_SECOND = 25  # at all servers together
_IMAGE_ASKS = (
    8  # for the images of one request, before the server is taken for one that forgets them
)
_JSON = {"Content-Type": "application/json"}
ReadImage = Callable[[str], bytes]
"""Gives the bytes of the image that a request names."""


def no_image(name: str) -> bytes:
    """The `ReadImage` of requests without images."""
    raise RunFailed(f"the image {name} of a request is not known here")


class RolloutClient:
    """Talks to one `swift rollout` server.

    Args:
        silence_s: seconds without an answer from `/health` after which generations are no longer waited for. They have
            no other deadline.

    Attributes:
        lease: token of the lease that this client's generations belong to: the server stops those of others for an
            update.
        loop: runs all requests of this process; coroutines of this class must run on it.
    """

    def __init__(self, base_url: str, api_key: str | None = None, silence_s: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.silence_s = silence_s
        self.lease: str | None = None
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.loop = ServerLoop.shared()
        self._closed = False

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its connections; as a context manager it does so at the end."""
        if not self._closed:
            self._closed = True
            self.loop.run(self.drop_connections())
            self.loop.close()

    def info(self) -> wire.ServerInfo:
        """Model, limits and weight version. Raises ServerUnreachable; ServerRefused while the model loads."""
        return self.call("GET", "/info", wire.ServerInfo, timeout_s=QUICK_S)

    def wait_until_ready(
        self,
        deadline_s: float,
        report: Callable[[str], None] = logger.info,
        or_asleep: bool = False,
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
        self,
        deadline_s: float,
        look: Callable[[], wire.ServerInfo | str],
        report: Callable[[str], None],
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
                report(
                    f"waiting for the rollout server at {self.base_url}: {seen}; {left:.0f} s left"
                )
                next_report = time.monotonic() + _REPORT_EVERY_S
            time.sleep(min(_POLL_S, left))

    def generate(
        self,
        requests: Sequence[wire.RolloutRequest],
        on_answer: Callable[[wire.RolloutOutput], None] = lambda _output: None,
        read_image: ReadImage = no_image,
    ) -> list[wire.RolloutOutput]:
        """Completions of all requests, in order. `on_answer` gets each output as it comes, and must not wait; what it
        raises, like any other failure, cancels the other requests, here and in the engine. `read_image` gives what the
        server does not have yet.

        Raises:
            ServerUnreachable: the connection broke, or the server fell silent.
            ServerRefused: the server refused a request.
        """
        return self.loop.run_with_items(partial(self._generate, requests, read_image), on_answer)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        top: int = 0,
        *,
        every_copy: bool = True,
    ) -> wire.ScoreResponse:
        """The server's log-probs of given tokens: `L - 1` for a sequence of `L`, natural log, after temperature; and of
        the `top` likeliest in each place."""
        body = wire.ScoreRequest(
            sequences=tuple(map(tuple, sequences)),
            temperature=temperature,
            top=top,
            every_copy=every_copy,
        )
        return self.call("POST", "/v1/score", wire.ScoreResponse, body, self._own)

    async def _generate(
        self,
        requests: Sequence[wire.RolloutRequest],
        read_image: ReadImage,
        on_answer: Callable[[wire.RolloutOutput], None],
    ) -> list[wire.RolloutOutput]:
        outputs: dict[int, wire.RolloutOutput] = {}
        waiting = deque(enumerate(requests))
        over = asyncio.get_running_loop().create_future()

        def failed(error: Exception) -> None:
            if not over.done():
                over.set_exception(error)

        lane = RequestLane(self, failed, read_image=read_image)

        def ask_more() -> None:
            while waiting and len(lane.asked) < CONCURRENT_REQUESTS:
                number, request = waiting.popleft()
                lane.ask(request, partial(answered, number))
            if len(outputs) == len(requests) and not over.done():
                over.set_result(None)

        def answered(number: int, output: wire.RolloutOutput, _seconds: float) -> None:
            outputs[number] = output
            on_answer(output)
            ask_more()

        try:
            ask_more()
            await over
            return [outputs[number] for number in range(len(requests))]
        finally:
            await lane.leave()

    async def answer(
        self, request: wire.RolloutRequest, read_image: ReadImage = no_image
    ) -> wire.RolloutOutput:
        """The completions of one request; asks a full server again, and one that lacks images once it has them. Raises
        as `generate` does."""
        body = wire.RolloutBatch(requests=(request,)).model_dump_json()
        asked_for_images = 0
        while True:
            response = await self._request(
                "POST", "/v1/rollouts", "the completions of a prompt", None, body, _JSON | self._own
            )
            if wire.FULL_HEADER in response.headers:
                await asyncio.sleep(float(response.headers[wire.FULL_HEADER]))
            elif response.status_code == wire.LACKS_IMAGES and asked_for_images < _IMAGE_ASKS:
                asked_for_images += 1
                lacking = self._parsed(response, wire.LackingImages)
                for name in lacking.missing:
                    await self._send_image(name, read_image)
            else:
                return self._parse(response, wire.RolloutResponse).outputs[0]

    async def _send_image(self, name: str, read_image: ReadImage) -> None:
        path = f"/v1/images/{name}"
        content = await asyncio.to_thread(read_image, name)
        response = await self._request("PUT", path, f"PUT {path}", WORK_S, content)
        self._parse(response, wire.StoredImage)

    async def drop_connections(self, kept: int = 0) -> None:
        """Closes the connections to this server, except so many pools of `KEPT`."""
        await self.loop.connections.drop(self.base_url, kept)

    def is_alive(self, timeout_s: float) -> bool:
        """Whether `/health` answers, whatever it says."""
        try:
            self.loop.run(self._request("GET", "/health", "GET /health", timeout_s))
        except ServerUnreachable:
            return False
        return True

    async def watch(
        self, servers: Callable[[], int], last_answer: Callable[[], float] = lambda: 0.0
    ) -> None:
        """Raises ServerUnreachable once `/health` has not answered for `silence_s`: a stopped process keeps its
        connections open.

        With many `servers` that are watched, each is looked at less often; after an answer to something else (its
        `time.monotonic`) not before it has been quiet for as long.
        """
        heard = time.monotonic()
        while True:
            apart = max(_HEALTH_EVERY_S, servers() / _LOOKS_A_SECOND)
            await asyncio.sleep(apart)
            asked = time.monotonic()
            heard = max(heard, last_answer())
            if asked - heard < apart / 2:
                continue
            try:
                await self._request(
                    "GET", "/health", "completions", min(_CONNECT_S, self.silence_s)
                )
                heard = time.monotonic()
            except ServerUnreachable:
                # As of the question: where this process was stopped since then, the silence was its own.
                if asked - heard > self.silence_s:
                    raise

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
        return self.loop.run(self.called(method, path, answer, body, headers, timeout_s))

    async def called(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        body: BaseModel | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = WORK_S,
    ) -> Answer:
        """Does what `call` does, on the loop."""
        content: str | AsyncIterator[bytes] | None = None
        sent = dict(headers or {})
        if isinstance(body, BaseModel):
            content = body.model_dump_json()
            sent |= _JSON
        elif body is not None:
            content = pieces_of(body)
        return self._parse(
            await self._request(method, path, f"{method} {path}", timeout_s, content, sent), answer
        )

    async def _request(
        self,
        method: str,
        path: str,
        waited_for: str,
        timeout_s: float | None,
        content: str | bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Sends one request and reads its answer. Raises ServerUnreachable, which says what was `waited_for`."""
        sent = self._headers | dict(headers or {})
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        try:
            return await self.loop.http.request(
                method, self.base_url + path, content=content, headers=sent, timeout=timeout
            )
        except httpx.HTTPError as error:
            gone = f"the rollout server at {self.base_url} is gone: {why_no_answer(error)}"
            raise ServerUnreachable(f"the trainer waited for {waited_for}, but {gone}") from error

    def _parse(self, response: httpx.Response, answer: type[Answer]) -> Answer:
        if response.status_code == 200:
            return self._parsed(response, answer)
        after = response.headers.get("Retry-After", "")
        raise ServerRefused(
            response.status_code,
            f"the rollout server at {self.base_url} answered {response.status_code}: {_why(response)}",
            int(after) if after.isdigit() else None,
        )

    def _parsed(self, response: httpx.Response, answer: type[Answer]) -> Answer:
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise RunFailed(
                f"the rollout server at {self.base_url} answers as none of this version does ({one_line(error)}): "
                "is it another version of swift-r1?"
            ) from error

    @property
    def _own(self) -> dict[str, str]:
        return {wire.LEASE_HEADER: self.lease} if self.lease is not None else {}

    def why_not_ready(self) -> str | None:
        """None for a server that serves.

        Raises:
            UsageError: it wants another API key.
        """
        try:
            response = self.loop.run(self._request("GET", "/ready", "GET /ready", _CONNECT_S))
        except ServerUnreachable as error:
            return f"no answer ({why_no_answer(error)})"
        if response.status_code == 401:
            raise UsageError(
                other_key(f"the rollout server at {self.base_url}", bool(self._headers))
            )
        return None if response.status_code == 200 else _why(response)


class RequestLane:
    """The requests that one server has at the same time, and the watch over it. On the loop alone.

    Args:
        failed: hears of each request that failed, of what the receiver of an answer raised, and of the server's
            silence.
        servers: counts the servers that are watched.
        check: raises what is wrong with an answer, which then is none.
        read_image: gives the images that requests name.

    Attributes:
        asked: the requests without an answer, each with its task, in order.
        heard: when it answered last.
    """

    def __init__(
        self,
        client: RolloutClient,
        failed: Callable[[Exception], None],
        servers: Callable[[], int] = lambda: 1,
        check: Callable[[wire.RolloutOutput], None] = lambda _output: None,
        read_image: ReadImage = no_image,
    ) -> None:
        self._client = client
        self._read_image = read_image
        self._failed = failed
        self._check = check
        self.asked: dict[asyncio.Task[None], wire.RolloutRequest] = {}
        self.heard = 0.0
        self._watch = asyncio.create_task(self._fail_when_silent(servers))

    def ask(
        self, request: wire.RolloutRequest, answered: Callable[[wire.RolloutOutput, float], None]
    ) -> None:
        """Has the request answered: `answered` gets the output, and the seconds that it took."""
        task = asyncio.create_task(self._answer(request, answered))
        self.asked[task] = request

    def take_back(self, task: asyncio.Task[None]) -> None:
        """Cancels a request, which is not answered any more."""
        del self.asked[task]
        task.cancel()

    async def leave(self) -> list[wire.RolloutRequest]:
        """Ends the watch and all requests; returns those without an answer."""
        tasks = [self._watch, *self.asked]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return list(self.asked.values())

    async def _answer(
        self, request: wire.RolloutRequest, answered: Callable[[wire.RolloutOutput, float], None]
    ) -> None:
        """At any time a request waits, is asked of one lane, or is answered."""
        began = time.monotonic()
        try:
            output = await self._client.answer(request, self._read_image)
            self._check(output)
            self.heard = time.monotonic()
            task = asyncio.current_task()
            assert task is not None
            del self.asked[task]
            answered(output, self.heard - began)
        except Exception as error:  # noqa: BLE001 - judged, or raised, by whoever asks
            self._failed(error)

    async def _fail_when_silent(self, servers: Callable[[], int]) -> None:
        try:
            await self._client.watch(servers, lambda: self.heard)
        except ServerUnreachable as error:
            self._failed(error)


def other_key(address: str, given: bool) -> str:
    """Returns the sentence about a 401, for one who has given a key or has not."""
    return f"{address} wants {'another' if given else 'an'} API key: put it into SWIFT_API_KEY, or give --api_key"


def why_no_answer(error: BaseException) -> str:
    """Returns why there is no answer, in one line: the system's own reason where there is one behind the client's."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, BaseExceptionGroup):  # of several addresses
            behind = behind.exceptions[0]
        elif isinstance(behind, OSError) and behind.errno is not None:
            # the numbers of these two are not the system's
            if isinstance(behind, ssl.SSLError | socket.gaierror):
                return str(behind)
            return f"[Errno {behind.errno}] {os.strerror(behind.errno)}"
        else:
            behind = behind.__cause__ or behind.__context__
    return one_line(error)


def _why(response: httpx.Response) -> str:
    """The server's sentence, or what came instead of one."""
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code} (not a swift rollout server?)"
