"""Anthropic's Messages and OpenAI's Responses at a session's address, with their own clients: the record is the engine's
own log, as for chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from swift_r1.models.expected import expected_weights
from swift_r1.plugins.tools.parsing import Parsed
from swift_r1.serving.protocols.turn import BlockReader
from tests.serving.session_engine import (
    ADD,
    CALL,
    LoggedTinyEngine,
    Opened,
    ScriptedEngine,
    same_as_logged,
)

TOOL: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": ADD["function"]["parameters"],
}
FUNCTION: Any = {"type": "function", "strict": True} | ADD["function"]
ASKS: Any = {"role": "user", "content": "1 + 2?"}
THANKS: Any = {"role": "user", "content": "thanks"}
THOUGHT = "<think>\nI add them.\n</think>\n\n"


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    "text",
    ["<think> a </t </think>\n b <think>", "<think>\n</think> b", "<thin b", " a < b\n", " "],
)
def test_a_stream_has_the_blocks_of_the_whole(text: str, opened: bool) -> None:
    """Wherever it is cut."""

    def blocks(*parts: str) -> list[tuple[str, str]]:
        reader = BlockReader(True, opened)
        shown: dict[int, str] = {}
        for place, part in enumerate(parts):
            for block, added in reader.add(Parsed(part), place == len(parts) - 1):
                shown[id(block)] = shown.get(id(block), "") + added
        assert [*shown.values()] == [block.text for block in reader.blocks]
        return [(block.kind, block.text) for block in reader.blocks]

    whole = blocks(text)
    assert blocks(*text) == whole
    for place in range(len(text)):
        assert blocks(text[:place], text[place:]) == whole
    if text.startswith("<think> a") and not opened:
        assert whole == [("thoughts", "a </t "), ("text", "b <think>")]


@pytest.fixture
def engine(tool_tokenizer: Any) -> ScriptedEngine:
    return ScriptedEngine(tool_tokenizer)


@pytest.fixture
def session(engine: ScriptedEngine, serve_engine: Callable[..., str]) -> Opened:
    return Opened(serve_engine(engine, {}), key="k")


def claude(session: Opened, **more: Any) -> anthropic.Anthropic:
    given = {"base_url": session.base_url.removesuffix("/v1"), "api_key": session.api_key}
    return anthropic.Anthropic(**{"max_retries": 0, "timeout": 60} | given | more)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "any", "max_tokens": 300, "messages": [ASKS]} | more


def said(message: Any) -> list[tuple[str, Any]]:
    names = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(block.type, getattr(block, names[block.type])) for block in message.content]


def one_sequence(session: Opened, engine: ScriptedEngine, calls: int) -> None:
    record = session.record()
    assert record.kinds == {"new": 1, "extends": calls - 1} and len(record.sequences) == 1
    same_as_logged(record, engine.log)


@pytest.mark.parametrize("streamed", [False, True])
def test_messages_with_thoughts_and_tools(
    session: Opened, engine: ScriptedEngine, streamed: bool
) -> None:
    talk = claude(session)
    engine.says = [f"{THOUGHT}So:\n{CALL}", "<think>3</think>It is 3.", "Bye."]
    given = asked(tools=[TOOL], system="short", thinking={"type": "adaptive"})

    def ask() -> Any:
        if not streamed:
            return talk.messages.create(**given, extra_body={"top_k": 5})
        with talk.messages.stream(**given) as stream:
            kinds = [event.type for event in stream]
            assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
            return stream.get_final_message()

    first = ask()
    assert said(first) == [
        ("thinking", "I add them.\n"),
        ("text", "So:\n"),
        ("tool_use", {"a": 1, "b": 2}),
    ]
    assert first.stop_reason == "tool_use"
    assert first.usage.input_tokens == len(engine.log[0].prompt)
    assert first.usage.output_tokens == len(engine.log[0].token_ids)
    [use] = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
    given["messages"] += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    counted = {name: given[name] for name in ("model", "messages", "system", "tools", "thinking")}
    count = talk.messages.count_tokens(**counted).input_tokens
    second = ask()
    assert count == len(engine.log[1].prompt) == second.usage.input_tokens
    assert said(second) == [("thinking", "3"), ("text", "It is 3.")]
    assert second.stop_reason == "end_turn"
    # plain JSON, without what is not said
    echoed = [block.model_dump(exclude_none=True) for block in second.content]
    given["messages"] += [{"role": "assistant", "content": echoed}, THANKS]
    assert said(ask()) == [("text", "Bye.")]
    one_sequence(session, engine, 3)
    [sequence] = session.record().sequences
    shown = engine.prompts.tokenizer.decode(sequence.token_ids)
    assert shown.startswith(f"{THOUGHT}So:\n{CALL}<|im_end|>")
    assert sequence.tools == (ADD,)
    assert f"msg_{session.record().calls[0].completion_id}" == first.id
    if not streamed:
        assert {one.sampling.top_k for one in session.record().calls} == {5}


@pytest.mark.parametrize("protocol", ["messages", "responses"])
def test_results_of_parallel_calls_are_read_in_the_order_of_the_calls(
    session: Opened, engine: ScriptedEngine, protocol: str
) -> None:
    """Whatever came first: the template shows no ids. An answer to no call, a second one, and one behind a call
    without any are refused."""
    engine.says = ["fine."] * 2

    def ask(*answers: str) -> None:
        if protocol == "messages":
            uses = [{"type": "tool_use", "id": one, "name": "add", "input": {}} for one in "ab"]
            results = [
                {"type": "tool_result", "tool_use_id": one, "content": f"said {one}"}
                for one in answers
            ]
            turns = [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
            claude(session).messages.create(**asked(tools=[TOOL], messages=[ASKS, *turns]))
        else:
            items = [
                {"type": "function_call", "call_id": one, "name": "add", "arguments": "{}"}
                for one in "ab"
            ]
            outputs = [
                {"type": "function_call_output", "call_id": one, "output": f"said {one}"}
                for one in answers
            ]
            client = openai.OpenAI(
                base_url=session.base_url, api_key=session.api_key, max_retries=0
            )
            client.responses.create(model="any", input=[ASKS, *items, *outputs], tools=[FUNCTION])

    ask("a", "b")
    ask("b", "a")
    first, second = (engine.prompts.tokenizer.decode(one.prompt) for one in engine.log)
    assert first == second and first.index("said a") < first.index("said b")
    for answers, why in ("az", "none of a, b"), ("aa", "answered twice"), ("b", "a later one has"):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=why):
            ask(*answers)


@pytest.mark.parametrize("streamed", [False, True])
def test_responses_with_thoughts_and_tools(
    session: Opened, engine: ScriptedEngine, streamed: bool
) -> None:
    talk = session.client
    engine.says = [f"{THOUGHT}So:\n{CALL}", "<think>3</think>It is 3.", "Bye."]
    given: dict[str, Any] = {"model": "any", "tools": [FUNCTION], "instructions": "short"}
    conversation: list[Any] = [ASKS]

    def ask(*items: Any) -> Any:
        conversation.extend(items)
        given["input"] = conversation
        if not streamed:
            answer = talk.responses.create(**given)
        else:
            with talk.responses.stream(**given) as stream:
                events = list(stream)
                assert [event.sequence_number for event in events] == [*range(len(events))]
                answer = stream.get_final_response()
        conversation.extend(answer.output)
        return answer

    first = ask()
    thoughts, text, call = first.output
    assert [one.type for one in first.output] == ["reasoning", "message", "function_call"]
    assert thoughts.content[0].text == "I add them.\n" and first.output_text == "So:\n"
    assert json.loads(call.arguments) == {"a": 1, "b": 2} and text.status == "completed"
    usage = first.usage
    assert usage.input_tokens == len(engine.log[0].prompt)
    assert usage.output_tokens == len(engine.log[0].token_ids)
    thought = engine.prompts.encode_more(THOUGHT.rstrip())
    assert usage.output_tokens_details.reasoning_tokens == len(thought)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    assert ask(result).output_text == "It is 3."
    assert ask(THANKS).output_text == "Bye."
    one_sequence(session, engine, 3)


def ask_messages(session: Opened, messages: list[Any], **more: Any) -> str:
    answer = claude(session).messages.create(**asked(messages=messages, **more))
    return "".join(block.text for block in answer.content)


def ask_responses(session: Opened, messages: list[Any], **more: Any) -> str:
    return session.client.responses.create(model="any", input=messages, **more).output_text


BOTH = pytest.mark.parametrize("ask", [ask_messages, ask_responses])


@BOTH
def test_kinds_of_calls(session: Opened, engine: ScriptedEngine, ask: Callable[..., str]) -> None:
    """A sub-agent, a retry, a branch, an edit and a history that was replaced by a summary."""
    engine.says = ["one", "two", "sub", "again", "edited", "short", "end"]

    def words(*texts: str) -> list[Any]:
        roles = ("user", "assistant")
        return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]

    assert ask(session, words("a")) == "one"
    assert ask(session, words("a", "one", "b")) == "two"
    assert ask(session, words("sort this")) == "sub"
    retried = {"X-Stainless-Retry-Count": "1"}
    assert ask(session, words("sort this"), extra_headers=retried) == "sub"
    assert ask(session, words("a", "one", "c")) == "again"
    assert ask(session, words("a", "ones", "b")) == "edited"
    assert ask(session, words("so far: a, b", "two", "d")) == "short"
    # the same conversation in chat completions
    session.chat(*words("so far: a, b", "two", "d", "short", "e"))
    record = session.record()
    assert [one.kind for one in record.calls] == [
        *("new", "extends", "new", "branch", "new", "new", "extends"),
    ]
    assert record.retried == 1
    same_as_logged(record, engine.log)


@BOTH
def test_a_thought_that_is_cut_off(
    session: Opened, engine: ScriptedEngine, ask: Callable[..., str]
) -> None:
    engine.says = ["<think>one two three", "yes"]
    history: list[Any] = [ASKS]
    if ask is ask_messages:
        given = asked(messages=history, thinking={"type": "enabled", "budget_tokens": 1024})
        answer: Any = claude(session).messages.create(**given | {"max_tokens": 6})
        assert answer.stop_reason == "max_tokens"
        [block] = answer.content
        assert block.type == "thinking" and block.thinking
        history += [{"role": "assistant", "content": answer.content}, THANKS]
        claude(session).messages.create(**given)
    else:
        include: Any = ["reasoning.encrypted_content"]
        answer = session.client.responses.create(
            model="any", input=history, max_output_tokens=6, include=include, store=False
        )
        assert answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        [item] = answer.output
        # as clients that may not show thoughts send them back
        history += [item.model_dump(include={"type", "summary", "encrypted_content"}), THANKS]
        session.client.responses.create(model="any", input=history)
    one_sequence(session, engine, 2)


def test_why_a_message_ended(session: Opened, engine: ScriptedEngine) -> None:
    talk = claude(session)
    engine.says = ["one END", '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', "yes"]
    engine.endless = True
    stops = {"max_tokens": len(engine.prompts.encode_more("one END")), "stop_sequences": ["END"]}
    assert talk.messages.create(**asked(**stops)).stop_reason == "max_tokens"
    engine.endless = False
    written = said(talk.messages.create(**asked(tools=[TOOL])))
    assert written == [("text", CALL.replace('{"a": 1, "b": 2}', "[1]"))]  # no object, no call
    assert talk.messages.create(**asked(stop_sequences=["END"])).stop_sequence is None
    engine.endless = True
    long = asked(messages=[{"role": "user", "content": "a " * 1900}], max_tokens=128_000)
    assert talk.messages.create(**long).stop_reason == "model_context_window_exceeded"


def test_a_stop_sequence_is_named(tiny_model: Path, serve_engine: Callable[..., str]) -> None:
    engine = LoggedTinyEngine(str(tiny_model))
    session = Opened(serve_engine(engine, expected_weights(str(tiny_model))), seed=1)
    given = asked(max_tokens=40, extra_body={"temperature": 0})
    [(_, text)] = said(claude(session).messages.create(**given))
    stop = text[6:8]
    answer = claude(session).messages.create(**given, stop_sequences=["nowhere", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    same_as_logged(session.record(), engine.log)


MESSAGES_REFUSE: tuple[tuple[str, Any], ...] = (
    ("output_config", {"effort": "low"}),
    ("thinking.display", {"type": "adaptive", "display": "omitted"}),
    ("thinking", {"type": "between_tools"}),
    ("tools.0.type", [{"type": "bash_20250124", "name": "bash"}]),
    ("tools.0.defer_loading", [TOOL | {"defer_loading": True}]),
    ("messages", [ASKS, {"role": "assistant", "content": "It is"}]),
    ("messages.0.image", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
    ("messages.0.document", [{"role": "user", "content": [{"type": "document", "source": {}}]}]),
    ("tool_choice", {"type": "tool", "name": "other"}),
    ("max_tokens", 0),
)
RESPONSES_REFUSE: tuple[tuple[str, Any], ...] = (
    ("background", True),
    ("include", ["message.output_text.logprobs"]),
    ("input.0.web_search_call", [{"type": "web_search_call", "id": "ws_1"}]),
    ("input.0.type.input_text", [{"role": "user", "content": [{"type": "input_image"}]}]),
    ("input.0.item_reference", [{"type": "item_reference", "id": "msg_1"}]),
    ("previous_response_id.no response is stored here", "resp_1"),
    ("store.no response is stored here", True),
    ("reasoning.effort", {"effort": "high"}),
    ("text.format", {"format": {"type": "json_object"}}),
    ("tools.0.type", [{"type": "web_search"}]),
    ("top_logprobs", 3),
)


def named(name: str, sentence: str) -> None:
    assert not [part for part in name.split(".") if part not in sentence], sentence


def test_what_is_not_there_is_refused_by_name(session: Opened) -> None:
    keys = {"x-api-key": session.api_key, "Authorization": ""}
    path = f"/v1/sessions/{session.id}/v1/messages"
    for name, value in MESSAGES_REFUSE:
        given = asked(**{name.split(".")[0]: value})
        answer = session.http.post(path, json=given, headers=keys)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        named(name, answer.json()["error"]["message"])
    for name, value in RESPONSES_REFUSE:
        given = {"model": "any", "input": "hi"} | {name.split(".")[0]: value}
        with pytest.raises(openai.BadRequestError) as error:
            session.client.responses.create(**given)
        named(name, error.value.body["message"])
    assert session.record().calls == ()


def test_keys_limits_and_ends(session: Opened, engine: ScriptedEngine) -> None:
    with pytest.raises(anthropic.AuthenticationError, match="another session"):
        claude(session, api_key="swift-session-other").messages.create(**asked())
    limited = Opened(str(session.http.base_url), key="k", limits={"calls": 1})
    claude(limited).messages.create(**asked())
    with pytest.raises(anthropic.PermissionDeniedError, match="1 calls are used up"):
        claude(limited).messages.create(**asked())
    engine.endless = True
    given = asked(max_tokens=2000)
    with (
        claude(session).messages.stream(**given) as stream,
        pytest.raises(anthropic.APIStatusError) as error,
    ):
        for event in stream:
            if event.type == "text":
                session.http.delete(f"/v1/sessions/{session.id}")
    assert error.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="no session"):
        claude(session).messages.create(**asked())


def test_a_response_that_fails_on_its_way(session: Opened, engine: ScriptedEngine) -> None:
    engine.endless = True
    stream = session.client.responses.create(model="any", input="a", stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            session.http.delete(f"/v1/sessions/{session.id}")
    assert event.type == "response.failed" and "was deleted" in event.response.error.message
