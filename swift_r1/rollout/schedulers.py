"""Schedulers of several turns: leads a conversation by one, and is the `infer_engine` that it asks for turns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from swift_r1.data.prompt_templates import plain, text_of
from swift_r1.data.prompts import Prompt, PromptEncoder
from swift_r1.errors import RunFailed, describe
from swift_r1.plugins.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    InferRequest,
    RequestConfig,
    RolloutInferRequest,
    UsageInfo,
)
from swift_r1.plugins.rollouts import MultiTurnScheduler, RolloutScheduler
from swift_r1.record.episodes import EpisodeCall
from swift_r1.rollout.multi_turn import OpenConversation
from swift_r1.rollout.trajectory import TokenSequence, Trajectory, spans_of, turns_of_tokens
from swift_r1.rollout.transcript import Transcript, TurnFault
from swift_r1.wire import protocol as wire
from swift_r1.wire.protocol import completion_seed, versions_of_tokens
from swift_r1.wire.routes import routes_of

_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How long conversations may get; None for no limit."""

    model_length: int | None  # tokens that the engine takes, prompt included
    # whether `max_tokens` of the sampling holds for all turns together instead of for each
    total: bool
    turns: int | None
    temperature: float  # of training; evaluation may use another, which a scheduler need not know
    seconds: float | None = None  # since its start, after which it gets no further turn


current_conversation: ContextVar[OpenConversation] = ContextVar("current_conversation")
"""The one of the scheduler that runs: its requests do not say whose they are."""

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
    """Asks for the model's next turn in the tokens of the conversation that is current. Tokens in `ends` end a
    turn."""

    def __init__(self, encoder: PromptEncoder, ends: tuple[int, ...], limits: Limits) -> None:
        self._encoder = encoder
        self._ends = ends
        self._limits = limits
        self.tokenizer = encoder.tokenizer
        # ms-swift's schedulers reach the tokenizer through these.
        self.template = self.default_template = SimpleNamespace(tokenizer=self.tokenizer)

    async def infer_async(
        self,
        infer_request: InferRequest,
        request_config: RequestConfig | None = None,
        **kwargs: Any,
    ) -> ChatCompletionResponse:
        """The model's answer to the request's messages: `choices[0]` with its message, finish reason and token ids.
        Where the engine takes no more tokens, or a limit of seconds is reached, it is empty, and its finish reason
        `length`.

        Raises:
            TurnFault: the messages do not continue those of the conversation, or a limit was passed.
        """
        conversation = current_conversation.get()
        messages = [_as_text(message) for message in infer_request.messages]
        # ms-swift's schedulers end with an assistant message of None where the model is to go on with its turn.
        if messages and messages[-1]["role"] == "assistant" and messages[-1]["content"] is None:
            messages = messages[:-1]
        for name in ("tools", "chat_template_kwargs"):
            if getattr(infer_request, name, None):
                raise TurnFault(f"a request's {name} are not rendered here: they are the run's")
        if conversation.calls:
            raise TurnFault("two turns of one trajectory were asked for at once")
        transcript = conversation.transcript
        if transcript is None:
            prompt = self._opening(conversation.prompt, messages)
            transcript = Transcript(
                prompt.token_ids, messages, self._encoder, self._ends, prompt.tools
            )
            conversation.prompt = prompt
            conversation.transcript = transcript
        else:
            turns = len(transcript.turns)
            if self._limits.turns is not None and turns >= self._limits.turns:
                raise TurnFault(
                    f"turn {turns + 1} was asked for, --max_turns is {self._limits.turns}"
                )
            if transcript.full:
                raise TurnFault(
                    "another turn was asked for after the engine had said that no more tokens fit"
                )
            seconds = self._limits.seconds
            if seconds is not None and time.monotonic() >= conversation.began + seconds:
                transcript.end("seconds")
                return _response(transcript, (), "")
            transcript.follow(messages)
        sampling = self._sampling(conversation.request.sampling, transcript, request_config)
        if sampling.max_tokens < 1:
            own = conversation.request.sampling.max_tokens
            spent = self._limits.total and len(transcript.token_ids) >= own
            transcript.end("tokens" if spent else "length")
            return _response(transcript, (), "")
        seeds = conversation.request.seeds
        began = time.monotonic()
        routes = conversation.request.routes
        request = wire.RolloutRequest(
            request_id=f"{conversation.request.request_id}/{len(transcript.turns)}",
            prompt_token_ids=(*transcript.prompt_token_ids, *transcript.token_ids),
            n=1,
            seeds=(completion_seed(seeds[0], len(transcript.turns)),) if seeds else None,
            sampling=sampling,
            routes=routes and routes.model_copy(update={"first": transcript.routed}),
        )
        completion = await conversation.ask(request)
        transcript.add_routes(routes_of(completion, request))
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        # a turn that begins, not one that goes on
        if transcript.messages[-1]["role"] != "assistant":
            text = self._encoder.response_prefix + text
        versions = versions_of_tokens(completion.version_spans, len(completion.token_ids))
        transcript.answer(
            completion.token_ids,
            completion.logprobs,
            text,
            versions,
            completion.finish_reason,
            time.monotonic() - began,
        )
        return _response(transcript, completion.token_ids, text)

    def revise(self, token_ids: Sequence[int] | None, loss_mask: Sequence[int] | None) -> None:
        """Changes the tokens of the last turn, or which of them are trained."""
        transcript = current_conversation.get().transcript
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
                    raise TurnFault(
                        f"a scheduler cannot change {name} to {asked}: ratios would be biased"
                    )
            if config.temperature not in (None, sampling.temperature, self._limits.temperature):
                raise TurnFault(
                    f"a scheduler cannot change temperature to {config.temperature}: use --temperature"
                )
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
    transcript: Transcript, token_ids: Sequence[int], text: str
) -> ChatCompletionResponse:
    read = len(transcript.prompt_token_ids) + len(transcript.token_ids) - len(token_ids)
    logprobs = transcript.logprobs[len(transcript.logprobs) - len(token_ids) :]
    content = [
        {"token_id": token, "logprob": value}
        for token, value in zip(token_ids, logprobs, strict=True)
    ]
    message = ChatMessage("assistant", text)
    choice = ChatCompletionResponseChoice(
        0, message, transcript.finish_reason, {"content": content}, list(token_ids)
    )
    usage = UsageInfo(read, len(token_ids), read + len(token_ids))
    return ChatCompletionResponse("policy", [choice], usage)


