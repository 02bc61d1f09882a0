"""Sessions over HTTP: the official client at a session's address, and a record that is the engine's own log."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from swift_r1.errors import UsageError
from swift_r1.flags.server import RolloutArguments
from swift_r1.serving.metrics import ServerMetrics
from swift_r1.serving.service import RolloutService
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutRequest
from tests import tool_templates as templates
from tests.conftest import until
from tests.live_servers import push_weights
from tests.serving.session_engine import (
    ADD,
    CALL,
    USER,
    Opened,
    ScriptedEngine,
    same_as_logged,
    trained,
)


@pytest.fixture
def engine(tool_tokenizer: Any) -> ScriptedEngine:
    return ScriptedEngine(tool_tokenizer)


@pytest.fixture
def url(engine: ScriptedEngine, serve_engine: Callable[..., str]) -> str:
    return serve_engine(engine, {})


def test_an_agent_with_tools_is_one_sequence_of_the_engines_own_tokens(
    url: str, engine: ScriptedEngine
) -> None:
    session = Opened(url)
    engine.says = [f"  I  add.\n{CALL}", "It is 3. ", "Bye."]
    first = session.chat(tools=[ADD])
    [call] = first.choices[0].message.tool_calls
    answer = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    # The client's own object goes back, then the same as plain JSON, written otherwise.
    second = session.chat(USER, first.choices[0].message, answer, tools=[ADD])
    assert second.choices[0].message.content == "It is 3. "
    echoed = {
        "role": "assistant",
        "content": "I add.",
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": "add", "arguments": '{"b":2,"a":1}'},
            }
        ],
    }
    said = [
        USER,
        echoed,
        answer,
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "thanks"},
    ]
    session.chat(*said, tools=[ADD], stream=False)
    record = session.record()
    assert record.kinds == {"new": 1, "extends": 2} and len(record.sequences) == 1
    same_as_logged(record, engine.log)
    [sequence] = record.sequences
    shown = engine.prompts.tokenizer.decode([*sequence.prompt_token_ids, *sequence.token_ids])
    assert (
        shown.count(
            f"assistant\n  I  add.\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n"
        )
        == 1
    )
    assert sequence.tools == (ADD,) and sequence.messages[-1] == {
        "role": "assistant",
        "content": "Bye.",
    }
    ids = [f"chatcmpl-{one.completion_id}" for one in record.calls]
    assert ids[:2] == [first.id, second.id] and [one.parent for one in record.calls] == [None, 0, 1]


def test_the_session_overrules_and_counts(url: str, engine: ScriptedEngine) -> None:
    sampling = {"temperature": 0.7, "min_p": 0.1, "max_tokens": 9}
    session = Opened(url, seed=1, sampling=sampling, limits={"calls": 3, "tokens": 12})
    session.chat(temperature=0.1, top_p=0.5, seed=4)
    session.chat(temperature=0.7, model="gpt-4o", max_tokens=2)
    assert [
        (one.sampling.temperature, one.sampling.min_p, one.sampling.top_p) for one in engine.log
    ] == [
        (0.7, 0.1, 0.5),
        (0.7, 0.1, 1.0),
    ]
    assert [one.sampling.max_tokens for one in engine.log] == [9, 2]
    record = session.record()
    assert [one.sampling.top_p for one in record.calls] == [0.5, 1.0]
    assert [one.seed for one in record.calls] == [one.seed for one in engine.log] != [4, None]
    session.chat()
    with pytest.raises(openai.PermissionDeniedError, match="3 calls are used up"):
        session.chat()
    with pytest.raises(openai.BadRequestError, match="n must be 1"):
        session.chat(n=2)


def test_what_changes_no_token_is_accepted_and_the_rest_refused(url: str) -> None:
    session = Opened(url)
    ignored = {
        "store": True,
        "metadata": {"run": "1"},
        "service_tier": "auto",
        "user": "me",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "modalities": ["text"],
        "extra_body": {
            "temperature": None,
            "n": None,
            "stop": None,
            "tools": None,
            "reasoning_effort": None,
        },
    }
    strict = {"type": "function", "function": ADD["function"] | {"strict": True}}
    developer = {"role": "developer", "content": [{"type": "text", "text": "short"}]}
    session.chat(developer, USER, tools=[strict], **ignored)
    [sequence] = session.record().sequences
    assert sequence.messages[0] == {"role": "developer", "content": "short"}
    for name, value in {
        "frequency_penalty": 0.5,
        "logit_bias": {"3": 1},
        "response_format": {"type": "json_object"},
        "reasoning_effort": "high",
        "modalities": ["audio"],
        "extra_body": {"min_tokens": 3},
    }.items():
        with pytest.raises(openai.BadRequestError) as error:
            session.chat(**{name: value})
        assert (name if name != "extra_body" else "min_tokens") in error.value.body["message"]


def test_what_clients_add_to_the_models_message_is_ignored(
    url: str, engine: ScriptedEngine
) -> None:
    """As openai's `parse` and LiteLLM send it back, and `null` for an answer without a word."""
    session = Opened(url)
    engine.says = [CALL, "", "yes"]
    [call] = session.chat(tools=[ADD]).choices[0].message.tool_calls
    function = call.function.model_dump() | {"parsed_arguments": {"a": 1, "b": 2}}
    made = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call.id, "type": "function", "index": 0, "function": function}],
        "parsed": None,
        "refusal": None,
        "annotations": [],
        "provider_specific_fields": {"refusal": None},
    }
    answer = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    assert session.chat(USER, made, answer, tools=[ADD]).choices[0].message.content == ""
    session.chat(USER, made, answer, {"role": "assistant", "content": None}, USER, tools=[ADD])
    record = session.record()
    assert record.kinds == {"new": 1, "extends": 2}
    same_as_logged(record, engine.log)
    for wrong in (
        {"role": "user", "content": "a", "parsed": 1},
        {"role": "assistant", "refusal": "no"},
    ):
        with pytest.raises(openai.BadRequestError):
            session.chat(wrong)


