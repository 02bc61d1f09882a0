"""`python -m tests.plugins.tools.scripted_server MODEL PORT [CONFIG_JSON]`: `tests/tiny_server.py` with an engine that
calls tools, by its seed in one way or another; the log-probs are its model's own."""

from __future__ import annotations

import json
import re
import sys

from swift_r1.runtime.processes import leave
from swift_r1.serving.engines.base import EnginePrompt, Generated
from swift_r1.wire.protocol import SamplingParams
from tests import tiny_server


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def says(prompt: str, seed: int) -> str:
    """An answer where a tool has answered; before, a guess, a call, two calls, one that fails, or one of a server."""
    a, b = map(int, re.findall(r"What is (\d+) \+ (\d+)\?", prompt)[-1])
    answers = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt)
    if answers:
        return f"It is {answers[0]}"
    return (
        "It is 7",
        call("add", a=a, b=b),
        f"{call('add', a=a, b=b)}\n{call('echo', text='x' * 30)}",
        call("fails", how="now"),
        call("count"),
    )[seed % 5]


class ScriptedEngine(tiny_server.TinyEngine):
    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        ids = self.tokenizer(
            says(self.tokenizer.decode(prompt.token_ids), seed or 0), add_special_tokens=False
        )["input_ids"]
        written = (*ids, self.tokenizer.eos_token_id)
        logprobs = (await self.score((*prompt.token_ids, *written)))[-len(written) :]
        return Generated(written, logprobs, "stop", ((0, self.version),))


if __name__ == "__main__":
    tiny_server.TinyEngine = ScriptedEngine  # type: ignore[misc]
    leave(tiny_server.main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