class SchedulerRunner:
    """Leads conversations by the scheduler `name`, in the event loop of a thread, so that one that hangs is noticed:
    `timeout` seconds after a turn of the model, or since it last `worked` on what has a deadline of its own. With
    `last_message_only` the last message is trained."""

    def __init__(
        self,
        name: str,
        timeout: float,
        make_scheduler: Callable[[TurnEngine], RolloutScheduler],
        encoder: PromptEncoder,
        ends: tuple[int, ...],
        limits: Limits,
        last_message_only: bool = False,
        worked: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._name = name
        self._timeout = timeout
        self._worked = worked
        self._last_message_only = last_message_only
        self._scheduler = make_scheduler(TurnEngine(encoder, ends, limits))
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="schedulers", daemon=True
        )
        self._thread.start()

    def check(self, busy: Sequence[OpenConversation]) -> float:
        """Raises RunFailed where the conversation that is busy for longest is so for too long."""
        now = time.monotonic()
        since = busy[0].since if busy else now
        deadline = max(since, self._worked()) + self._timeout
        if deadline <= now:
            raise RunFailed(
                f"--multi_turn_scheduler {self._name}: the next turn waits for {len(busy)} trajectories (the first is "
                f"{busy[0].request.request_id}) longer than --multi_turn_timeout {self._timeout:g} s"
            )
        return deadline

    async def lead(self, conversation: OpenConversation) -> Trajectory:
        """Raises RunFailed, which names the conversation, where the scheduler fails."""
        conversation.begin()
        current_conversation.set(conversation)
        failure: BaseException
        try:
            return await self._lead(conversation)
        except asyncio.CancelledError:
            failure = asyncio.CancelledError("a task inside was cancelled")
        except Exception as error:  # noqa: BLE001 - whatever a scheduler raises ends the run
            failure = error
        request_id = conversation.request.request_id
        raise RunFailed(
            f"--multi_turn_scheduler {self._name} failed in {request_id}: {describe(failure)}"
        ) from failure

    async def _lead(self, conversation: OpenConversation) -> Trajectory:
        sampling = conversation.request.sampling
        request = RolloutInferRequest(
            messages=deepcopy([dict(message) for message in conversation.prompt.messages]),
            data_dict=deepcopy(dict(conversation.prompt.columns)),
            uuid=conversation.request.request_id,
        )
        config = RequestConfig(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop=list(sampling.stop),
            logprobs=True,
        )
        try:
            output = await _run_of(self._scheduler)(request, config)
        except SystemExit as error:  # it would end the thread that the run waits for
            raise TurnFault(f"it left with SystemExit({error.code})") from error
        return _trajectory(conversation, output, self._last_message_only)

    def close(self) -> None:
        """Ends what still runs, except a scheduler that hangs: its thread ends with the process."""
        if self.loop.is_closed():
            return
        ended = asyncio.run_coroutine_threadsafe(_end_tasks(), self.loop)
        wait([ended], _CLOSE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_S)
        if ended.done() and not self._thread.is_alive():
            self.loop.close()


