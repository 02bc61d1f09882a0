"""The engine as the server sees it, and several copies of a model as one engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from swift_r1.data import prompt_templates as templates
from swift_r1.errors import UsageError
from swift_r1.sync.server import WeightEngine
from swift_r1.wire.protocol import (
    AdapterConfig,
    FinishReason,
    HTTPError,
    Routes,
    RoutesAsked,
    SamplingParams,
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The facts that are known once the engine has loaded."""

    name: str
    version: str
    vocab_size: int
    tokenizer_hash: str
    max_model_len: int  # of prompt and completion
    dtype: str
    nccl_workers: int = 0
    gpu: str | None = None  # where it has one: in memory of it weights can come
    can_sleep: bool = False
    batch_invariant: bool = False  # numbers for a token do not depend on what is computed beside it
    max_images: int = 0  # of a prompt
    placeholders: frozenset[int] = frozenset()  # tokens that stand for a part of an image
    routes: bool = False  # it can tell which experts it chooses
    copies: int = 1  # of the model


@dataclass(frozen=True, slots=True)
class PromptImage:
    """The file of an image, and its SHA-256."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class EnginePrompt:
    """What an engine reads, whatever number of completions it writes then.

    Attributes:
        token_ids: of the whole prompt, with a placeholder for each feature of an image.
        unexpanded_ids: with images, those with one placeholder for each.
        routes: the experts to be told, of its tokens and those that are written.
    """

    token_ids: tuple[int, ...]
    unexpanded_ids: tuple[int, ...] = ()
    images: tuple[PromptImage, ...] = ()
    routes: RoutesAsked | None = None


def check_expansion(prompt: EnginePrompt, own: Sequence[int]) -> None:
    """Raises HTTPError (422) where an engine makes other tokens, its `own`, of a prompt with images than the trainer does,
    which would learn from what was not sampled from."""
    pairs = enumerate(zip_longest(own, prompt.token_ids))
    unlike = [(place, here, there) for place, (here, there) in pairs if here != there]
    if unlike:
        place, here, there = unlike[0]
        raise HTTPError(
            422,
            f"of a prompt with {len(prompt.images)} images the engine's processor makes {len(own)} tokens, and the "
            f"trainer's {len(prompt.token_ids)}: they differ at token {place} ({here} and {there}). Are the processor's "
            "files those of the trainer's --model?",
        )


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion: `T` token ids, `T` log-probs (natural log, after temperature).

    `versions` are `(first token, weight version)` in order, at least one; None: those that were served when it began.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...] | None = None
    routes: Routes | None = None  # where the prompt asks for them


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probs of a sequence's tokens after the first, and where asked for the likeliest tokens in the place of
    each, likeliest first, with theirs."""

    logprobs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's text and log-prob; `top` are the likeliest tokens in its place, where they were asked for."""

    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part by which a completion has grown: token ids, and text (which may lag behind them)."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    # of the last piece: as in `Generated`, of the whole completion
    versions: tuple[tuple[int, int], ...] | None = None
    routes: Routes | None = None


