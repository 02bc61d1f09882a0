"""Completions for the loop, of one turn or of several.

Schedulers of several turns run in a thread of their own, and all trajectories of a round go on together: a scheduler's
`infer_async` waits until every other trajectory waits too or has ended, then the turns of all are generated in one call
of the engine, on all ranks. So batches, and with seeds the tokens, do not depend on how long a scheduler thinks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from pydantic import InstanceOf

from swift_r1.data.prompts import Prompt
from swift_r1.errors import RunFailed
from swift_r1.plugins.protocol import RequestConfig, RolloutInferRequest
from swift_r1.plugins.rollouts import MultiTurnScheduler, RolloutScheduler
from swift_r1.rewards.construct import describe
from swift_r1.runtime.ranks import Ranks
from swift_r1.sampling.base import Generator, OnDone, OnOutput, ignore_output
from swift_r1.sampling.conversation import TurnFault
from swift_r1.sampling.turn_engine import Play, playing, spans_of
from swift_r1.wire import protocol as wire

T = TypeVar("T")


class Trajectory(wire.Completion):
    """A completion of several turns; its tokens are all that follow the prompt, those of the messages between too.

    Attributes:
        loss_mask: one a token, True where it is trained; log-probs are 0 where the model did not write it.
        prompt: the prompt of the first turn, with its tokens (an environment makes its own).
        messages: the whole conversation.
        text: the last message: the model's last turn, as the scheduler left it.
        turn_token_ids: of each turn of the model.
        turns: of the model.
        infos: what the scheduler noted; `num_turns` at least.
    """

    loss_mask: tuple[bool, ...]
    prompt: InstanceOf[Prompt]
    messages: list[dict[str, Any]]
    text: str
    turns: int
    turn_token_ids: tuple[tuple[int, ...], ...]
    infos: dict[str, Any]


class Turns(Protocol):
    """What the loop and the evaluation ask for completions."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[wire.RolloutRequest] | None,
        on_done: OnDone,
        on_output: OnOutput,
    ) -> list[wire.RolloutOutput] | None:
        """Completions of all requests, in order, on the main rank. Collective; the others pass no requests.

        `on_output` is given each request's as soon as they are there, in any order.
        """
        ...


class OneTurn:
    """A completion is what the engine gives."""

    def __init__(self, rollouts: Generator) -> None:
        self.rollouts = rollouts

    def generate(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[wire.RolloutRequest] | None,
        on_done: OnDone,
        on_output: OnOutput,
    ) -> list[wire.RolloutOutput] | None:
        return self.rollouts.generate(requests, on_done, on_output)


class MultiTurn:
    """A completion is a `Trajectory`; `stage` is None on all but the main rank."""

    def __init__(self, rollouts: Generator, ranks: Ranks, stage: Stage | None) -> None:
        self.rollouts, self.ranks, self.stage = rollouts, ranks, stage

    def generate(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[wire.RolloutRequest] | None,
        on_done: OnDone,
        on_output: OnOutput,
    ) -> list[wire.RolloutOutput] | None:
        ended: dict[int, wire.RolloutOutput] = {}
        if self.stage is not None:
            assert requests is not None
            self.stage.begin(prompts, requests)
        while True:
            asked = None
            if self.stage is not None and requests is not None:
                with self.ranks.busy():
                    asked = self.stage.asked(on_done)
                for number, output in self.stage.outputs(requests):
                    if number not in ended:
                        ended[number] = output
                        on_output(output)
            count = self.ranks.broadcast(None if asked is None else [torch.tensor([len(asked)])])[0]
            if not int(count):
                break
            outputs = self.rollouts.generate(asked, lambda _count: None, ignore_output)
            if self.stage is not None:
                assert outputs is not None
                self.stage.answer([output.completions[0] for output in outputs])
        return None if requests is None else [ended[number] for number in range(len(requests))]


