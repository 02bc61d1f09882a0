"""Whatever is sent, the server says what is wrong with it: never 500, and it goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from swift_r1.serving.engines.base import (
    EngineInfo,
    EnginePrompt,
    Generated,
    Piece,
    Scored,
    TokenLogprob,
)
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import HTTPError, SamplingParams
from tests.conftest import until

EXPECTED = {"w": (2,)}
VOCABULARY, LENGTH = 50, 100
SESSION = "/v1/sessions/fuzz"


class QuickEngine:
    """Answers at once, and breaks where it is given what the server should not have let through."""

    dead = False
    scores_alone = False
    tokenizer = None
    turn_end = None
    special: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.prompts = self
        self.info = EngineInfo("quick", "0", VOCABULARY, "", LENGTH, "float32")

    def _check(self, prompt: EnginePrompt, sampling: SamplingParams) -> None:
        ids = prompt.token_ids
        assert 0 < len(ids) < LENGTH and min(ids) >= 0 and max(ids) < VOCABULARY
        assert len(ids) + sampling.max_tokens <= LENGTH and all(sampling.stop)

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        self._check(prompt, sampling)
        return Generated((1,), (-0.5,), "length")

    async def stream(
        self,
        prompt: EnginePrompt,
        sampling: SamplingParams,
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool = False,
    ) -> AsyncIterator[Piece]:
        self._check(prompt, sampling)
        await asyncio.sleep(0)
        yield Piece(
            (1,), "a", (TokenLogprob("a", -0.5),) if top_logprobs is not None else (), "length"
        )

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> tuple[int, ...]:
        return self.encode("".join(one["role"] + one["content"] for one in messages))

    def with_arguments(self, arguments: Mapping[str, Any]) -> QuickEngine:
        raise HTTPError(400, "no arguments")

    def encode(self, text: str) -> tuple[int, ...]:
        if not text:
            raise HTTPError(400, "the prompt has no tokens")
        return tuple(byte % VOCABULARY for byte in text.encode())

    encode_more = encode

    def behind(
        self, messages: Sequence[Mapping[str, Any]], place: int, tools: Sequence[Any] = ()
    ) -> tuple[int, ...]:
        return self.render([*messages[place + 1 :], {"role": "assistant", "content": ""}])

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        return ["a"] * len(token_ids)

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        return (0.0,) * (len(sequence) - 1)

    async def score_top(self, sequence: Sequence[int], top: int) -> Scored:
        rest = len(sequence) - 1
        return Scored((0.0,) * rest, (tuple(range(top)),) * rest, ((0.0,) * top,) * rest)

    async def set_score_temperature(self, temperature: float) -> None: ...

    async def load_weights(self, files: Sequence[Path], version: int) -> None: ...

    def shutdown(self) -> None: ...


@pytest.fixture
def quick_url(serve_engine: Callable[..., str]) -> str:
    return serve_engine(QuickEngine(), EXPECTED, update_timeout=0.05)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(GenerationMode.POSITIVE, id="positive", marks=pytest.mark.long),
        pytest.param(GenerationMode.NEGATIVE, id="negative"),
    ],
)
def test_what_the_document_allows_and_forbids_is_answered(
    quick_url: str, mode: GenerationMode
) -> None:
    """Every route of the OpenAPI document, with values that it allows and with such that it does not."""
    document = schemathesis.openapi.from_url(f"{quick_url}/openapi.json")
    tried: set[str] = set()

    def examine(case: Any) -> None:
        tried.add(case.path)
        answer = case.call(timeout=30)
        assert answer.status_code != 500, answer.text
        if answer.status_code >= 400:
            assert "error" in answer.json()
        assert str(answer.status_code) in case.operation.definition.raw["responses"], answer.text

    quiet = settings(
        max_examples=3,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[*HealthCheck],
    )
    for operation in document.get_all_operations():
        strategy = operation.ok().as_strategy(generation_mode=mode)
        with contextlib.suppress(Unsatisfiable):  # what has no parameters cannot be given wrongly
            quiet(given(strategy)(examine))()
    assert tried >= {
        "/v1/rollouts",
        "/v1/score",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/weights/begin",
    }


def good_bodies(model: str, end: int) -> dict[str, dict[str, Any]]:
    """A good request for each route, new ids each time; prompts of tokens below `end`."""
    name = uuid.uuid4().hex
    sampling = {
        "max_tokens": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop": ["xy"],
        "ignore_eos": False,
    }
    request = {
        "request_id": name,
        "prompt_token_ids": [1, 2, end - 1],
        "n": 1,
        "seeds": [1],
        "sampling": sampling,
    }
    talk = {
        "model": model,
        "max_tokens": 2,
        "temperature": 1,
        "n": 1,
        "stop": ["xy"],
        "seed": 1,
        "stream": False,
    }
    return {
        "/v1/rollouts": {"requests": [request]},
        "/v1/score": {"sequences": [[1, 2, 3]], "temperature": 1.0},
        "/v1/chat/completions": talk
        | {"messages": [{"role": "user", "content": "a"}], "logprobs": True},
        "/v1/completions": talk | {"prompt": "ab", "logprobs": 1},
        f"{SESSION}/v1/messages": {
            "model": model,
            "max_tokens": 2,
            "system": "b",
            "stop_sequences": ["xy"],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "c"},
                        {"type": "tool_use", "id": "e", "name": "f", "input": {"g": 1.5}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "e", "content": "h"}],
                },
            ],
        },
        f"{SESSION}/v1/responses": {
            "model": model,
            "max_output_tokens": 2,
            "instructions": "b",
            "reasoning": {"effort": "none"},
            "input": [
                {"role": "user", "content": "a"},
                {"type": "reasoning", "id": "c", "summary": [], "encrypted_content": "ZA=="},
                {"type": "function_call", "call_id": "e", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "e", "output": "h"},
            ],
        },
        "/v1/weights/lease": {"owner": "fuzz", "ttl_seconds": 0.1},
        "/v1/weights/begin": {"version": 1},
        "/v1/weights/commit": {"version": 1, "buckets": 1, "content_hash": "0" * 32},
        "/v1/weights/abort": {"version": 1},
    }


WRONG = (
    *(
        None,
        True,
        "",
        "x",
        "\ud800",
        "\x00",
        -1,
        0,
        2**63,
        2**64,
        10**400,
        1.5,
        -0.0,
        1e308,
        1e-320,
        [],
        {},
        [[]],
        [None],
    ),
    *({"a": 1}, ["a"] * 300, "y" * 3000, [0] * 3000, [-1], [2**70]),
)
RAW = (
    b"",
    b"null",
    b"[]",
    b"{",
    b"[" * 5000,
    b'{"a":' * 3000,
    b"\xff\xfe",
    b"NaN",
    b'"\\ud800"',
    b"0" * 5000,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from places(item, (*path, key))


def malformed(rng: random.Random, body: dict[str, Any]) -> bytes:
    """The body with a value replaced, a key taken out or put in, or as broken bytes."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(RAW)
    text = json.dumps(body).encode()
    if kind == 1:
        place = rng.randrange(len(text))
        return (
            text[:place]
            if rng.random() < 0.3
            else text[:place] + rng.randbytes(1) + text[place + 1 :]
        )
    body = json.loads(text)
    path = rng.choice([place for place in places(body) if place])
    parent = body
    for key in path[:-1]:
        parent = parent[key]
    if kind == 2 and isinstance(parent, dict):
        del parent[path[-1]]
    elif kind == 3 and isinstance(parent, dict):
        parent[rng.choice(("extra", "", "\ud800", "__class__"))] = rng.choice(WRONG)
    else:
        parent[path[-1]] = rng.choice(WRONG)
    return json.dumps(body).encode()