class PromptTokenizer:
    """Token ids of OpenAI's prompts, by the engine's Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # by token, at most the vocabulary
        self._arguments: dict[str, Any] = {}

    def with_arguments(self, arguments: Mapping[str, Any]) -> PromptTokenizer:
        """Returns the same, which passes `arguments` to the template. Raises HTTPError (400) where it reads one
        nowhere."""
        try:
            templates.check_read(arguments, templates.templates_of(self.tokenizer))
        except UsageError as error:
            raise HTTPError(400, f"chat_template_kwargs: {error}") from error
        own = copy.copy(self)
        own._arguments = self._arguments | dict(arguments)
        return own

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """The conversation in the model's template, with the opening of an answer. Raises HTTPError (400) where there
        is no template, it refuses the messages, or it has no place for tools."""
        given = self._given(tools)
        try:
            return self.encode_more(
                templates.rendered(self.tokenizer, self._known(messages), True, **given)
            )
        except UsageError as error:
            raise HTTPError(400, str(error)) from error

    def behind(
        self,
        messages: Sequence[Mapping[str, Any]],
        place: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...] | None:
        """Returns what follows the text and the tool calls of the model's turn `messages[place]`, with the opening of
        the next one; None where the template does not say. Raises HTTPError (400) as `render`."""
        render = partial(templates.rendered, self.tokenizer, **self._given(tools))
        try:
            text = templates.behind_turn(render, self._known(messages), place)
        except UsageError:  # it wants to see the calls, whose end it does not tell from its own
            return None
        return None if text is None else self.encode_more(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Raises HTTPError (400) for a text without tokens."""
        tokens = tuple(self.tokenizer.encode(text))
        if not tokens:
            raise HTTPError(400, "the prompt has no tokens")
        return tokens

    def encode_more(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text that goes on behind others."""
        return templates.token_ids(self.tokenizer, text)

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token alone."""
        for token in token_ids:
            if token not in self._texts:
                self._texts[token] = str(self.tokenizer.decode([token]))
        return [self._texts[token] for token in token_ids]

    @cached_property
    def turn_end(self) -> int | None:
        """The token that ends an answer in the model's template, where there is one."""
        return templates.turn_end(partial(templates.rendered, self.tokenizer), self.tokenizer)

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that are no text."""
        return templates.special_tokens(self.tokenizer)

    def _given(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not self.tokenizer.chat_template:
            raise HTTPError(400, "this model has no chat template: use /v1/completions")
        if tools and not templates.renders_tools(self.tokenizer):
            raise HTTPError(
                400, "the model's chat template has no place for tools: describe them in a message"
            )
        return self._arguments | ({"tools": list(tools)} if tools else {})

    def _known(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages as templates know them. One that does not know OpenAI's `developer`, the new name of the
        system, would leave its message out."""
        if "developer" in templates.tool_template(self.tokenizer):
            return [dict(one) for one in messages]
        return [
            {**one, "role": "system" if one["role"] == "developer" else one["role"]}
            for one in messages
        ]


class InferenceEngine(WeightEngine, Protocol):
    """An engine with one set of weights. Methods raise EngineDead once its process is gone."""

    info: EngineInfo
    prompts: PromptTokenizer
    scores_alone: bool
    """Whether `score` must be the only call that runs."""

    @property
    def dead(self) -> bool: ...

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        """Samples one completion; cancelling the call stops the engine's work on it. Raises HTTPError (422) where it
        makes other tokens of the images of a prompt."""

    def stream(
        self,
        prompt: EnginePrompt,
        sampling: SamplingParams,
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool = False,
    ) -> AsyncIterator[Piece]:
        """Samples one completion, piece by piece; the last one has the finish reason. `top_logprobs` None: without
        log-probs. With `special_tokens` the text has these too, except one that ends it."""

    async def expanded(self, prompt: EnginePrompt) -> tuple[int, ...]:
        """Returns the token ids that it makes of `unexpanded_ids` and images; only of an engine that takes some. Raises
        HTTPError (422)."""

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        """The `L - 1` log-probs of a sequence's tokens after the first, under the temperature set last."""

    async def score_top(self, sequence: Sequence[int], top: int) -> Scored:
        """Returns log-probs of given tokens, and the `top` likeliest tokens in each place."""

    async def set_score_temperature(self, temperature: float) -> None:
        """Divides all logits by `temperature`. Only for an engine that does nothing else; set it back to 1."""

    def shutdown(self) -> None: ...


class Replicas(InferenceEngine):
    """Several equal engines, each with a copy of the model, as one: each completion goes to the least loaded copy, new
    weights to all. With vLLM's own `data_parallel_size` the server would not know that every copy has loaded the whole
    version, nor could the probe ask each."""

    def __init__(self, engines: Sequence[InferenceEngine]) -> None:
        self.engines = engines
        self._load = [0] * len(engines)
        self.prompts = engines[0].prompts
        self.scores_alone = engines[0].scores_alone
        # A group of their workers would need a rank for each copy: weights come as files.
        self.info = replace(engines[0].info, nccl_workers=0, gpu=None, copies=len(engines))

    @property
    def dead(self) -> bool:
        return any(engine.dead for engine in self.engines)

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        with self._least_loaded() as engine:
            return await engine.generate(prompt, sampling, seed)

    async def stream(
        self,
        prompt: EnginePrompt,
        sampling: SamplingParams,
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool = False,
    ) -> AsyncIterator[Piece]:
        with self._least_loaded() as engine:
            async for piece in engine.stream(prompt, sampling, seed, top_logprobs, special_tokens):
                yield piece

    async def expanded(self, prompt: EnginePrompt) -> tuple[int, ...]:
        return await self.engines[0].expanded(prompt)

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        with self._least_loaded() as engine:
            return await engine.score(sequence)

    async def score_top(self, sequence: Sequence[int], top: int) -> Scored:
        with self._least_loaded() as engine:
            return await engine.score_top(sequence, top)

    async def set_score_temperature(self, temperature: float) -> None:
        await _all(engine.set_score_temperature(temperature) for engine in self.engines)

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        await _all(engine.load_weights(files, version) for engine in self.engines)

    async def load_adapter(
        self, files: Sequence[Path], config: AdapterConfig, version: int
    ) -> None:
        await _all(engine.load_adapter(files, config, version) for engine in self.engines)

    async def sleep(self, level: int) -> None:
        await _all(engine.sleep(level) for engine in self.engines)

    async def wake(self, weights_only: bool = False) -> None:
        await _all(engine.wake(weights_only) for engine in self.engines)

    def shutdown(self) -> None:
        for engine in self.engines:
            engine.shutdown()

    @contextmanager
    def _least_loaded(self) -> Iterator[InferenceEngine]:
        number = min(range(len(self.engines)), key=self._load.__getitem__)
        self._load[number] += 1
        try:
            yield self.engines[number]
        finally:
            self._load[number] -= 1


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits for all, also where one has failed: none may still read when its files are removed."""
    ended = await asyncio.gather(*work, return_exceptions=True)
    for one in ended:
        if isinstance(one, BaseException):
            raise one
