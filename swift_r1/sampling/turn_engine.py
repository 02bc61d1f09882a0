"""What a scheduler of several turns has as `infer_engine`: it keeps each trajectory's tokens, and waits for turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from swift_r1.data.prompts import PromptEncoder
from swift_r1.data.types import Prompt
from swift_r1.plugins.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    InferRequest,
    RequestConfig,
    UsageInfo,
)
from swift_r1.sampling.conversation import Conversation, TurnFault
from swift_r1.wire import protocol as wire
from swift_r1.wire.protocol import completion_seed


@dataclass(frozen=True, slots=True)
class Opening:
    """Begins a trajectory: the row's own prompt, or where a scheduler begins with other messages, theirs."""

    encoder: PromptEncoder
    ends: tuple[int, ...]

    def __call__(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]]) -> tuple[Prompt, Conversation]:
        own = [(message["role"], message["content"]) for message in prompt.messages]
        if [(message["role"], message["content"]) for message in messages] != own:
            text = self.encoder.render(messages)
            ids = self.encoder.tokenize(text)
            prompt = replace(prompt, messages=tuple(map(dict, messages)), text=text, token_ids=ids)
        render, tokenize = self.encoder.render, self.encoder.tokenize
        return prompt, Conversation(prompt.token_ids, messages, render=render, tokenize=tokenize, ends=self.ends)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long trajectories may get.

    Attributes:
        model_length: tokens that the engine takes, prompt included; None where it has no limit.
        total: whether `max_tokens` of the sampling holds for all turns together instead of for each.
        turns: how many there may be; None for no limit.
        temperature: of training; evaluation may sample at another, which a scheduler need not know.
    """

    model_length: int | None
    total: bool
    turns: int | None
    temperature: float


@dataclass(eq=False, slots=True)
class Play:
    """A trajectory in the making; `asked` is the turn that it waits for, where it does."""

    prompt: Prompt
    request: wire.RolloutRequest
    conversation: Conversation | None = None
    finish_reason: wire.FinishReason = "stop"
    asked: wire.RolloutRequest | None = None
    answer: asyncio.Future[wire.Completion] | None = None
    no_room: bool = False


playing: ContextVar[Play] = ContextVar("playing")
"""The trajectory whose scheduler is running: requests need not say whose they are, and may be copies."""


_FIXED: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "n": (1,),
    "num_beams": (1,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "structured_outputs_regex": (),
}
"""Fields of a request's config that stay as they are, with the values that change nothing."""