class Stage:
    """Where schedulers run: an event loop in a thread, so that a scheduler that hangs is noticed.

    Args:
        name: of the scheduler, for messages.
        timeout: seconds that schedulers may take between two turns of the model.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self._name, self._timeout = name, timeout
        self._scheduler: RolloutScheduler | None = None
        self._plays: list[Play] = []
        self._tasks: list[asyncio.Task[Trajectory]] = []
        self._ended = 0
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="schedulers", daemon=True).start()

    def notify(self) -> None:
        """A trajectory has begun to wait, or has ended."""
        self._changed.set()

    def use(self, scheduler: RolloutScheduler) -> None:
        self._scheduler = scheduler

    def begin(self, prompts: Sequence[Prompt], requests: Sequence[wire.RolloutRequest]) -> None:
        """Starts the trajectories of all requests."""
        self._plays = [
            Play(
                prompt,
                request.model_copy(
                    update={
                        "request_id": f"{request.request_id}/{index}",
                        "n": 1,
                        "seeds": request.seeds and request.seeds[index : index + 1],
                    }
                ),
            )
            for prompt, request in zip(prompts, requests, strict=True)
            for index in range(request.n)
        ]
        self._ended = 0
        self._call(self._start())

    def asked(self, on_done: OnDone) -> list[wire.RolloutRequest]:
        """The turns that trajectories wait for, once all wait or have ended; none when all have.

        Raises:
            RunFailed: a scheduler failed, or needed more than its time.
        """
        self._call(self._settle())
        ended = sum(task.done() for task in self._tasks)
        on_done(ended - self._ended)
        self._ended = ended
        return [play.asked for play in self._plays if play.asked is not None]

    def answer(self, completions: Sequence[wire.Completion]) -> None:
        """Goes on with the trajectories that waited, in the order of `asked`."""
        waiting = [play.answer for play in self._plays if play.answer is not None]

        async def resume() -> None:
            for answer, completion in zip(waiting, completions, strict=True):
                answer.set_result(completion)

        self._call(resume())

    def outputs(self, requests: Sequence[wire.RolloutRequest]) -> Iterator[tuple[int, wire.RolloutOutput]]:
        """The number and the trajectories of each request all of whose trajectories have ended."""
        tasks = iter(self._tasks)
        for number, request in enumerate(requests):
            own = [next(tasks) for _ in range(request.n)]
            if all(task.done() for task in own):
                trajectories = tuple(task.result() for task in own)
                yield number, wire.RolloutOutput(request_id=request.request_id, completions=trajectories)

    def close(self) -> None:
        """Ends what still runs. A scheduler that hangs is left to its thread, which ends with the process."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(1.0)
        self._loop.call_soon_threadsafe(self._loop.stop)

    # In the loop's thread

    async def _start(self) -> None:
        self._tasks = [asyncio.create_task(self._play(play)) for play in self._plays]
        for task in self._tasks:
            task.add_done_callback(lambda _task: self.notify())

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _settle(self) -> None:
        while any(play.answer is None or play.answer.done() for play in self._running()):
            self._changed.clear()
            await self._changed.wait()

    def _running(self) -> list[Play]:
        return [play for play, task in zip(self._plays, self._tasks, strict=True) if not task.done()]

    async def _play(self, play: Play) -> Trajectory:
        assert self._scheduler is not None
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
        except SystemExit as error:  # it would end the thread, and the run would wait for it
            raise TurnFault(f"it left with SystemExit({error.code})") from error
        return _trajectory(play, output)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            result = future.result(self._timeout)
        except TimeoutError as error:
            slow = [p.request.request_id for p in self._running() if p.answer is None or p.answer.done()]
            raise RunFailed(
                f"--multi_turn_scheduler {self._name}: the next turn waits for {len(slow)} trajectories (the first is "
                f"{slow[0] if slow else '?'}) longer than --multi_turn_timeout {self._timeout:g} s"
            ) from error
        ended = [(play, task) for play, task in zip(self._plays, self._tasks, strict=True) if task.done()]
        failures = [(play, failure) for play, task in ended if (failure := _failure(task)) is not None]
        for play, failure in failures:
            raise RunFailed(
                f"--multi_turn_scheduler {self._name} failed in {play.request.request_id}: {describe(failure)}"
            ) from failure
        return result


def _failure(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError("a task inside was cancelled") if task.cancelled() else task.exception()


def _run_of(scheduler: Any) -> Callable[..., Awaitable[Any]]:
    """A scheduler's `run`; but ours where it is the real ms-swift's loop over the turns, which keeps tokens itself."""
    run = type(scheduler).run
    theirs = run.__module__.startswith("swift.") and run.__qualname__ == "MultiTurnScheduler.run"
    return partial(MultiTurnScheduler.run, scheduler) if theirs else scheduler.run


def _trajectory(play: Play, output: Any) -> Trajectory:
    """The completion that a played trajectory is.

    Raises:
        TurnFault: the scheduler gave no trajectory, or one of other tokens than the model's.
    """
    conversation = play.conversation
    if not hasattr(output, "rollout_infos"):  # ms-swift's own class has the same fields
        raise TurnFault(f"run gave {type(output).__name__}, not one RolloutOutput")
    if conversation is None or not conversation.sampled_length:
        raise TurnFault("the trajectory ended without a turn of the model")
    conversation.check_turns(output.response_token_ids or [], output.response_loss_mask or [])
    end = conversation.sampled_length
    messages = output.messages or conversation.messages
    text = messages[-1]["content"] if messages[-1]["role"] == "assistant" else conversation.text
    spans = spans_of(conversation.versions[:end])
    versions = [version for _, version in spans]
    return Trajectory(
        token_ids=tuple(conversation.token_ids[:end]),
        logprobs=tuple(conversation.logprobs[:end]),
        finish_reason=play.finish_reason,
        weight_version=min(versions),
        newest_weight_version=max(versions) if len(spans) > 1 else None,
        weight_versions=spans if len(spans) > 1 else None,
        loss_mask=tuple(conversation.loss_mask[:end]),
        prompt=play.prompt,
        messages=messages,
        text=text,
        turns=conversation.turns,
        turn_token_ids=conversation.turn_token_ids,
        infos={"num_turns": conversation.turns} | (output.rollout_infos or {}),
    )
