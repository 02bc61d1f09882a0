"""For tests of sessions: engines with a log of what they were asked and gave, a session with a client, and what both
must agree on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from swift_r1.serving.engines.base import (
    EngineInfo,
    EnginePrompt,
    Generated,
    Piece,
    PromptTokenizer,
    TokenLogprob,
)
from swift_r1.wire.protocol import SamplingParams
from swift_r1.wire.sessions import RecordedSequence, SessionRecord
from tests.tiny_server import TinyEngine

USER = {"role": "user", "content": "1 + 2?"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        },
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@dataclass
class Entry:
    """One completion, as far as it came."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int | None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[tuple[int, int], ...] | None = None
    ended: str | None = None  # its finish reason, or what ended the work


class ScriptedEngine:
    """Says what it is told to, one token a piece. Texts of `says` are taken in turn, the last one again and again; with
    `endless` a completion goes on until its last token is reached."""

    dead = scores_alone = False

    def __init__(self, tokenizer: Any, length: int = 4000) -> None:
        self.prompts = PromptTokenizer(tokenizer)
        self.info = EngineInfo("scripted", "0", len(tokenizer), "", length, "float32")
        self.says = ["yes"]
        self.endless = False
        self.version = 0
        self.log: list[Entry] = []

    async def stream(
        self,
        prompt: EnginePrompt,
        sampling: SamplingParams,
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool = False,
    ) -> AsyncIterator[Piece]:
        tokenizer = self.prompts.tokenizer
        entry = Entry(prompt.token_ids, sampling, seed)
        self.log.append(entry)
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        end: list[int | None] = [] if self.endless else [self.prompts.turn_end]
        ids = [*tokenizer(said, add_special_tokens=False)["input_ids"], *end]
        if self.endless:
            ids = ids * sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        try:
            for place, token in enumerate(ids):
                await asyncio.sleep(0.001 if self.endless else 0)
                entry.token_ids += (token,)
                entry.logprobs += (-(token % 7) / 8,)
                reason: Any = None
                if place + 1 == len(ids):
                    reason = "stop" if token == self.prompts.turn_end else "length"
                    entry.ended, entry.versions = reason, ((0, self.version),)
                text = (
                    tokenizer.decode([token], skip_special_tokens=not special_tokens)
                    if reason != "stop"
                    else ""
                )
                given = (TokenLogprob(tokenizer.decode([token]), entry.logprobs[-1]),)
                yield Piece(
                    (token,),
                    text,
                    given if top_logprobs is not None else (),
                    reason,
                    entry.versions,
                )
        finally:
            entry.ended = entry.ended or "stopped"

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        raise NotImplementedError

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        self.version = version

    def shutdown(self) -> None: ...


class LoggedTinyEngine(TinyEngine):
    """The transformers engine, with a log."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.log: list[Entry] = []

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        one = await super().generate(prompt, sampling, seed)
        entry = Entry(
            prompt.token_ids,
            sampling,
            seed,
            one.token_ids,
            one.logprobs,
            one.versions,
            one.finish_reason,
        )
        self.log.append(entry)
        return one


class Opened:
    """A session of the server at `url`, with OpenAI's client."""

    def __init__(self, url: str, key: str | None = None, **asked: Any) -> None:
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=60)
        if key is not None:
            self.http.headers["Authorization"] = f"Bearer {key}"
        answer = self.http.post("/v1/sessions", json=asked)
        assert answer.status_code == 200, answer.text
        self.id, self.base_url, self.api_key = (
            answer.json()[name] for name in ("id", "base_url", "api_key")
        )
        assert self.base_url == f"{url}/v1/sessions/{self.id}/v1"
        self.client = self.talk()

    def talk(self, **more: Any) -> openai.OpenAI:
        given = {
            "base_url": self.base_url,
            "api_key": self.api_key,
            "timeout": 60,
            "max_retries": 0,
        }
        return openai.OpenAI(**given | more)

    def chat(self, *messages: Any, **asked: Any) -> Any:
        return self.client.chat.completions.create(
            **{"model": "none", "messages": messages or [USER]} | asked
        )

    def record(self) -> SessionRecord:
        answer = self.http.get(f"/v1/sessions/{self.id}")
        assert answer.status_code == 200, answer.text
        return SessionRecord.model_validate_json(answer.content)


def same_as_logged(record: SessionRecord, log: Sequence[Entry]) -> None:
    """Each completion of the log is trained in one sequence exactly, behind the prompt that the engine was asked."""
    found = [span for one in record.sequences for span in trained(one)]
    expected = []
    for entry in log:
        spans = [*(entry.versions or ()), (len(entry.token_ids), -1)]
        versions = [
            spans[i][1] for i in range(len(spans) - 1) for _ in range(spans[i][0], spans[i + 1][0])
        ]
        expected.append((entry.prompt, entry.token_ids, entry.logprobs, versions))
    assert sorted(found) == sorted(expected)


def trained(
    one: RecordedSequence,
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], list[int]]]:
    """Of each completion: its prompt, tokens, log-probs and versions."""
    for own, logprob, version in zip(one.loss_mask, one.logprobs, one.versions, strict=True):
        assert own or (logprob == 0 and version is None)
    mask = (False, *one.loss_mask, False)
    starts = [place for place in range(len(mask) - 1) if not mask[place] and mask[place + 1]]
    ends = [place for place in range(len(mask) - 1) if mask[place] and not mask[place + 1]]
    return [
        (
            (*one.prompt_token_ids, *one.token_ids[:start]),
            one.token_ids[start:end],
            one.logprobs[start:end],
            [version for version in one.versions[start:end] if version is not None],
        )
        for start, end in zip(starts, ends, strict=True)
    ]
