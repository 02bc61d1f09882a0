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