def test_arguments_of_the_template(tool_tokenizer: Any, serve_engine: Callable[..., str]) -> None:
    """The server's, then the request's; other ones make another prompt, and thoughts stay as they were written."""
    tool_tokenizer.chat_template = templates.THINKING
    engine = ScriptedEngine(tool_tokenizer)
    engine.says = [thought := "<think>\nhm\n</think>\n\n3", "yes"]
    session = Opened(serve_engine(engine, {}, enable_thinking=False))
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    said = session.chat(extra_body=thinks).choices[0].message
    session.chat(USER, said, USER, extra_body=thinks)
    session.chat(USER, said, USER)
    first, second, third = (engine.prompts.tokenizer.decode(one.prompt) for one in engine.log)
    user = "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert first == user and second == f"{user}{thought}<|im_end|>\n{user}"
    assert third == f"{user}3<|im_end|>\n{user}<think>\n\n</think>\n\n"
    record = session.record()
    assert record.kinds == {"new": 2, "extends": 1}
    same_as_logged(record, engine.log)
    for arguments, why in (
        (
            {"thinking": True},
            "chat_template_kwargs: the chat template does not read thinking, so it would have no",
        ),
        ({"tools": []}, "has 'tools', which is not an argument of a chat template"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            session.chat(extra_body={"chat_template_kwargs": arguments})
    with pytest.raises(UsageError, match="the chat template does not read thinking"):
        RolloutService(
            RolloutArguments(chat_template_kwargs={"thinking": 1}), engine, {}, ServerMetrics()
        )


def test_a_developers_message_is_the_systems_where_the_template_knows_no_other(
    url: str, engine: ScriptedEngine
) -> None:
    session = Opened(url)
    session.chat({"role": "developer", "content": "short"}, USER)
    session.chat({"role": "system", "content": "short"}, USER)
    assert engine.log[0].prompt == engine.log[1].prompt


def test_retries_of_the_client_are_one_call(url: str, engine: ScriptedEngine) -> None:
    session = Opened(url)
    again = {"X-Stainless-Retry-Count": "1"}
    first = session.chat()
    same = session.chat(extra_headers=again)
    assert (same.id, same.choices) == (first.id, first.choices) and len(engine.log) == 1
    streamed = list(session.chat(extra_headers=again, stream=True))
    assert streamed[0].id == first.id and streamed[0].choices[0].delta.content == "yes"
    assert session.chat().id != first.id  # not a retry: asked twice, it is answered twice
    key = {"Idempotency-Key": "k"}
    assert session.chat(extra_headers=key).id == session.chat(extra_headers=key).id
    with pytest.raises(openai.BadRequestError, match="another call"):
        session.chat({"role": "user", "content": "else"}, extra_headers=key)
    record = session.record()
    assert (record.retried, len(record.calls)) == (3, 3)
    same_as_logged(record, engine.log)


def test_health_is_answered_while_a_prompt_is_rendered(
    url: str, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(work: Callable[..., Any], *given: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return work(*given)

    for name in ("render", "behind", "encode"):
        work = getattr(engine.prompts, name)
        monkeypatch.setattr(engine.prompts, name, partial(slowly, work))
    session = Opened(url)
    chat = {"model": "none", "messages": [USER]}
    whole = {"model": "none", "prompt": "a"}
    count = {"model": "none", "messages": [{"role": "user", "content": "b"}]}
    said = {"model": "none", "max_tokens": 9, **count}
    own = f"/v1/sessions/{session.id}/v1"
    calls = [
        ("/v1/chat/completions", chat),
        ("/v1/completions", whole),
        (f"{own}/chat/completions", chat),
        (f"{own}/messages/count_tokens", count),
        (f"{own}/messages", said),
        (f"{own}/responses", {"model": "none", "input": "c"}),
    ]
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, trust_env=False) as http:
        for path, body in calls:
            begun.clear()
            go_on.clear()
            answer = pool.submit(httpx.post, url + path, json=body, timeout=60, trust_env=False)
            assert begun.wait(60)
            assert http.get("/health", timeout=30).status_code == 200
            go_on.set()
            assert answer.result().status_code == 200, answer.result().text


def test_a_schema_that_no_grammar_can_follow_is_the_clients_fault(url: str) -> None:
    session = Opened(url)
    function = ADD["function"] | {
        "parameters": {"type": "object", "properties": {"a": {"type": "x"}}}
    }
    tool = {"type": "function", "function": function}
    with pytest.raises(openai.BadRequestError, match="cannot be held to these tools"):
        session.chat(tools=[tool], tool_choice="required")


def test_keys(engine: ScriptedEngine, serve_engine: Callable[..., str]) -> None:
    url = serve_engine(engine, {}, api_key="main")
    one, two = Opened(url, "main"), Opened(url, "main")
    one.chat()
    for given, said in ((two.api_key, "another session"), ("wrong", "needs its API key")):
        with pytest.raises(openai.AuthenticationError, match=said):
            one.client = one.talk(api_key=given)
            one.chat()
    one.client = one.talk(api_key="main")
    one.chat()
    own = {"Authorization": f"Bearer {one.api_key}"}
    for method, path in (
        ("GET", f"/v1/sessions/{one.id}"),
        ("POST", "/v1/sessions"),
        ("GET", "/v1/models"),
        ("GET", "/info"),
    ):
        assert one.http.request(method, path, headers=own).status_code == 401
    assert (
        httpx.get(f"{url}/v1/sessions/{one.id}/v1/models", headers=own, trust_env=False).status_code
        == 200
    )
    refusals = []
    for name in (one.id, "nowhere"):
        wrong = {"Authorization": f"Bearer {two.api_key}"}
        path = f"{url}/v1/sessions/{name}/v1/models"
        answer = httpx.get(path, headers=wrong, trust_env=False)
        refusals.append((answer.status_code, answer.text))
    assert refusals[0] == refusals[1]
    one.http.delete(f"/v1/sessions/{one.id}")
    one.client = one.talk()
    with pytest.raises(openai.NotFoundError, match="there is no session"):
        one.chat()


def test_a_server_without_a_key_still_keeps_sessions_apart(url: str) -> None:
    one, two = Opened(url), Opened(url)
    one.client = one.talk(api_key="none")
    one.chat()
    one.client = one.talk(api_key=two.api_key)
    with pytest.raises(openai.AuthenticationError):
        one.chat()


def test_bad_input_and_a_session_that_is_opened_again(url: str) -> None:
    session = Opened(url, id="run-1.a", seed=3)
    again = session.http.post("/v1/sessions", json={"id": "run-1.a", "seed": 3}).json()
    assert again["api_key"] == session.api_key
    bad: list[tuple[int, Any]] = [
        (409, {"id": "run-1.a", "seed": 4}),
        (422, {"id": "../x"}),
        (422, {"id": "a/b"}),
        (422, {"id": "x" * 10_000}),
        (422, {"id": ""}),
        (422, {"seed": -1}),
        (422, {"sampling": {"temperature": "hot"}}),
        (422, {"limits": {"tokens": 0}}),
        (422, {"colour": "red"}),
        (422, []),
    ]
    for status, body in bad:
        answer = session.http.post("/v1/sessions", json=body)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert session.http.post("/v1/sessions", content=b'{"id": "x').status_code == 422
    for name in ("x" * 10_000, "%2e%2e%2fhealth", "..%2Frun-1.a", "%00", "nobody"):
        for path in (f"/v1/sessions/{name}", f"/v1/sessions/{name}/v1/chat/completions"):
            post = path.endswith("completions")
            body = {"model": "none", "messages": [USER]} if post else None
            answer = session.http.request("POST" if post else "GET", path, json=body)
            assert answer.status_code == 404 and "error" in answer.json()
    bodies = []  # which no template and no record can write
    for schema in (b'{"a":' * 300 + b"1" + b"}" * 300, b'{"a": ["\\ud800"]}'):
        tool = b'{"type": "function", "function": {"name": "add", "parameters": %s}}' % schema
        bodies.append(
            b'{"model": "", "messages": [{"role": "user", "content": ""}], "tools": [%s]}' % tool
        )
    for content in bodies:
        headers = {"Content-Type": "application/json"}
        answer = session.http.post(
            f"/v1/sessions/{session.id}/v1/chat/completions", content=content, headers=headers
        )
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    record = session.record()
    assert (record.calls, record.failed) == ((), 0)
    session.chat()


def test_a_client_that_hangs_up_in_a_stream_ends_the_work(url: str, engine: ScriptedEngine) -> None:
    session = Opened(url, seed=1)
    engine.endless = True
    stream = session.chat(stream=True, max_tokens=3000)
    next(iter(stream))
    stream.close()
    until(lambda: engine.log[0].ended == "stopped")
    record = until(lambda: (found := session.record()).failed and found)
    assert (record.running, record.calls) == (0, ())
    # The client tries again: a call with the seed that the lost one had.
    session.chat(max_tokens=3, extra_headers={"X-Stainless-Retry-Count": "1"})
    session.chat(
        max_tokens=3000, stream=True, extra_headers={"X-Stainless-Retry-Count": "1"}
    ).close()
    until(lambda: len(engine.log) == 3)
    assert engine.log[2].seed == engine.log[0].seed != engine.log[1].seed


def test_the_records_are_bounded_in_memory(
    engine: ScriptedEngine, serve_engine: Callable[..., str]
) -> None:
    url = serve_engine(engine, {}, session_memory=16_000 / 2**30)
    session = Opened(url)
    with pytest.raises(openai.InternalServerError, match="--session_memory") as error:
        for _ in range(9):
            session.chat()
    assert error.value.status_code == 503 and "retry-after" in error.value.response.headers
    session.http.delete(f"/v1/sessions/{session.id}")
    Opened(url).chat()


@pytest.mark.parametrize("many", [64, pytest.param(2000, marks=pytest.mark.long)])
def test_many_sessions_at_once(url: str, engine: ScriptedEngine, many: int) -> None:
    async def all_of_them() -> set[tuple[str, str]]:
        room = asyncio.Semaphore(32)
        everybody = asyncio.Barrier(many + 1)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:

            async def one(number: int) -> tuple[str, str]:
                path = f"/v1/sessions/s{number}"
                said = {"model": "none", "messages": [{"role": "user", "content": str(number)}]}
                async with room:
                    session = (await http.post("/v1/sessions", json={"id": f"s{number}"})).json()
                    headers = {"Authorization": f"Bearer {session['api_key']}"}
                    answer = await http.post(
                        f"{path}/v1/chat/completions", json=said, headers=headers
                    )
                    assert answer.status_code == 200, answer.text
                await everybody.wait()
                async with room:
                    [sequence] = (await http.get(path)).json()["sequences"]
                    await http.delete(path)
                question, answer = sequence["messages"]
                assert question["content"] == str(number)
                return question["content"], answer["content"]

            answers = asyncio.gather(*(one(number) for number in range(many)))
            while everybody.n_waiting < many:
                await asyncio.wait([answers], timeout=0.05)
                if answers.done():
                    answers.result()
            assert f"swift_open_sessions {many}.0" in (await http.get("/metrics")).text
            await everybody.wait()
            found = set(await answers)
            assert "swift_open_sessions 0.0" in (await http.get("/metrics")).text
            return found

    assert asyncio.run(all_of_them()) == {(str(number), "yes") for number in range(many)}
    assert len(engine.log) == many


def test_weights_change_in_the_middle_of_a_session(
    engine: ScriptedEngine, serve_engine: Callable[..., str]
) -> None:
    """Each token has the version of the weights that wrote it; a call that the update stops is asked again."""
    weights = {"w": torch.zeros(2)}
    url = serve_engine(engine, {"w": (2,)}, client_grace=0.0)
    session = Opened(url, seed=1)
    with RolloutClient(url) as client:
        client.wait_until_ready(60)
        first = session.chat().choices[0].message
        push_weights(client, 1, [list(weights.items())])
        engine.endless = True
        history = (USER, first, USER)
        stream = session.chat(*history, max_tokens=3000, stream=True)
        next(iter(stream))
        push_weights(client, 2, [list(weights.items())])
        with pytest.raises(openai.APIError, match="stopped it; ask again"):
            list(stream)
    session.chat(*history, max_tokens=3, extra_headers={"X-Stainless-Retry-Count": "1"})
    record = session.record()
    assert (record.failed, record.kinds) == (1, {"new": 1, "extends": 1})
    same_as_logged(record, [engine.log[0], engine.log[2]])
    assert [one.weight_versions for one in record.calls] == [((0, 0),), ((0, 2),)]


@pytest.mark.long
def test_vllm_token_by_token(rollout_server: Callable[..., str], tiny_model: Path) -> None:
    """What a session records is what vLLM gives for the recorded prompts and seeds over /v1/rollouts."""
    url = rollout_server(tiny_model, torch_dtype="float32")
    with RolloutClient(url) as client:
        client.wait_until_ready(60)
        version = client.info().weight_version
        session = Opened(url, seed=7, sampling={"temperature": 1.0})
        history: list[Any] = [USER]
        for turn in range(4):
            asked = {"max_tokens": 40, "stop": ["e"] if turn == 2 else None, "temperature": 0.3}
            if turn == 1:
                message: Any = {"role": "assistant", "content": ""}
                for chunk in session.chat(*history, **asked, stream=True):
                    message["content"] += chunk.choices[0].delta.content or ""
            else:
                message = session.chat(*history, **asked).choices[0].message
            history += [message, {"role": "user", "content": f"and {turn}?"}]
        session.chat({"role": "user", "content": "else"}, max_tokens=20)
        record = session.record()
        assert record.kinds == {"new": 2, "extends": 3} and len(record.sequences) == 2
        found = [span for one in record.sequences for span in trained(one)]
        requests = [
            RolloutRequest(
                request_id=f"again-{number}",
                prompt_token_ids=span[0],
                seeds=(call.seed,),
                sampling=call.sampling,
            )
            for number, (call, span) in enumerate(zip(record.calls, found, strict=True))
        ]
        for output, span in zip(client.generate(requests), found, strict=True):
            [one] = output.completions
            assert (one.token_ids, one.weight_version) == (span[1], version) and set(span[3]) == {
                version
            }
            assert one.logprobs == pytest.approx(span[2], abs=1e-5)
