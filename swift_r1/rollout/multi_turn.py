"""Answers prompts for the loop: in one turn, or in several that a scheduler leads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import wait
from copy import deepcopy
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from swift_r1.data.prompts import Prompt, PromptEncoder
from swift_r1.errors import RunFailed, describe
from swift_r1.plugins.protocol import RequestConfig, RolloutInferRequest
from swift_r1.plugins.rollouts import MultiTurnScheduler, RolloutScheduler
from swift_r1.rollout.base import Generator, GroupRequest, OnDone, ignore_output
from swift_r1.rollout.trajectory import TokenSequence, Trajectory, spans_of
from swift_r1.rollout.transcript import TurnFault
from swift_r1.rollout.turn_engine import Limits, OpenConversation, TurnEngine, playing
from swift_r1.runtime.ranks import Ranks
from swift_r1.wire import protocol as wire

T = TypeVar("T")
_CLOSE_S = 1.0

Asked = Sequence[GroupRequest]
OnGroup = Callable[[Sequence[Trajectory]], None]  # given the trajectories of a prompt, on rank 0; must not wait


class ConversationDriver(Protocol):
    """Answers the loop's and the evaluation's prompts with conversations."""

    def generate(self, asked: Asked | None, on_done: OnDone, on_group: OnGroup) -> None:
        """Gives all conversations of each prompt to `on_group` as soon as they have ended. Collective; the other ranks
        pass None."""


class Players(Protocol):
    """Conversations that wait for turns of the model, on rank 0."""

    def begin(self, asked: Asked) -> None:
        """Starts the conversations of all requests."""

    def asked(self, on_done: OnDone) -> list[wire.RolloutRequest]:
        """The turns that conversations wait for, once all wait or have ended; none when all have."""
        ...

    def answer(self, completions: Sequence[wire.Completion]) -> None:
        """Continues the conversations that waited, in the order of `asked`."""

    def take_ended(self) -> list[list[Trajectory]]:
        """The groups of conversations that have ended since the last call."""
        ...


class OneTurn:
    """A conversation is what the engine answers."""

    def __init__(self, rollouts: Generator, decode: Callable[[Sequence[int]], str]) -> None:
        self.rollouts = rollouts
        self.decode = decode

    def generate(self, asked: Asked | None, on_done: OnDone, on_group: OnGroup) -> None:
        prompts = {request.request_id: prompt for prompt, request in asked or ()}

        def answered(output: wire.RolloutOutput) -> None:
            prompt = prompts[output.request_id]
            on_group([self._trajectory(output.request_id, prompt, one) for one in output.completions])

        self.rollouts.generate(None if asked is None else [request for _, request in asked], on_done, answered)

    def _trajectory(self, request_id: str, prompt: Prompt, completion: wire.Completion) -> Trajectory:
        ids = completion.token_ids
        text = prompt.response_prefix + self.decode(ids)
        messages = [*map(dict, prompt.messages), {"role": "assistant", "content": text}]
        whole = TokenSequence.of_completion(prompt.token_ids, completion)
        return Trajectory(request_id, prompt, (whole,), (ids,), messages, text, completion.finish_reason)


class MultiTurn:
    """Schedulers or agents lead the conversations, all of a round together: a turn waits until every other conversation
    waits too or has ended, then the turns of all are generated in one call of the engine, on all ranks. So batches, and
    with seeds the tokens, do not depend on how long a scheduler takes. `stage` is on rank 0."""

    def __init__(self, rollouts: Generator, ranks: Ranks, stage: Players | None) -> None:
        self.rollouts = rollouts
        self.ranks = ranks
        self.stage = stage

    def generate(self, asked: Asked | None, on_done: OnDone, on_group: OnGroup) -> None:
        if self.stage is not None:
            assert asked is not None
            self.stage.begin(asked)
        while True:
            turns = None
            if self.stage is not None:
                with self.ranks.busy():
                    turns = self.stage.asked(on_done)
                for group in self.stage.take_ended():
                    on_group(group)
            count = self.ranks.broadcast(None if turns is None else [torch.tensor([len(turns)])])[0]
            if not int(count):
                return
            outputs = self.rollouts.generate(turns, lambda _count: None, ignore_output)
            if self.stage is not None:
                assert outputs is not None
                self.stage.answer([output.completions[0] for output in outputs])


class Stage:
    """Runs the scheduler `name` in an event loop of a thread, so that one that hangs is noticed, after `timeout`
    seconds between two turns of the model, or since it last `worked` on what has a deadline of its own. With
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
        self._tasks: dict[OpenConversation, asyncio.Task[Trajectory]] = {}
        self._groups: list[list[OpenConversation]] = []  # not yet taken
        self._ended = 0
        self._busy: set[OpenConversation] = set()  # neither waiting for a turn nor over
        self._idle = asyncio.Event()  # none is busy
        self._scheduler = make_scheduler(TurnEngine(encoder, ends, limits, self._rests))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="schedulers", daemon=True)
        self._thread.start()

    def begin(self, asked: Asked) -> None:
        """Starts the conversations of all requests."""
        self._groups = [
            [OpenConversation(prompt, one_of(request, i)) for i in range(request.n)] for prompt, request in asked
        ]
        self._ended = 0
        self._call(self._start([play for group in self._groups for play in group]))

    def asked(self, on_done: OnDone) -> list[wire.RolloutRequest]:
        """The turns that conversations wait for, once all wait or have ended; none when all have. Raises RunFailed
        where a scheduler failed, or was too slow."""
        self._call(self._settle())
        ended = sum(task.done() for task in self._tasks.values())
        on_done(ended - self._ended)
        self._ended = ended
        return [play.asked for play in self._tasks if play.asked is not None]

    def answer(self, completions: Sequence[wire.Completion]) -> None:
        """Continues the conversations that waited, in the order of `asked`."""
        waiting = [(play, play.answer) for play in self._tasks if play.answer is not None]

        async def resume() -> None:
            # Before any goes on: a scheduler that hangs stops the loop for all of them.
            self._busy = {play for play, _ in waiting}
            self._idle.clear()
            for (_, answer), completion in zip(waiting, completions, strict=True):
                answer.set_result(completion)

        self._call(resume())

    def take_ended(self) -> list[list[Trajectory]]:
        """The groups of conversations that have ended since the last call."""
        groups = self._groups
        self._groups = []
        ended = []
        for group in groups:
            tasks = [self._tasks[play] for play in group]
            if all(task.done() for task in tasks):
                ended.append([task.result() for task in tasks])
            else:
                self._groups.append(group)
        return ended

    def close(self) -> None:
        """Ends what still runs, except a scheduler that hangs: its thread ends with the process."""
        if self._loop.is_closed():
            return
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        wait([ended], _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if ended.done() and not self._thread.is_alive():
            self._loop.close()

    # In the loop's thread

    async def _start(self, plays: Sequence[OpenConversation]) -> None:
        self._busy = set(plays)
        self._idle.clear()
        self._tasks = {play: asyncio.create_task(self._play(play)) for play in plays}
        for play, task in self._tasks.items():
            task.add_done_callback(partial(self._rests, play))

    def _rests(self, play: OpenConversation, _task: asyncio.Task[Trajectory] | None = None) -> None:
        """Notes that a conversation waits for a turn, or is over."""
        self._busy.discard(play)
        if not self._busy:
            self._idle.set()

    async def _end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _settle(self) -> None:
        while self._busy:
            await self._idle.wait()

    async def _play(self, play: OpenConversation) -> Trajectory:
        playing.set(play)
        sampling = play.request.sampling
        request = RolloutInferRequest(
            messages=deepcopy([dict(message) for message in play.prompt.messages]),
            data_dict=deepcopy(dict(play.prompt.columns)),
            uuid=play.request.request_id,
        )
        config = RequestConfig(
            max_tokens=sampling.max_tokens, temperature=sampling.temperature, stop=list(sampling.stop), logprobs=True
        )
        try:
            output = await _run_of(self._scheduler)(request, config)
        except SystemExit as error:  # it would end the thread that the run waits for
            raise TurnFault(f"it left with SystemExit({error.code})") from error
        return _trajectory(play, output, self._last_message_only)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        begun = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while (left := max(begun, self._worked()) + self._timeout - time.monotonic()) > 0 and not future.done():
                wait([future], left)
            result = future.result(0)
        except TimeoutError as error:
            slow = [play.request.request_id for play in self._tasks if play in self._busy]
            raise RunFailed(
                f"--multi_turn_scheduler {self._name}: the next turn waits for {len(slow)} trajectories (the first is "
                f"{slow[0] if slow else '?'}) longer than --multi_turn_timeout {self._timeout:g} s"
            ) from error
        for play, task in self._tasks.items():
            if task.done() and (failure := _failure(task)) is not None:
                raise RunFailed(
                    f"--multi_turn_scheduler {self._name} failed in {play.request.request_id}: {describe(failure)}"
                ) from failure
        return result


def one_of(request: wire.RolloutRequest, index: int) -> wire.RolloutRequest:
    """The request for one of its completions."""
    seeds = request.seeds and request.seeds[index : index + 1]
    return request.model_copy(update={"request_id": f"{request.request_id}/{index}", "n": 1, "seeds": seeds})


def _failure(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError("a task inside was cancelled") if task.cancelled() else task.exception()


def _run_of(scheduler: RolloutScheduler) -> Callable[..., Awaitable[Any]]:
    """A scheduler's `run`; ours where it is the real ms-swift's loop over the turns, which keeps tokens itself."""
    run = type(scheduler).run
    theirs = run.__module__.startswith("swift.") and run.__qualname__ == "MultiTurnScheduler.run"
    return partial(MultiTurnScheduler.run, scheduler) if theirs else scheduler.run  # type: ignore[arg-type]


def _trajectory(play: OpenConversation, output: Any, last_message_only: bool) -> Trajectory:
    """Raises TurnFault where the scheduler returned no rollout, or one with other tokens than the model's."""
    transcript = play.transcript
    if not hasattr(output, "rollout_infos"):  # ms-swift's own class has the same fields
        raise TurnFault(f"run gave {type(output).__name__}, not one RolloutOutput")
    if transcript is None or not transcript.sampled_length:
        raise TurnFault("the trajectory ended without a turn of the model")
    transcript.check_turns(output.response_token_ids or [], output.response_loss_mask or [])
    end = transcript.sampled_length
    first = transcript.last_message if last_message_only else 0
    messages = output.messages or transcript.messages
    is_text = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    sequence = TokenSequence(
        prompt_token_ids=play.prompt.token_ids,
        token_ids=tuple(transcript.token_ids[:end]),
        logprobs=tuple(transcript.logprobs[:end]),
        loss_mask=tuple(own and place >= first for place, own in enumerate(transcript.loss_mask[:end])),
        versions=spans_of(transcript.versions[:end]),
    )
    return Trajectory(
        request_id=play.request.request_id.rpartition("/")[0],
        prompt=play.prompt,
        sequences=(sequence,),
        turns=transcript.turn_token_ids,
        messages=messages,
        text=messages[-1]["content"] if is_text else transcript.text,
        finish_reason=play.finish_reason,
        infos={"num_turns": transcript.turns} | (output.rollout_infos or {}),
    )
