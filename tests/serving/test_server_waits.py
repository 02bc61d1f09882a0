"""What the HTTP server does while a generation does not end: an engine that stands still makes that certain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from swift_r1.serving.engines.base import EngineInfo, EnginePrompt, Generated
from swift_r1.sync.writer import WeightWriter
from swift_r1.wire import client as client_module
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.connections import KEEP_ALIVE
from swift_r1.wire.protocol import (
    RolloutOutput,
    RolloutRequest,
    SamplingParams,
    ServerInfo,
    ServerRefused,
)
from tests.live_servers import push_weights

EXPECTED = {"w": (2,)}
WAIT_S = 20
Serve = Callable[..., str]


class StandingEngine:
    """Generates nothing until it is told to; notes what it was asked."""

    def __init__(self) -> None:
        self.info = EngineInfo("standing", "0", 10, "", 100, "float32")
        self.dead = False
        self.scores_alone = False
        self.started, self.cancelled = threading.Event(), threading.Event()
        self.may_end = threading.Event()
        self.loaded: list[bytes] = []

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        self.started.set()
        try:
            while not self.may_end.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Generated((1,), (-0.5,), "length")

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        return (0.0,) * (len(sequence) - 1)

    async def set_score_temperature(self, temperature: float) -> None: ...

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        self.loaded += [file.read_bytes() for file in files]

    def shutdown(self) -> None: ...


@pytest.fixture
def engine() -> StandingEngine:
    return StandingEngine()


@pytest.fixture
def serve(serve_engine: Serve, engine: StandingEngine) -> Iterator[Serve]:
    """A server over the standing engine, whose waits end after half a second."""
    yield lambda **flags: serve_engine(engine, EXPECTED, **{"update_timeout": 0.5} | flags)
    engine.may_end.set()


@pytest.fixture
def url(serve: Serve) -> str:
    return serve()


def request(name: str = "r") -> RolloutRequest:
    return RolloutRequest(
        request_id=name, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1)
    )


def test_a_client_that_hangs_up_stops_its_generation(url: str, engine: StandingEngine) -> None:
    body = {"requests": [request().model_dump()]}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(trust_env=False, timeout=1.0) as http:
        http.post(f"{url}/v1/rollouts", json=body)
    assert engine.cancelled.wait(WAIT_S)


def test_an_update_waits_for_the_trainers_own_rollouts(
    serve: Serve, engine: StandingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the server's wait is no fault: the commit alone is asked for again, the update stays open."""
    url, waits = serve(update_timeout=1.5, client_grace=0), 0
    with RolloutClient(url) as client, RolloutClient(url) as asker, WeightWriter(client) as writer:
        writer.hold(WAIT_S)
        asker.lease = client.lease
        answers: list[int] = []

        def generate() -> None:
            answers.append(asker.generate([request()])[0].completions[0].weight_version)

        running = threading.Thread(target=generate)
        running.start()
        assert engine.started.wait(WAIT_S)

        def waiting() -> ServerInfo:
            """Asked before each repetition of the commit."""
            nonlocal waits
            waits += 1
            assert not engine.loaded and not answers
            if waits == 2:
                engine.may_end.set()
            return info()

        info = client.info
        monkeypatch.setattr(client, "info", waiting)
        assert writer.push(1, [[("w", torch.ones(2))]]).weight_version == 1
        running.join(WAIT_S)
        assert answers == [0] and len(engine.loaded) == 1 and waits >= 2
        counted = httpx.get(f"{url}/metrics", trust_env=False).text
        assert 'swift_http_requests_total{route="/v1/weights/begin",status="200"} 1.0' in counted


def test_a_rollout_does_not_wait_for_ever_for_an_update(url: str, engine: StandingEngine) -> None:
    engine.may_end.set()
    with RolloutClient(url) as client, httpx.Client(base_url=url, trust_env=False) as http:
        token = http.post("/v1/weights/lease", json={"owner": "slow"}).json()["token"]
        http.post("/v1/weights/begin", json={"version": 1}, headers={"X-Swift-Lease": token})
        answer = http.post("/v1/rollouts", json={"requests": [request().model_dump()]})
        # Either its own wait ended first, or the update that stood still was given up first; never silence.
        if answer.status_code == 503:
            assert (
                "waited 0.5 s for the update to weight version 1 by slow to end"
                in answer.json()["error"]
            )
            assert int(answer.headers["Retry-After"]) > 0
        client.wait_until_ready(WAIT_S)
        assert client.generate([request("again")])[0].completions[0].weight_version == 0


