"""Engines that keep a log of what they were asked and what they gave, for tests of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_r1.inference.engines.base import EngineInfo, Generated, Piece, PromptTokenizer, TokenLogprob
from swift_r1.wire.protocol import SamplingParams
from tests.tiny_server import TinyEngine


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
        prompt: Sequence[int],
        sampling: SamplingParams,
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool = False,
    ) -> AsyncIterator[Piece]:
        tokenizer = self.prompts.tokenizer
        entry = Entry(tuple(prompt), sampling, seed)
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
                text = tokenizer.decode([token], skip_special_tokens=not special_tokens) if reason != "stop" else ""
                given = (TokenLogprob(tokenizer.decode([token]), entry.logprobs[-1]),)
                yield Piece((token,), text, given if top_logprobs is not None else (), reason, entry.versions)
        finally:
            entry.ended = entry.ended or "stopped"

    async def generate(self, prompt: Sequence[int], sampling: SamplingParams, seed: int | None) -> Generated:
        raise NotImplementedError

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        self.version = version

    def shutdown(self) -> None: ...


class LoggedTinyEngine(TinyEngine):
    """The transformers engine, with a log."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.log: list[Entry] = []

    async def generate(self, prompt: Sequence[int], sampling: SamplingParams, seed: int | None) -> Generated:
        one = await super().generate(prompt, sampling, seed)
        entry = Entry(tuple(prompt), sampling, seed, one.token_ids, one.logprobs, one.versions, one.finish_reason)
        self.log.append(entry)
        return one