def bombard(url: str, count: int, seed: int, model: str, end: int) -> dict[int, int]:
    """Sends `count` malformed requests; returns how often each status came. Fails at the first 500."""
    rng, statuses = random.Random(seed), {}
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        http.post("/v1/sessions", json={"id": "fuzz"})
        for _ in range(count):
            route, body = rng.choice(list(good_bodies(model, end).items()))
            content = malformed(rng, body)
            kind = rng.choice(
                ("application/json", "application/json", "application/json", "text/plain", "")
            )
            answer = http.post(route, content=content, headers={"Content-Type": kind})
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code != 500, (route, content[:500], answer.text)
            if answer.status_code >= 400:
                assert answer.json()["error"], (route, content[:500], answer.text)
    return statuses


def test_malformed_bodies_are_refused(quick_url: str) -> None:
    statuses = bombard(quick_url, 600, seed=1, model="none", end=VOCABULARY)
    assert statuses[422] > 100 and statuses[400] > 50 and statuses[200] > 0
    with RolloutClient(quick_url) as client:
        client.wait_until_ready(30)


def test_bodies_are_bounded_by_count(quick_url: str) -> None:
    names = json.dumps({"model": "none"} | {f"n{number}": 1 for number in range(20_000)})
    objects = '{{"model":"none","messages":[{}]}}'.format(",".join(["{}"] * 200_001))
    with httpx.Client(base_url=quick_url, trust_env=False, timeout=60) as http:
        for path in ("/v1/chat/completions", "/v1/rollouts", "/v1/weights/begin"):
            for content, said in ((names, "10000 names"), (objects, "200000 objects")):
                answer = http.post(
                    path, content=content, headers={"Content-Type": "application/json"}
                )
                assert answer.status_code == 413 and said in answer.text, answer.text


def test_half_a_character_is_refused_wherever_text_is_taken(quick_url: str) -> None:
    with httpx.Client(base_url=quick_url, trust_env=False, timeout=30) as http:
        http.post("/v1/sessions", json={"id": "fuzz"})
        for route, body in good_bodies("none", VOCABULARY).items():
            if route.startswith(SESSION):
                answer = http.post(route, json=body)
                assert answer.status_code == 200, answer.text
        tried = 0
        for route, body in good_bodies("none", VOCABULARY).items():
            for path in places(body):
                value: Any = body
                for key in path:
                    value = value[key]
                if not isinstance(value, str):
                    continue
                changed = json.loads(json.dumps(body))
                parent = changed
                for key in path[:-1]:
                    parent = parent[key]
                parent[path[-1]] = "\ud800"
                answer = http.post(
                    route, content=json.dumps(changed), headers={"Content-Type": "application/json"}
                )
                assert answer.status_code in (400, 422), (route, path, answer.text)
                tried += 1
    assert tried > 10


