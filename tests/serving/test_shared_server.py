"""A server that trains and serves: OpenAI's clients and others beside the trainer, which comes first."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from swift_r1.errors import UsageError
from swift_r1.rollout.calls import OpenCalls
from swift_r1.rollout.pool.pool import ServerPool
from swift_r1.rollout.pool.session import Expected
from swift_r1.serving.engines.base import EngineInfo, EnginePrompt, Generated, Piece
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest, SamplingParams
from tests.conftest import until
from tests.live_servers import pool_of

WAIT_S = 30
MESSAGES = [{"role": "user", "content": "tell me all"}]
Serve = Callable[..., str]


class EndlessEngine:
    """A completion without end for each client; one token for prompt (1,), and for prompt (2,) when it is told."""

    dead = False
    scores_alone = False
    tokenizer = None
    turn_end = None

    def __init__(self) -> None:
        self.prompts = self
        self.info = EngineInfo("endless", "0", 10, "", 1000, "float32")
        self.may_end = threading.Event()
        self.streams = self.stopped = 0
        self.loads = 0

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        while prompt.token_ids == (2,) and not self.may_end.is_set():
            await asyncio.sleep(0.01)
        return Generated((1,), (-0.5,), "length")

    async def stream(
        self,
        prompt: EnginePrompt,
        sampling: SamplingParams,
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool = False,
    ) -> AsyncIterator[Piece]:
        self.streams += 1
        try:
            while not self.may_end.is_set():
                yield Piece((1,), "x", (), None)
                await asyncio.sleep(0.01)
            yield Piece((2,), "y", (), "stop")
        finally:
            self.stopped += not self.may_end.is_set()

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        while not self.may_end.is_set():
            await asyncio.sleep(0.01)
        return (0.0,) * (len(sequence) - 1)

    async def set_score_temperature(self, temperature: float) -> None: ...

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        self.loads += 1

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> tuple[int, ...]:
        return (1, 2)

    def encode(self, text: str) -> tuple[int, ...]:
        return (1, 2)

    def shutdown(self) -> None: ...


@pytest.fixture
def engine() -> Iterator[EndlessEngine]:
    engine = EndlessEngine()
    yield engine
    engine.may_end.set()


@pytest.fixture
def url(engine: EndlessEngine, serve_engine: Serve) -> str:
    """An update of this server waits for its clients for half a second, and no longer than 20 s for anything."""
    return serve_engine(engine, {"w": (2,)}, update_timeout=20, client_grace=0.5)


@pytest.fixture
def talk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as talk:
        yield talk


@pytest.fixture(autouse=True)
def no_commit_waits_in_vain(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "swift_r1.sync.writer"):
        yield
    assert "asking again" not in caplog.text


@pytest.fixture
def trainer(url: str) -> Iterator[ServerPool]:
    with RolloutClient(url) as client:
        pool = pool_of([client], Expected("none", "", 10, None), WAIT_S)
        yield pool
        pool.close()


def one(name: str, token: int = 1, n: int = 1) -> RolloutRequest:
    return RolloutRequest(
        request_id=name, prompt_token_ids=(token,), n=n, sampling=SamplingParams(max_tokens=1)
    )


def push(trainer: ServerPool, version: int) -> None:
    trainer.publish([[("w", torch.ones(2))]])
    assert trainer.version == version


def asked(trainer: ServerPool, name: str, version: int) -> None:
    """One round of the trainer's: all is answered, by these weights."""
    outputs: list[RolloutOutput] = []
    trainer.ask(
        OpenCalls(outputs.append, requests=[one(f"{name}/{number}") for number in range(4)]),
        (version,),
    )
    assert len(outputs) == 4


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def expect(error: type[Exception], work: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        with pytest.raises(error):
            work()

    return in_thread(run)


def test_clients_with_endless_generations_do_not_hold_up_five_updates(
    engine: EndlessEngine, talk: openai.OpenAI, trainer: ServerPool
) -> None:
    """Each asks again whenever it is stopped; a stream ends with an error event, an answer is a 503."""
    over, cut, refused = threading.Event(), [], []

    def streams() -> None:
        while not over.is_set():
            try:
                for chunk in talk.chat.completions.create(
                    model="none", messages=MESSAGES, stream=True
                ):
                    assert chunk.choices[0].delta.content in ("x", "y")
            except openai.APIError as error:
                cut.append(error)

    def asks() -> None:
        while not over.is_set():
            try:
                talk.chat.completions.create(model="none", messages=MESSAGES)
            except openai.InternalServerError as error:
                refused.append(error)

    threads = [in_thread(work) for work in (streams, streams, asks, asks)]
    for version in range(1, 6):
        until(lambda version=version: engine.streams - engine.stopped == 4)
        push(trainer, version)
        asked(trainer, f"round {version}", version)
    over.set()
    engine.may_end.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert engine.loads == 5 and len(cut) >= 10 and len(refused) >= 10
    said = [str(error) for error in (cut[0], refused[0])]
    assert all("the update to weight version 1 stopped it; ask again" in text for text in said)
    assert refused[0].status_code == 503 and int(refused[0].response.headers["Retry-After"]) > 0
    assert cut[0].body["type"] == "overloaded_error"


def test_an_update_stops_clients_and_scores_and_not_the_trainers_rollouts(
    engine: EndlessEngine, url: str, talk: openai.OpenAI, trainer: ServerPool
) -> None:
    answers: list[RolloutOutput] = []
    body = {"sequences": [[1, 2, 3]]}
    with httpx.Client(base_url=url, trust_env=False, timeout=WAIT_S) as http:
        scores: list[httpx.Response] = []
        client = expect(
            openai.InternalServerError, lambda: talk.completions.create(model="none", prompt="a")
        )
        scoring = in_thread(lambda: scores.append(http.post("/v1/score", json=body)))
        own = in_thread(
            lambda: trainer.ask(OpenCalls(answers.append, requests=[one("own", 2)]), (0,))
        )
        until(lambda: "swift_running_requests 3.0" in http.get("/metrics").text)
        pushing = in_thread(lambda: push(trainer, 1))
        client.join(WAIT_S)
        scoring.join(WAIT_S)
        assert [one.status_code for one in scores] == [503]
        assert own.is_alive() and pushing.is_alive() and not engine.loads
        # Who comes meanwhile waits.
        late = in_thread(lambda: scores.append(http.post("/v1/score", json=body)))
        engine.may_end.set()
        for thread in (own, pushing, late):
            thread.join(WAIT_S)
    assert engine.loads == 1 and len(answers) == 1
    assert scores[1].status_code == 200 and scores[1].json()["weight_version"] == 1


def test_scoring_alone_gives_way_too(engine: EndlessEngine, url: str, trainer: ServerPool) -> None:
    """At a temperature it has the engine for itself, and the gate is closed before the update closes it."""
    body, answers = {"sequences": [[1, 2, 3]], "temperature": 0.5}, []
    with httpx.Client(base_url=url, trust_env=False, timeout=WAIT_S) as http:
        scoring = in_thread(lambda: answers.append(http.post("/v1/score", json=body)))
        until(
            lambda: "scoring that has the engine" in httpx.get(f"{url}/ready", trust_env=False).text
        )
        push(trainer, 1)
        asked(trainer, "round", 1)
        scoring.join(WAIT_S)
    assert engine.loads == 1 and [one.status_code for one in answers] == [503]


def test_clients_that_fill_the_server_do_not_refuse_the_trainer(
    engine: EndlessEngine, serve_engine: Serve
) -> None:
    url = serve_engine(engine, {"w": (2,)}, max_pending_requests=4, client_grace=0.2)
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as talk,
        RolloutClient(url) as client,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        with pytest.raises(openai.BadRequestError, match="n = 5, this server gives at most 4"):
            talk.completions.create(model="none", prompt="a", n=5)
        with pytest.raises(openai.BadRequestError, match="8 completions at once are more"):
            talk.completions.create(model="none", prompt=["a", "b"], n=4)
        full = expect(
            openai.APIError, lambda: talk.completions.create(model="none", prompt="a", n=4)
        )
        until(lambda: engine.streams == 4)
        with pytest.raises(
            openai.InternalServerError, match="4 completions are under way"
        ) as refused:
            talk.chat.completions.create(model="none", messages=MESSAGES)
        assert (
            refused.value.status_code == 503
            and int(refused.value.response.headers["Retry-After"]) > 0
        )
        with pytest.raises(
            UsageError, match="at most 4 completions of a prompt, and this run asks for 5"
        ):
            pool_of([client], Expected("none", "", 10, None, 5), WAIT_S)
        client.lease = None
        pool = pool_of([client], Expected("none", "", 10, None), WAIT_S)
        # Twice what the server takes at once: the trainer waits for its own, and nothing is lost.
        outputs: list[RolloutOutput] = []
        pool.ask(
            OpenCalls(outputs.append, requests=[one(str(number), n=2) for number in range(4)]), (0,)
        )
        assert len(outputs) == 4 and full.is_alive()
        push(pool, 1)
        full.join(WAIT_S)
        assert "swift_running_requests 0.0" in http.get("/metrics").text
        pool.close()
