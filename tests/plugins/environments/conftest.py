"""Episodes of environments with a script in the model's place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from swift_r1.plugins.environments.base import Row, adapter
from swift_r1.plugins.environments.scripted import ScriptedModel

FILES = Path(__file__).parent / "files"

Said = str | tuple[str, dict[str, Any]]
"""A text, or a tool's name with arguments."""


class Says(ScriptedModel):
    """One after the other; a call of the model beyond them fails."""

    def __init__(self, said: Sequence[Said]) -> None:
        super().__init__(lambda chance: "", 0)
        self._said = iter(said)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        said = next(self._said)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said if isinstance(said, str) else None,
        }
        if not isinstance(said, str):
            function = {"name": said[0], "arguments": json.dumps(said[1])}
            message["tool_calls"] = [
                {"id": f"c{len(self.requests)}", "type": "function", "function": function}
            ]
        self.messages = [*body["messages"], message]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {
            "id": "1",
            "created": 0,
            "model": "m",
            "object": "chat.completion",
            "choices": [choice],
        }


Played = Callable[..., tuple[Any, Says]]


@pytest.fixture
def played() -> Played:
    """`played(spec, args, said, row=None)`: what the agent returned, and the model; without a row the first of the
    environment's own."""

    def play(
        spec: str, args: dict[str, Any], said: Sequence[Said], row: Row | None = None
    ) -> tuple[Any, Says]:
        agent, model = adapter(spec, args), Says(said)
        row = row or next(islice(agent.rows("train", 1), 1))
        with model.client() as client:
            return asyncio.run(
                agent().run(client, {**row, "prompt_id": "env:0", "episode_id": "e"})
            ), model

    return play
