"""Requests over several servers, event by event: servers that fail at moments which no real one can be made to hit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from swift_r1.errors import RunFailed, ServerUnreachable
from swift_r1.record.spans import Busy, Spans
from swift_r1.rollout.calls import OpenCalls
from swift_r1.rollout.pool.router import Router
from swift_r1.rollout.pool.session import ServerLost
from swift_r1.wire.protocol import Completion, RolloutOutput, RolloutRequest, SamplingParams

WAIT_S = 20


@dataclass(eq=False)
class Server:
    """A `Connection`, its `ServerSession` and client in one; `asked` are the requests without an answer or a failure."""

    name: str
    over: bool = False
    asked: dict[str, asyncio.Future[RolloutOutput]] = field(default_factory=dict)
    judging: threading.Event = field(default_factory=threading.Event)
    judged: threading.Event = field(default_factory=threading.Event)
    generating: Busy = field(default_factory=lambda: Spans().busy("", ""))

    @property
    def session(self) -> Server:
        return self

    @property
    def client(self) -> Server:
        return self

    def paced(self, output: RolloutOutput, seconds: float) -> None: ...

    async def drop_connections(self) -> None: ...

    async def answer(self, request: RolloutRequest, images: object) -> RolloutOutput:
        self.asked[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await self.asked[request.request_id]
        except asyncio.CancelledError:
            del self.asked[request.request_id]
            raise

    async def watch(self, *_: Any) -> None:
        await asyncio.Event().wait()

    def check(self, _output: RolloutOutput, _versions: Any) -> None: ...

    def judge(self, error: Exception) -> None:
        self.judging.set()
        assert self.judged.wait(WAIT_S)
        raise ServerLost from error

    def answers(self, name: str) -> None:
        one = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason="length", weight_version=0)
        self.asked.pop(name).set_result(RolloutOutput(request_id=name, completions=(one,)))

    def fails(self, name: str) -> None:
        self.asked.pop(name).set_exception(ServerUnreachable(f"{self.name} is gone"))


@dataclass
class Servers:
    """A `Health`."""

    members: list[Server]

    @property
    def ready(self) -> list[Server]:
        return list(self.members)

    def listen(self, _listener: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def check_any(self) -> None: ...

    def attempt(self, member: Server, work: Callable[[], None]) -> None:
        with suppress(ServerLost):
            work()
        member.over = True
        self.members.remove(member)


def request(name: str) -> RolloutRequest:
    return RolloutRequest(
        request_id=name, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1)
    )


async def turns(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def played(
    servers: list[Server],
    names: str,
    story: Callable[[], Awaitable[None]],
    on_answer: Callable[[RolloutOutput], None],
    *at_once: int,
) -> None:
    async def play() -> None:
        calls = OpenCalls(on_answer, requests=[request(one) for one in names])
        router = Router(Servers(list(servers)), calls, (0,), *at_once)  # type: ignore[arg-type]
        telling = asyncio.create_task(story())
        await asyncio.gather(asyncio.wait_for(router.run(calls.answered), WAIT_S), telling)

    asyncio.run(play())


def test_no_more_requests_at_a_time_than_there_are_files_for() -> None:
    a, b = servers = [Server(name) for name in "AB"]
    answered: list[str] = []

    async def story() -> None:
        while len(answered) < 7:
            await turns(lambda: bool(a.asked or b.asked))
            for _ in range(10):
                await asyncio.sleep(0)
            assert len(a.asked) + len(b.asked) <= 3
            some = a if a.asked else b
            some.answers(next(iter(some.asked)))
            for _ in range(10):
                await asyncio.sleep(0)

    played(servers, "abcdefg", story, lambda output: answered.append(output.request_id), 3)
    assert sorted(answered) == list("abcdefg")


def test_two_servers_fail_in_one_turn_while_an_answer_waits() -> None:
    """Each prompt is answered exactly once: what B says while A's failure is judged is heard before B is left."""
    a, b, c = servers = [Server(name) for name in "ABC"]
    answered: list[str] = []

    async def story() -> None:
        await turns(lambda: len(a.asked) + len(b.asked) + len(c.asked) == 6)
        (a1, _), (b1, b2) = list(a.asked), list(b.asked)
        a.fails(a1)
        b.fails(b1)
        await turns(a.judging.is_set)
        b.answers(b2)
        for _ in range(10):
            await asyncio.sleep(0)
        a.judged.set()
        b.judged.set()
        # What the two have not answered comes to C, and b2 not once more.
        await turns(lambda: len(c.asked) >= 5)
        assert b2 not in c.asked
        for name in list(c.asked):
            c.answers(name)

    played(servers, "abcdef", story, lambda output: answered.append(output.request_id))
    assert sorted(answered) == list("abcdef")


def test_one_that_comes_gets_its_share_of_what_was_asked_last() -> None:
    a, b, c = (Server(name) for name in "ABC")
    members, answered = Servers([a]), list[str]()

    async def story() -> None:
        await turns(lambda: len(a.asked) == 8)
        members.members.append(b)
        await turns(lambda: len(b.asked) == 4)
        assert list(a.asked) == list("abcd") and sorted(b.asked) == list("efgh")
        # Half of A's are answered: it keeps the others. Of B's one is, and one of them is C's.
        for name in "ab":
            a.answers(name)
        b.answers("e")
        await turns(lambda: len(answered) == 3)
        members.members.append(c)
        await turns(lambda: len(c.asked) == 1)
        assert (
            list(a.asked) == list("cd") and list(b.asked) == list("fg") and list(c.asked) == ["h"]
        )
        for server in (c, b, a):
            for name in list(server.asked):
                server.answers(name)

    async def play() -> None:
        calls = OpenCalls(note, requests=[request(one) for one in "abcdefgh"])
        router = Router(members, calls, (0,))  # type: ignore[arg-type]
        await asyncio.gather(asyncio.wait_for(router.run(calls.answered), WAIT_S), story())

    def note(output: RolloutOutput) -> None:
        answered.append(output.request_id)

    asyncio.run(play())
    assert sorted(answered) == list("abcdefgh")


def test_what_the_receiver_of_an_answer_raises_ends_the_round_also_while_its_server_is_left() -> (
    None
):
    a, b, _c = servers = [Server(name) for name in "ABC"]

    def refuse(_output: RolloutOutput) -> None:
        raise RunFailed("broken on purpose")

    async def story() -> None:
        await turns(lambda: len(a.asked) + len(b.asked) == 2)
        a.fails(*a.asked)
        await turns(a.judging.is_set)
        b.answers(*b.asked)
        for _ in range(10):
            await asyncio.sleep(0)
        a.judged.set()

    with pytest.raises(RunFailed, match="broken on purpose"):
        played(servers, "abc", story, refuse)


def test_an_answer_that_is_no_good_is_asked_for_under_another_name() -> None:
    answers: list[RolloutOutput] = []
    calls = OpenCalls(answers.append, requests=[request("a~b")])
    assert [one.request_id for one in calls.take()] == ["a~b"]
    assert calls.again("a~b") == 1 and calls.again("a~b~1") == 2 and len(calls) == 1
    calls.begin(lambda: None)  # somebody else asks from here on
    assert [one.request_id for one in calls.take()] == ["a~b~2"] and not calls.closed
    calls.answered(RolloutOutput(request_id="a~b~2", completions=()))
    assert [one.request_id for one in answers] == ["a~b"] and calls.closed
