"""Sessions without a server: calls as tokens, their kinds, retries, limits, expiry. A token is a character."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from swift_r1.data.prompt_templates import behind_turn
from swift_r1.serving.engines.base import Piece, TokenLogprob
from swift_r1.serving.pieces import collected
from swift_r1.serving.sessions.calls import CallContent, ModelCall
from swift_r1.serving.sessions.gateway import AnswerStream, Attempt, Gateway
from swift_r1.serving.sessions.history import text_of
from swift_r1.serving.sessions.session import SessionState
from swift_r1.serving.sessions.store import SessionStore
from swift_r1.wire.protocol import HTTPError, RolloutRequest, SamplingParams
from swift_r1.wire.sessions import SessionLimits, SessionRequest, SessionSampling

END = "$"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


class Letters:
    """Template `[role|text$]`."""

    special = frozenset({ord(END)})

    def render(self, messages: Any, tools: Any) -> tuple[int, ...]:
        return self.encode("".join(str(tool) for tool in tools) + self._text(messages, True))

    def behind(self, messages: Any, place: int, tools: Any) -> tuple[int, ...] | None:
        text = behind_turn(self._text, messages, place)
        return None if text is None else self.encode(text)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def texts(self, token_ids: Any) -> list[str]:
        return list(map(chr, token_ids))

    def _text(self, messages: Any, opening: bool) -> str:
        turns = "".join(f"[{one['role']}|{text_of(one)}{END}]" for one in messages)
        return turns + ("[assistant|" if opening else "")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(**request: Any) -> SessionState:
    return SessionState("s", SessionRequest(**request), "key", Clock())


def call(
    state: SessionState,
    *messages: dict[str, Any],
    says: str = "yes",
    tools: Any = (),
    more: dict[str, Any] | None = None,
) -> ModelCall:
    """A call that the model answers with `says` and its end token."""
    done, _ = state.begin(CallContent(messages, tools), Letters())
    done.sampling = SamplingParams(max_tokens=50)
    ids = [*map(ord, says), ord(END)]
    state.finish(done, ids, [-0.5] * len(ids), [(0, 3)], "stop", says, model(says) | (more or {}))
    return done


def shown(ids: Any) -> str:
    return "".join(map(chr, ids))


def test_calls_that_extend_one_another_are_one_sequence_of_the_models_own_tokens() -> None:
    state = opened()
    call(state, system("s"), user("a"), says=" yes\n")
    call(state, system("s"), user("a"), model("yes"), user("b"), says="no")
    record = state.record()
    [sequence] = record.sequences
    assert shown(sequence.prompt_token_ids) == "[system|s$][user|a$][assistant|"
    # not the text that the agent sent back
    assert shown(sequence.token_ids) == " yes\n$][user|b$][assistant|no$"
    trained = [
        token for token, own in zip(sequence.token_ids, sequence.loss_mask, strict=True) if own
    ]
    assert shown(trained) == " yes\n$no$"
    for own, logprob, version in zip(
        sequence.loss_mask, sequence.logprobs, sequence.versions, strict=True
    ):
        assert (logprob, version) == ((-0.5, 3) if own else (0.0, None))
    assert record.kinds == {"new": 1, "extends": 1}
    assert [one.parent for one in record.calls] == [None, 0]
    assert sequence.messages == (system("s"), user("a"), model("yes"), user("b"), model("no"))


def test_an_answered_call_that_was_given_up_leaves_the_record_as_it_was() -> None:
    state = opened()
    call(state, user("a"))
    call(state, user("a"), model("yes"), user("b"))
    before, size = state.record(), state.bytes
    state.fail(call(state, user("a"), model("yes"), user("b"), model("yes"), user("c"), says="no"))
    after = state.record()
    assert (after.calls, after.sequences, after.kinds) == (
        before.calls,
        before.sequences,
        before.kinds,
    )
    assert (after.tokens, after.failed) == (before.tokens, 1)
    assert (
        call(state, user("a"), model("yes"), user("b"), model("yes"), user("d")).kind == "extends"
    )
    state.fail(state.calls[-1])
    assert state.bytes <= size


def test_a_call_of_tools_that_comes_back_as_other_json_is_no_edit() -> None:
    def made(name: str, arguments: str) -> dict[str, Any]:
        return {
            "tool_calls": [
                {
                    "id": name,
                    "type": "function",
                    "function": {"name": "add", "arguments": arguments},
                }
            ]
        }

    state = opened()
    call(
        state,
        user("a"),
        says="x",
        tools=[TOOL],
        more={"content": None} | made("one", '{"a": 1, "b": 2}'),
    )
    echoed = {"role": "assistant", "content": ""} | made("two", '{"b":2,"a":1}')
    answer = {"role": "tool", "tool_call_id": "two", "content": "3"}
    assert call(state, user("a"), echoed, answer, tools=[TOOL]).kind == "extends"
    # JavaScript knows no 1.0, and some agents name the model.
    call(
        state,
        user("b"),
        says="x",
        tools=[TOOL],
        more={"content": None} | made("one", '{"a": 1.0, "b": 2e1}'),
    )
    named = {"role": "assistant", "name": "adder", "content": ""} | made("two", '{"a":1,"b":20}')
    assert call(state, user("b"), named, answer, tools=[TOOL]).kind == "extends"
    # Whatever the model writes as arguments, it is recorded.
    deep = {"content": None} | made("one", "[" * 100_000 + "]" * 100_000)
    call(state, user("c"), says="x", tools=[TOOL], more=deep)
    answered = answer | {"tool_call_id": "one"}
    assert call(state, user("c"), model("") | deep, answered, tools=[TOOL]).kind == "extends"
    other = {"role": "assistant", "content": ""} | made("two", '{"b":2,"a":7}')
    assert call(state, user("a"), other, answer, tools=[TOOL]).kind == "new"


@pytest.mark.parametrize("opening", ["<think>\n", ""])  # the template may have written it
def test_reasoning_that_clients_take_out_of_the_text_is_no_edit(opening: str) -> None:
    says = f"{opening}hm, 1\n</think>\n\nIt is 3."
    for sent_back in (
        says,
        "<think>\n\nhm, 1\n\n</think>It is 3.",
        {"content": "It is 3.", "reasoning_content": "hm, 1"},
    ):
        state = opened()
        call(state, A, says=says)
        back = model("") | (sent_back if isinstance(sent_back, dict) else {"content": sent_back})
        assert call(state, A, back, B).kind == "extends"
        assert shown(state.record().sequences[0].token_ids).startswith(says)
    state = opened()
    call(state, A, says=says)
    # the model no longer reads what it thought
    assert call(state, A, model("It is 3."), B).kind == "new"


A, B, C, D = (user(letter) for letter in "abcd")
Y, N = model("yes"), model("no")
S = system("s")


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ((S, A, Y, B, N, C), "extends"),
        ((S, A, Y, D), "branch"),  # from a place that was continued already
        ((S, A), "new"),  # asks again
        ((S, D), "new"),  # a sub-agent with the same system message
        ((S, A, model("maybe"), B, N, C), "new"),
        ((S, A, Y, B, model("maybe"), C), "branch"),  # its own tokens up to there
        ((S, B, N, C), "new"),  # the oldest turns are gone
        ((system("other"), A, Y, B, N, C), "new"),
    ],
)
def test_kinds(messages: tuple[dict[str, Any], ...], kind: str) -> None:
    state = opened()
    call(state, S, A, says="yes")
    call(state, S, A, Y, B, says="no")
    assert call(state, *messages, says="end").kind == kind
    sequences = state.record().sequences
    assert len(sequences) == (1 if kind == "extends" else 2)
    # Every token of the model is trained once, however the calls branch.
    assert sum(sum(one.loss_mask) for one in sequences) == state.tokens == len("yes$no$end$")


def test_other_tools_make_another_prompt() -> None:
    state = opened()
    call(state, A, says="yes", tools=[TOOL])
    assert call(state, A, Y, B, tools=[]).kind == "new"


def test_seeds_come_from_what_is_said_whatever_the_order() -> None:
    def seeds(*order: tuple[dict[str, Any], ...]) -> set[tuple[str, int | None]]:
        state = opened(seed=7)
        return {(str(messages), call(state, *messages).seed) for messages in order}

    assert seeds((A,), (B,), (A,)) == seeds((A,), (A,), (B,))
    assert len(seeds((A,), (B,), (A,))) == 3  # asked twice, it is answered twice
    assert call(opened(), A).seed is None
    state = opened(seed=7)
    # as the client counts
    late, early = (state.begin(CallContent((A,)), Letters(), before=before)[0] for before in (1, 0))
    state = opened(seed=7)
    assert [call(state, A).seed, call(state, A).seed] == [early.seed, late.seed]


def test_equal_answers_are_continued_in_the_same_order_whichever_came_first() -> None:
    def prompts(*order: int) -> list[str]:
        state = opened(seed=7)
        begun = [state.begin(CallContent((A,)), Letters())[0] for _ in range(2)]
        for number in order:
            says = " " * number + "yes"
            state.finish(
                begun[number],
                [*map(ord, says)],
                [-1.0] * len(says),
                [(0, 0)],
                "stop",
                says,
                model(says),
            )
        return [shown(state.begin(CallContent((A, Y, B)), Letters())[1]) for _ in range(2)]

    assert prompts(0, 1) == prompts(1, 0) and "| yes" in prompts(0, 1)[1]


def test_limits() -> None:
    state = opened(limits=SessionLimits(tokens=8, calls=3, seconds=10))
    call(state, A)
    assert state.left() == (4, 10)
    call(state, B)
    with pytest.raises(HTTPError, match="8 tokens are used up"):
        state.left()
    state = opened(limits=SessionLimits(calls=1))
    call(state, A)
    with pytest.raises(HTTPError, match="1 calls are used up"):
        call(state, B)


def test_the_store_is_bounded_and_forgets() -> None:
    clock = Clock()
    store = SessionStore(2, 1 << 20, 60, clock=clock)
    first = store.open(SessionRequest(id="a", seed=1))
    assert store.open(SessionRequest(id="a", seed=1)) is first
    for request, status in ((SessionRequest(id="a", seed=2), 409), (SessionRequest(id="c"), 503)):
        store.open(SessionRequest(id="b"))
        with pytest.raises(HTTPError) as error:
            store.open(request)
        assert error.value.status == status
    first.begin(CallContent((A,)), Letters())  # which runs
    clock.now = 61
    for name, status in (("b", 410), ("never", 404)):
        with pytest.raises(HTTPError) as error:
            store.get(name)
        assert error.value.status == status
    assert store.get("a") is first
    store.delete("a")
    with pytest.raises(HTTPError) as error:
        store.get("a")
    assert error.value.status == 404 and len(store) == 0


class Spoken:
    """A completion, token by token as `go` lets it."""

    name, version, prompt_tokens = "-", 5, 0

    def __init__(self, text: str, versions: Any = None, ends: str = "length") -> None:
        self.versions, self.ends, self.closing = versions, ends, asyncio.Event()
        self.closing.set()
        self.text, self.go, self.began, self.closed = text, asyncio.Event(), asyncio.Event(), False

    async def start(self) -> None: ...

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        try:
            for place, letter in enumerate(self.text):
                if place == 1:
                    self.began.set()
                    await self.go.wait()
                reason: Any = self.ends if place + 1 == len(self.text) else None
                yield (
                    0,
                    Piece(
                        (ord(letter),),
                        letter,
                        (TokenLogprob(letter, -float(place)),),
                        reason,
                        self.versions,
                    ),
                )
        finally:
            await self.closing.wait()
            self.closed = True


@dataclass
class SpokenCall:
    """A call whose request is `seen`, and whose answer is `spoken`."""

    spoken: Spoken
    seen: list[RolloutRequest]

    def request(self, prompt: tuple[int, ...]) -> RolloutRequest:
        return RolloutRequest(
            request_id="-", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=50)
        )

    def generate(self, request: RolloutRequest, seed: int | None) -> Spoken:
        self.seen.append(request)
        return self.spoken

    def answer(self, completion: Piece, prompt: tuple[int, ...]) -> dict[str, Any]:
        return model(completion.text)


def asking(
    gateway: Gateway,
    state: SessionState,
    spoken: Spoken,
    seen: list[RolloutRequest],
    retried: bool = False,
) -> AnswerStream:
    return gateway.ask(
        state, CallContent((A,)), None, Attempt(retried), Letters(), SpokenCall(spoken, seen)
    )


def test_a_retry_joins_what_runs_and_is_recorded_once() -> None:
    async def scene() -> None:
        gateway = Gateway(SessionStore(9, 1 << 20, 60))
        sampling = SessionSampling(temperature=1.0, max_tokens=20)
        state = gateway.store.open(
            SessionRequest(sampling=sampling, limits=SessionLimits(tokens=9))
        )
        spoken, seen = Spoken("word"), list[RolloutRequest]()
        first = asking(gateway, state, spoken, seen)
        reading = asyncio.create_task(collected(first))
        second = asking(gateway, state, Spoken("other"), seen, retried=True)
        spoken.go.set()
        [one], [two] = await reading, await collected(second)
        assert one == two and one.text == "word" and first.name == second.name
        [again] = await collected(asking(gateway, state, Spoken("other"), seen, retried=True))
        assert (again.token_ids, again.logprobs, again.finish_reason) == (
            one.token_ids,
            one.logprobs,
            "length",
        )
        assert len(seen) == 1
        assert (seen[0].sampling.max_tokens, seen[0].sampling.temperature) == (9, 1.0)
        record = state.record()
        assert record.retried == 2
        later = Spoken("long", ((0, 5), (1, 6), (3, 8)))  # an update that keeps it running
        later.go.set()
        await collected(asking(gateway, state, later, seen))
        assert [one.versions for one in state.record().sequences] == [(5,) * 4, (5, 6, 6, 8)]
        assert record.sequences[0].versions == (5,) * 4 and record.sequences[0].logprobs == (
            0.0,
            -1.0,
            -2.0,
            -3.0,
        )

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_what_runs_ends_with_its_last_client_with_its_session_and_with_its_time() -> None:
    async def scene() -> None:
        gateway = Gateway(SessionStore(9, 1 << 20, 60))
        state = gateway.store.open(SessionRequest(id="a"))
        spoken = Spoken("word")
        reading = asyncio.create_task(collected(asking(gateway, state, spoken, [])))
        await spoken.began.wait()
        reading.cancel()
        await asyncio.wait([reading])
        while not spoken.closed:
            await asyncio.sleep(0)
        assert (state.running, state.failed) == ([], 1)
        spoken = Spoken("word")
        reading = asyncio.create_task(collected(asking(gateway, state, spoken, [])))
        await spoken.began.wait()
        gateway.delete("a")
        with pytest.raises(HTTPError, match="was deleted"):
            await reading
        short = gateway.store.open(SessionRequest(limits=SessionLimits(seconds=0.1)))
        with pytest.raises(HTTPError, match="the session's time is over"):
            await collected(asking(gateway, short, Spoken("word"), []))
        assert short.failed == 1 and not short.calls and short.limit == "seconds"

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_a_retry_never_joins_a_call_that_was_stopped() -> None:
    """Also while the engine has not yet let go of it."""

    async def scene() -> None:
        gateway = Gateway(SessionStore(9, 1 << 20, 60))
        state = gateway.store.open(SessionRequest(seed=1))
        spoken, seen = Spoken("word"), list[RolloutRequest]()
        spoken.closing.clear()
        reading = asyncio.create_task(collected(asking(gateway, state, spoken, seen)))
        await spoken.began.wait()
        reading.cancel()
        await asyncio.wait([reading])
        again = Spoken("more")
        again.go.set()
        [one] = await collected(asking(gateway, state, again, seen, retried=True))
        assert one.text == "more" and not spoken.closed
        spoken.closing.set()
        record = state.record()
        assert (record.failed, record.retried, record.running, len(record.calls)) == (1, 0, 0, 1)

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_what_the_engine_breaks_off_is_no_answer() -> None:
    async def scene() -> None:
        gateway = Gateway(SessionStore(9, 1 << 20, 60))
        state = gateway.store.open(SessionRequest())
        spoken = Spoken("word", ends="abort")
        spoken.go.set()
        with pytest.raises(HTTPError, match="abort") as error:
            await collected(asking(gateway, state, spoken, []))
        assert error.value.status == 503 and not state.calls and state.failed == 1

    asyncio.run(asyncio.wait_for(scene(), 20))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_an_agent_sends_each_token_is_trained_once_behind_what_the_model_read(
    seed: int,
) -> None:
    """Histories that are extended, edited, cut and mixed, with calls that overlap, fail and are never answered."""
    draw = random.Random(seed)
    state = opened(seed=1 if seed % 2 else None)
    histories: list[list[dict[str, Any]]] = [[A], [S, B]]
    running: list[tuple[ModelCall, list[int], list[dict[str, Any]]]] = []
    read: dict[int, list[int]] = {}
    wrote: dict[int, list[int]] = {}
    for step in range(60):
        history = list(draw.choice(histories))
        change = draw.random()
        if change < 0.15:
            place = draw.randrange(len(history))
            history[place] = history[place] | {"content": f"edit {step}"}
        elif change < 0.3:
            del history[draw.randrange(len(history))]
            history = history or [C]
        elif change < 0.35:
            draw.shuffle(history)
        if history[-1]["role"] == "assistant":
            history.append(user(draw.choice("abc")))
        tools = [TOOL] if draw.random() < 0.1 else []
        begun, prompt = state.begin(CallContent(history, tools), Letters())
        begun.sampling = SamplingParams(max_tokens=50)
        running.append((begun, prompt, history))
        while running and (step == 59 or draw.random() < 0.6):
            begun, prompt, history = running.pop(draw.randrange(len(running)))
            if draw.random() < 0.2:
                state.fail(begun)
                continue
            says = draw.choice(["yes", " no ", "", "a$b"])
            ids = [*map(ord, says), *([ord(END)] if draw.random() < 0.7 else [])] or [ord("x")]
            state.finish(begun, ids, [-1.0] * len(ids), [(0, step)], "stop", says, model(says))
            read[begun.number], wrote[begun.number] = prompt, ids
            histories.append([*history, model(f" {says}")])
    record = state.record()
    assert record.running == 0 and sum(record.kinds.values()) == len(record.calls) == len(read)
    found = {}
    for sequence in record.sequences:
        ids, place = (
            [*sequence.prompt_token_ids, *sequence.token_ids],
            len(sequence.prompt_token_ids),
        )
        for number in sequence.calls:
            place += sequence.loss_mask[place - len(sequence.prompt_token_ids) :].index(True)
            assert ids[:place] == read[number]
            found[number] = ids[place : place + len(wrote[number])]
            place += len(wrote[number])
        assert sum(sequence.loss_mask) == sum(len(wrote[number]) for number in sequence.calls)
        assert {one for one in sequence.versions if one is None} == (
            {None} if not all(sequence.loss_mask) else set()
        )
    assert found == wrote
    assert state.bytes > 0