class TurnEngine:
    """The model's next turn, in the tokens of the trajectory that asks.

    Args:
        decode: token ids to text without special tokens.
        on_ask: called when a trajectory begins to wait.
    """

    def __init__(
        self, begin: Opening, decode: Callable[[Sequence[int]], str], limits: Limits, on_ask: Callable[[], None]
    ) -> None:
        self._begin, self._decode, self._limits, self._on_ask = begin, decode, limits, on_ask
        self.tokenizer = begin.encoder.tokenizer
        # ms-swift's schedulers reach the tokenizer through these.
        self.template = self.default_template = SimpleNamespace(tokenizer=self.tokenizer)

    async def infer_async(
        self, infer_request: InferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> ChatCompletionResponse:
        """The model's answer to the request's messages: `choices[0]` with its message, finish reason and token ids.

        Where the engine takes no more tokens, an empty answer that was cut off (`finish_reason` is `length`).

        Raises:
            TurnFault: the messages are not those of the trajectory with more behind them, or a limit was passed.
        """
        play = playing.get()
        messages = _without_dummy(infer_request.messages)
        for name in ("tools", "chat_template_kwargs"):
            if getattr(infer_request, name, None):
                raise TurnFault(f"a request's {name} are not rendered here: write them into a message")
        if play.answer is not None:
            raise TurnFault("two turns of one trajectory were asked for at once")
        if play.conversation is None:
            play.prompt, play.conversation = self._begin(play.prompt, messages)
        else:
            if self._limits.turns is not None and play.conversation.turns >= self._limits.turns:
                raise TurnFault(
                    f"turn {play.conversation.turns + 1} was asked for, --max_turns is {self._limits.turns}"
                )
            if play.no_room:
                raise TurnFault("another turn was asked for after the engine had said that no more tokens fit")
            play.conversation.follow(messages)
        conversation = play.conversation
        sampling = self._sampling(play, request_config)
        if sampling.max_tokens < 1:
            play.no_room = True
            play.finish_reason = "length"
            return self._response(conversation, (), "", "length")
        seeds = play.request.seeds
        play.asked = wire.RolloutRequest(
            request_id=f"{play.request.request_id}/{conversation.turns}",
            prompt_token_ids=(*conversation.prompt_token_ids, *conversation.token_ids),
            n=1,
            seeds=(completion_seed(seeds[0], conversation.turns),) if seeds else None,
            sampling=sampling,
        )
        play.answer = asyncio.get_running_loop().create_future()
        self._on_ask()
        completion = await play.answer
        play.answer = play.asked = None
        text = self._decode(completion.token_ids)
        if conversation.messages[-1]["role"] != "assistant":  # a turn that begins, not one that goes on
            text = self._begin.encoder.response_prefix + text
        conversation.answer(completion.token_ids, completion.logprobs, text, versions_of_tokens(completion))
        play.finish_reason = completion.finish_reason
        return self._response(conversation, completion.token_ids, text, completion.finish_reason)

    def revise(self, token_ids: Sequence[int] | None, loss_mask: Sequence[int] | None) -> None:
        """Changes the tokens of the last turn, or which of them are trained."""
        conversation = playing.get().conversation
        if conversation is None:
            raise TurnFault("there is no turn yet")
        conversation.revise(token_ids, loss_mask)

    def _sampling(self, play: Play, config: RequestConfig | None) -> wire.SamplingParams:
        """The run's; a scheduler may ask for fewer tokens and further stop strings. `max_tokens` may be below 1."""
        sampling, conversation = play.request.sampling, play.conversation
        assert conversation is not None
        room = [sampling.max_tokens - (len(conversation.token_ids) if self._limits.total else 0)]
        if self._limits.model_length is not None:
            used = len(conversation.prompt_token_ids) + len(conversation.token_ids)
            room.append(self._limits.model_length - used)
        stop = sampling.stop
        if config is not None:
            for name, unchanged in _FIXED.items():
                asked, own = getattr(config, name, None), getattr(sampling, name, None)
                allowed = unchanged if own in (None, *unchanged) else (own,)
                if asked is not None and asked not in allowed:
                    raise TurnFault(f"a scheduler cannot change {name} to {asked}: ratios would be biased")
            if config.temperature not in (None, sampling.temperature, self._limits.temperature):
                raise TurnFault(f"a scheduler cannot change temperature to {config.temperature}: use --temperature")
            room.append(sampling.max_tokens if config.max_tokens is None else config.max_tokens)
            stop = tuple(dict.fromkeys((*stop, *(config.stop or ()))))
        # Checked by the caller, so that no room is an answer and not a fault.
        return sampling.model_copy(update={"max_tokens": min(room), "stop": stop})

    def _response(
        self, conversation: Conversation, token_ids: Sequence[int], text: str, finish_reason: str
    ) -> ChatCompletionResponse:
        read = len(conversation.prompt_token_ids) + len(conversation.token_ids) - len(token_ids)
        logprobs = conversation.logprobs[len(conversation.logprobs) - len(token_ids) :]
        content = [{"token_id": token, "logprob": value} for token, value in zip(token_ids, logprobs, strict=True)]
        choice = ChatCompletionResponseChoice(
            0, ChatMessage("assistant", text), finish_reason, {"content": content}, list(token_ids)
        )
        usage = UsageInfo(read, len(token_ids), read + len(token_ids))
        return ChatCompletionResponse("policy", [choice], usage)


def versions_of_tokens(completion: wire.Completion) -> list[int]:
    """Of the weights, one a token; the oldest for all where the engine does not tell which wrote which."""
    versions: list[int] = []
    for start, version in reversed(completion.weight_versions or ((0, completion.weight_version),)):
        versions = [version] * (len(completion.token_ids) - len(versions) - start) + versions
    return versions


def spans_of(versions: Sequence[int | None]) -> tuple[tuple[int, int], ...]:
    """`(first token, version)` of each stretch; tokens that no weights wrote belong to the stretch before them."""
    spans: list[tuple[int, int]] = []
    for place, version in enumerate(versions):
        if version is not None and (not spans or spans[-1][1] != version):
            spans.append((place if spans else 0, version))
    return tuple(spans)


def _without_dummy(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """ms-swift's schedulers end with an assistant message of None where the model is to go on with its turn."""
    ends = bool(messages) and messages[-1]["role"] == "assistant" and messages[-1]["content"] is None
    return messages[:-1] if ends else messages
