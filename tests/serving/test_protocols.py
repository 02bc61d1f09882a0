"""Anthropic's Messages and OpenAI's Responses at a session's address, with their own clients: the record is the engine's
own log, as for chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest

from tests.serving.session_engine import ADD, CALL, Opened, ScriptedEngine, same_as_logged

TOOL: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": ADD["function"]["parameters"],
}
FUNCTION: Any = {"type": "function", "strict": True} | ADD["function"]
ASKS: Any = {"role": "user", "content": "1 + 2?"}
THANKS: Any = {"role": "user", "content": "thanks"}
THOUGHT = "<think>\nI add them.\n</think>\n\n"


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


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by", ["input", "previous_response_id", "item_reference"])
def test_responses_with_thoughts_and_tools(
    session: Opened, engine: ScriptedEngine, streamed: bool, by: str
) -> None:
    """The conversation comes back as a whole, or what is stored of it is named."""
    talk = session.client
    engine.says = [f"{THOUGHT}So:\n{CALL}", "<think>3</think>It is 3.", "Bye."]
    given: dict[str, Any] = {"model": "any", "tools": [FUNCTION], "instructions": "short"}
    conversation: list[Any] = [ASKS]

    def ask(*items: Any) -> Any:
        conversation.extend(items)
        given["input"] = items or "1 + 2?"
        if by != "previous_response_id":
            given["input"] = conversation
        if not streamed:
            answer = talk.responses.create(**given)
        else:
            with talk.responses.stream(**given) as stream:
                events = list(stream)
                assert [event.sequence_number for event in events] == [*range(len(events))]
                answer = stream.get_final_response()
        stored = talk.responses.retrieve(answer.id)
        assert stored.output == answer.output or streamed
        if by == "previous_response_id":
            given["previous_response_id"] = answer.id
        elif by == "item_reference":
            conversation.extend({"type": "item_reference", "id": one.id} for one in answer.output)
        else:
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