def test_a_bucket_of_nonsense_and_headers_that_are_none(serve_engine: Callable[..., str]) -> None:
    url = serve_engine(QuickEngine(), EXPECTED, update_timeout=20)  # the update must stay open
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
        token = http.post("/v1/weights/lease", json={"owner": "w"}).json()["token"]
        lease = {"X-Swift-Lease": token}
        assert http.post("/v1/weights/begin", json={"version": 1}, headers=lease).status_code == 200
        about = {"X-Swift-Weight-Version": "1", "X-Swift-Bucket": "0"}
        for body in (
            b"",
            b"\x00" * 8,
            b"\xff" * 8,
            b"\x02" + b"\x00" * 7 + b"[]",
            b"\x02" + b"\x00" * 7 + b"{}",
        ):
            assert (
                http.put("/v1/weights/bucket", content=body, headers=lease | about).status_code
                == 422
            )
        bad = [
            {"X-Swift-Bucket": "-1"},
            {"X-Swift-Weight-Version": "9" * 5000},
            {"X-Swift-Bucket-XXH3": "zz"},
        ]
        for change in bad:
            assert (
                http.put(
                    "/v1/weights/bucket", content=b"x", headers=lease | about | change
                ).status_code
                == 422
            )
        assert http.put("/v1/weights/bucket", content=b"x", headers=about).status_code == 409
        wrong = {"X-Swift-Lease": "\u00e9".encode("latin-1")}
        assert (
            http.put("/v1/weights/bucket", content=b"x", headers=about | wrong).status_code == 409
        )


def test_numbers_and_names_beyond_what_is_kept(serve_engine: Callable[..., str]) -> None:
    """Each was a 500."""
    url = serve_engine(
        QuickEngine(), EXPECTED, update_timeout=20, vllm_enable_lora=True, vllm_max_lora_rank=8
    )
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
        asked = {"model": "none", "prompt": [2**31], "max_tokens": 1}
        assert http.post("/v1/completions", json=asked).status_code == 400
        token = http.post("/v1/weights/lease", json={"owner": "w"}).json()["token"]
        lease = {"X-Swift-Lease": token}
        adapter = {"rank": 4, "alpha": 1, "target_modules": ["\ud800"]}
        begin = json.dumps({"version": 1, "adapter": adapter})
        kind = {"Content-Type": "application/json"}
        assert (
            http.post("/v1/weights/begin", content=begin, headers=lease | kind).status_code == 422
        )
        for version in (2**53, 10**400):
            assert (
                http.post("/v1/weights/begin", json={"version": version}, headers=lease).status_code
                == 422
            )
            about = {"X-Swift-Weight-Version": str(version), "X-Swift-Bucket": "0"}
            assert (
                http.put("/v1/weights/bucket", content=b"x", headers=lease | about).status_code
                == 422
            )


def update_begun(http: httpx.Client) -> str:
    """Opens an update to version 1 and returns its lease."""
    lease: str = http.post("/v1/weights/lease", json={"owner": "w"}).json()["token"]
    http.post("/v1/weights/begin", json={"version": 1}, headers={"X-Swift-Lease": lease})
    return lease


def send_and_hang_up(url: httpx.URL, called: str, headers: Sequence[str], body: str) -> None:
    lines = [f"{called} HTTP/1.1", "Host: 127.0.0.1", *headers, "", body]
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall("\r\n".join(lines).encode())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_before_it_is_let_in_waits_no_longer(
    serve_engine: Callable[..., str], stream: bool
) -> None:
    url = httpx.URL(serve_engine(QuickEngine(), EXPECTED, update_timeout=300))
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
        update_begun(http)
        name = http.get("/v1/models").json()["data"][0]["id"]
        body = json.dumps({"model": name, "prompt": "a", "max_tokens": 1, "stream": stream})
        headers = [f"Content-Length: {len(body)}", "Content-Type: application/json"]
        send_and_hang_up(url, "POST /v1/completions", headers, body)
        text = 'swift_http_requests_total{route="/v1/completions",status="499"} 1.0'
        until(lambda: text in http.get("/metrics").text)


def test_a_client_that_hangs_up_in_a_bucket_leaves_no_traceback(
    serve_engine: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    url = httpx.URL(serve_engine(QuickEngine(), EXPECTED, update_timeout=20))
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
        headers = [
            "Content-Length: 1000",
            "X-Swift-Bucket: 0",
            "X-Swift-Weight-Version: 1",
            f"X-Swift-Lease: {update_begun(http)}",
        ]
        send_and_hang_up(url, "PUT /v1/weights/bucket", headers, "half")
        text = 'swift_http_requests_total{route="/v1/weights/bucket",status="499"} 1.0'
        until(lambda: text in http.get("/metrics").text)
        assert http.get("/v1/weights/update").json()["buckets"] == 0
    assert "Traceback" not in caplog.text