@pytest.mark.long
def test_a_generation_has_no_deadline_but_the_servers_silence(
    url: str, engine: StandingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take far longer than any other call; its connection is kept known, and ends with the other end."""
    for name in ("QUICK_S", "WORK_S", "_HEALTH_EVERY_S"):
        monkeypatch.setattr(client_module, name, 0.2)
    answers: list[RolloutOutput] = []
    looks = 0

    async def looked(
        http: httpx.AsyncClient, method: str, address: str, **options: Any
    ) -> httpx.Response:
        nonlocal looks
        looks += address.endswith("/health")
        if looks == 10:
            engine.may_end.set()
        if address.endswith("/v1/rollouts"):
            limits.append(options["timeout"])
        return await ask(http, method, address, **options)

    limits: list[httpx.Timeout] = []
    ask = httpx.AsyncClient.request
    monkeypatch.setattr(httpx.AsyncClient, "request", looked)
    with RolloutClient(url, silence_s=1.0) as client:
        client.generate([request()], answers.append)
        assert len(answers) == 1 and looks >= 10

        async def options() -> list[int]:
            async with client.loop.http.stream("GET", f"{url}/health") as response:
                connection = response.extensions["network_stream"].get_extra_info("socket")
                return [connection.getsockopt(level, option) for level, option, _ in KEEP_ALIVE]

        assert client.loop.run(options()) == [1, 30, 10, 3]
    assert all(one.read is one.write is one.pool is None for one in limits) and limits


def test_one_post_of_more_than_it_takes_generates_nothing(
    serve: Serve, engine: StandingEngine
) -> None:
    """What counts is completions, in whatever requests and posts they come."""
    engine.may_end.set()
    url = serve(max_pending_requests=3)
    alone, several = request("n").model_copy(update={"n": 4}), [request(name) for name in "abcd"]
    with httpx.Client(base_url=url, trust_env=False) as http:
        for requests in ([alone], several):
            refused = http.post(
                "/v1/rollouts", json={"requests": [one.model_dump() for one in requests]}
            )
            assert refused.status_code == 422, refused.text
        assert refused.json() == {
            "error": "4 completions at once are more than this server takes (3): ask for fewer"
        }
        assert not engine.started.is_set()
        assert http.get("/info").json()["max_n"] == 3
        taken = http.post(
            "/v1/rollouts", json={"requests": [one.model_dump() for one in several[:3]]}
        )
        assert taken.status_code == 200


def test_large_bodies_and_headers_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_r1.serving.answers.MAX_BODY_BYTES", 10_000)
    body = b'{"requests": "' + b"x" * 20_000 + b'"}'
    with httpx.Client(base_url=url, trust_env=False) as http:
        promised = http.post(
            "/v1/rollouts", content=body, headers={"Content-Type": "application/json"}
        )
        assert promised.status_code == 413 and "larger than 10000 bytes" in promised.json()["error"]

        def in_pieces() -> Iterator[bytes]:
            yield from (body[:8000], body[8000:16000], body[16000:])

        unannounced = http.post(
            "/v1/rollouts", content=in_pieces(), headers={"Content-Type": "application/json"}
        )
        assert unannounced.status_code == 413
        chat = http.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert chat.status_code == 413 and "larger than" in chat.json()["error"]["message"]
        headers = {f"X-Long-{number}": "y" * 4000 for number in range(10)}
        assert http.get("/ready", headers=headers).status_code == 431
        assert http.get("/ready").status_code == 200


def test_a_bucket_larger_than_the_model_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swift_r1.serving.answers.MAX_BODY_BYTES", 100)  # not for buckets
    with RolloutClient(url) as client:
        with pytest.raises(ServerRefused, match="bucket 0 is larger than the whole model"):
            push_weights(client, 1, [[("w", torch.ones(5 << 20))]], "http")
        assert client.info().weight_version == 0