async def _end_tasks() -> None:
    """Cancels all other tasks of the event loop."""
    tasks = asyncio.all_tasks() - {cast("asyncio.Task[None]", asyncio.current_task())}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _run_of(scheduler: RolloutScheduler) -> Callable[..., Awaitable[Any]]:
    """Returns a scheduler's `run`; ours where it is the real ms-swift's loop over the turns, which keeps tokens
    itself."""
    run = type(scheduler).run
    theirs = run.__module__.startswith("swift.") and run.__qualname__ == "MultiTurnScheduler.run"
    return partial(MultiTurnScheduler.run, scheduler) if theirs else scheduler.run  # type: ignore[arg-type]


def _trajectory(one: OpenConversation, output: Any, last_message_only: bool) -> Trajectory:
    """Returns the trajectory of a scheduler that has ended. Raises TurnFault where it returned no rollout, or one
    with other tokens than the model's."""
    transcript = one.transcript
    if not hasattr(output, "rollout_infos"):  # ms-swift's own class has the same fields
        raise TurnFault(f"run gave {type(output).__name__}, not one RolloutOutput")
    if transcript is None or not transcript.sampled_length:
        raise TurnFault("the trajectory ended without a turn of the model")
    transcript.check_turns(output.response_token_ids or [], output.response_loss_mask or [])
    end = transcript.sampled_length
    first = transcript.last_message if last_message_only else 0
    messages = output.messages or transcript.messages
    infos = {"num_turns": len(transcript.turns)} | (output.rollout_infos or {})
    is_text = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    sequence = TokenSequence(
        prompt_token_ids=one.prompt.token_ids,
        token_ids=tuple(transcript.token_ids[:end]),
        logprobs=tuple(transcript.logprobs[:end]),
        loss_mask=tuple(
            own and place >= first for place, own in enumerate(transcript.loss_mask[:end])
        ),
        versions=spans_of(transcript.versions[:end]),
        turns=turns_of_tokens(transcript.turns, end),
        routes=transcript.routes_up_to(end),
    )
    return Trajectory(
        request_id=one.request.request_id.rpartition("/")[0],
        prompt=one.prompt,
        sequences=(sequence,),
        turns=transcript.turn_token_ids,
        messages=messages,
        calls=_calls(transcript, messages),
        call_seconds=[round(seconds, 3) for *_, seconds in transcript.answers],
        text=messages[-1]["content"] if is_text else transcript.text,
        finish_reason=transcript.finish_reason,
        infos=infos,
        limit=transcript.limit or ("calls" if infos.get("limit") == "calls" else None),
    )


def _calls(transcript: Transcript, messages: Sequence[Mapping[str, Any]]) -> list[EpisodeCall]:
    """Returns the turns of a scheduler as calls that extend one another; the `messages` that it returned may be others
    than the model's."""
    calls = []
    for number, span in enumerate(transcript.turns):
        place, finish_reason, _ = transcript.answers[number]
        there = place < len(messages) and messages[place]["role"] == "assistant"
        calls.append(
            EpisodeCall(
                kind="extends" if number else "new",
                parent=number - 1 if number else None,
                conversation=0,
                place=place if there else None,
                prompt_tokens=len(transcript.prompt_token_ids) + span.start,
                tokens=span.stop - span.start,
                finish_reason=finish_reason,
            )
        )
    return calls
