"""The thread that answers agents, and its end."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from swift_r1.rollout.agents import gateway as module
from swift_r1.rollout.agents.gateway import AgentGateway, AgentModel
from swift_r1.serving.engines.base import PromptTokenizer
from swift_r1.serving.openai_messages import ToolCalls
from swift_r1.wire.protocol import LimitReached, RolloutRequest, SamplingParams


def test_it_closes_what_it_opened_and_says_where_it_cannot(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AgentModel(
        PromptTokenizer(tokenizer), ToolCalls(None, tokenizer), 1024, len(tokenizer), ()
    )
    gateway = AgentGateway(model)
    port = int(gateway.url.rpartition(":")[2])
    begun, may_end = threading.Event(), threading.Event()

    async def block() -> None:
        begun.set()
        may_end.wait()

    gateway.call(block())
    assert begun.wait(60)
    monkeypatch.setattr(module, "_WAIT_S", 0.1)
    gateway.close()
    assert "does not end" in caplog.text
    caplog.clear()
    may_end.set()
    monkeypatch.setattr(module, "_WAIT_S", 60.0)
    gateway.close()
    assert gateway.loop.is_closed() and not caplog.text
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_prompt_that_is_too_long_is_told_what_the_model_takes(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AgentModel(
        PromptTokenizer(tokenizer), ToolCalls(None, tokenizer), 4, len(tokenizer), ()
    )
    request = RolloutRequest(
        request_id="s/0",
        prompt_token_ids=(5,) * 6,
        seeds=None,
        sampling=SamplingParams(max_tokens=1),
    )
    with pytest.raises(LimitReached, match="the prompt is 6 tokens, the model takes 4"):
        model.pieces([request], None, None, False)
