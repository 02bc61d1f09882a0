"""The `infer_engine` of a scheduler of several turns: it keeps each conversation's tokens and waits for turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from swift_r1.data.prompt_templates import plain, text_of
from swift_r1.data.prompts import Prompt, PromptEncoder
from swift_r1.plugins.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    InferRequest,
    RequestConfig,
    UsageInfo,
)
from swift_r1.rollout.trajectory import versions_of_tokens
from swift_r1.rollout.transcript import Transcript, TurnFault
from swift_r1.wire import protocol as wire
from swift_r1.wire.protocol import completion_seed


@dataclass(frozen=True, slots=True)
class Limits:
    """How long conversations may get; None for no limit."""

    model_length: int | None  # tokens that the engine takes, prompt included
    total: bool  # whether `max_tokens` of the sampling holds for all turns together instead of for each
    turns: int | None
    temperature: float  # of training; evaluation may use another, which a scheduler need not know


@dataclass(eq=False, slots=True)
class OpenConversation:
    """A conversation under way; `asked` is the turn that it waits for, if any."""

    prompt: Prompt
    request: wire.RolloutRequest
    transcript: Transcript | None = None
    finish_reason: wire.FinishReason = "stop"
    asked: wire.RolloutRequest | None = None
    answer: asyncio.Future[wire.Completion] | None = None
    no_room: bool = False


playing: ContextVar[OpenConversation] = ContextVar(
    "playing"
)  # of the scheduler that runs: requests do not say whose they are

# Fields of a request's config that a scheduler cannot change, with the values that change nothing.
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


class TurnEngine:
    """The model's next turn, in the tokens of the conversation that asks. Tokens in `ends` end a turn; `on_ask` is
    called with a conversation that begins to wait."""

    def __init__(
        self, encoder: PromptEncoder, ends: tuple[int, ...], limits: Limits, on_ask: Callable[[OpenConversation], None]
    ) -> None:
        self._encoder = encoder
        self._ends = ends
        self._limits = limits
        self._on_ask = on_ask
        self.tokenizer = encoder.tokenizer
        # ms-swift's schedulers reach the tokenizer through these.
        self.template = self.default_template = SimpleNamespace(tokenizer=self.tokenizer)

    async def infer_async(
        self, infer_request: InferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> ChatCompletionResponse:
        """The model's answer to the request's messages: `choices[0]` with its message, finish reason and token ids.
        Where the engine takes no more tokens it is empty, and its finish reason `length`.

        Raises:
            TurnFault: the messages do not continue those of the conversation, or a limit was passed.
        """
        play = playing.get()
        messages = [_as_text(message) for message in infer_request.messages]
        # ms-swift's schedulers end with an assistant message of None where the model is to go on with its turn.
        if messages and messages[-1]["role"] == "assistant" and messages[-1]["content"] is None:
            messages = messages[:-1]
        for name in ("tools", "chat_template_kwargs"):
            if getattr(infer_request, name, None):
                raise TurnFault(f"a request's {name} are not rendered here: they are the run's")
        if play.answer is not None:
            raise TurnFault("two turns of one trajectory were asked for at once")
        if play.transcript is None:
            play.prompt = self._opening(play.prompt, messages)
            transcript = Transcript(play.prompt.token_ids, messages, self._encoder, self._ends, play.prompt.tools)
            play.transcript = transcript
        else:
            if self._limits.turns is not None and play.transcript.turns >= self._limits.turns:
                raise TurnFault(f"turn {play.transcript.turns + 1} was asked for, --max_turns is {self._limits.turns}")
            if play.no_room:
                raise TurnFault("another turn was asked for after the engine had said that no more tokens fit")
            play.transcript.follow(messages)
        transcript = play.transcript
        sampling = self._sampling(play.request.sampling, transcript, request_config)
        if sampling.max_tokens < 1:
            play.no_room = True
            play.finish_reason = "length"
            return _response(transcript, (), "", "length")
        seeds = play.request.seeds
        play.asked = wire.RolloutRequest(
            request_id=f"{play.request.request_id}/{transcript.turns}",
            prompt_token_ids=(*transcript.prompt_token_ids, *transcript.token_ids),
            n=1,
            seeds=(completion_seed(seeds[0], transcript.turns),) if seeds else None,
            sampling=sampling,
        )
        play.answer = asyncio.get_running_loop().create_future()
        self._on_ask(play)
        completion = await play.answer
        play.answer = play.asked = None
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        if transcript.messages[-1]["role"] != "assistant":  # a turn that begins, not one that goes on
            text = self._encoder.response_prefix + text
        transcript.answer(completion.token_ids, completion.logprobs, text, versions_of_tokens(completion))
        play.finish_reason = completion.finish_reason
        return _response(transcript, completion.token_ids, text, completion.finish_reason)

    def revise(self, token_ids: Sequence[int] | None, loss_mask: Sequence[int] | None) -> None:
        """Changes the tokens of the last turn, or which of them are trained."""
        transcript = playing.get().transcript
        if transcript is None:
            raise TurnFault("there is no turn yet")
        transcript.revise(token_ids, loss_mask)

    def _opening(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """The row's own prompt, or one of the messages that the scheduler begins with."""
        own = [(message["role"], message["content"]) for message in prompt.messages]
        if [(message["role"], message["content"]) for message in messages] == own:
            return prompt
        text = self._encoder.render(messages, prompt.tools)
        ids = self._encoder.tokenize(text)
        return replace(prompt, messages=tuple(map(dict, messages)), text=plain(text), token_ids=ids)

    def _sampling(
        self, sampling: wire.SamplingParams, transcript: Transcript, config: RequestConfig | None
    ) -> wire.SamplingParams:
        """The run's; a scheduler may ask for fewer tokens and further stop strings. `max_tokens` may be below 1."""
        room = [sampling.max_tokens - (len(transcript.token_ids) if self._limits.total else 0)]
        if self._limits.model_length is not None:
            used = len(transcript.prompt_token_ids) + len(transcript.token_ids)
            room.append(self._limits.model_length - used)
        stop = sampling.stop
        if config is not None:
            for name, unchanged in _FIXED.items():
                asked = getattr(config, name, None)
                own = getattr(sampling, name, None)
                allowed = unchanged if own in (None, *unchanged) else (own,)
                if asked is not None and asked not in allowed:
                    raise TurnFault(f"a scheduler cannot change {name} to {asked}: ratios would be biased")
            if config.temperature not in (None, sampling.temperature, self._limits.temperature):
                raise TurnFault(f"a scheduler cannot change temperature to {config.temperature}: use --temperature")
            room.append(sampling.max_tokens if config.max_tokens is None else config.max_tokens)
            stop = tuple(dict.fromkeys((*stop, *(config.stop or ()))))
        return sampling.model_copy(update={"max_tokens": min(room), "stop": stop})


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is one text. Raises TurnFault where it has other parts."""
    if message["content"] is None:
        return dict(message)
    try:
        return {**message, "content": text_of(message["content"])}
    except ValueError as error:
        raise TurnFault(f"the content of a {message['role']} message {error}") from error


def _response(
    transcript: Transcript, token_ids: Sequence[int], text: str, finish_reason: str
) -> ChatCompletionResponse:
    read = len(transcript.prompt_token_ids) + len(transcript.token_ids) - len(token_ids)
    logprobs = transcript.logprobs[len(transcript.logprobs) - len(token_ids) :]
    content = [{"token_id": token, "logprob": value} for token, value in zip(token_ids, logprobs, strict=True)]
    message = ChatMessage("assistant", text)
    choice = ChatCompletionResponseChoice(0, message, finish_reason, {"content": content}, list(token_ids))
    usage = UsageInfo(read, len(token_ids), read + len(token_ids))
    return ChatCompletionResponse("policy", [choice], usage)
