"""Servers that join and leave a pool, at every moment of a round and of a push; and the file that names them."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from swift_r1.errors import RunFailed, ServerUnreachable
from swift_r1.models.expected import expected_weights
from swift_r1.rollout.base import ignore_output
from swift_r1.rollout.pool.health import ServerState
from swift_r1.rollout.pool.pool import Membership, ServerPool
from swift_r1.rollout.pool.session import Expected, ServerSession
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.runtime.ranks import Ranks
from swift_r1.sync.writer import WeightWriter
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutRequest, SamplingParams, tokenizer_hash
from swift_r1.wire.server_file import parsed, ready_servers, server_file_faults
from tests.conftest import until
from tests.live_servers import OneWeightABucket, learn, pool_of, push_weights
from tests.tiny_server import TinyEngine

WAIT_S = 60
ONE_RANK = Ranks(0, 1, torch.device("cpu"), None)


@pytest.fixture
def serve(tiny_model: Path, serve_engine: Callable[..., str]) -> Callable[..., str]:
    """`serve(**config) -> url` of a small engine with the folder's weights."""
    expected = expected_weights(str(tiny_model))

    def start(length: int = 1024, **config: Any) -> str:
        return serve_engine(TinyEngine(str(tiny_model), length=length), expected, **config)

    return start


class Run:
    """The rollouts of a run over servers that come and go."""

    def __init__(
        self,
        urls: Sequence[str],
        model: Path,
        backend: OneWeightABucket,
        timeout_s: float,
        **options: Any,
    ) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        self.expected = Expected("tiny", tokenizer_hash(tokenizer), len(tokenizer), None)
        self.timeout_s, self.transport = timeout_s, options.get("transport", "auto")
        clients = [RolloutClient(url) for url in urls]
        self.pool: ServerPool = pool_of(
            clients, self.expected, timeout_s, source="servers.txt", **options
        )
        self.rollouts, self.backend = ServerRollouts(self.pool, backend, ONE_RANK), backend
        self._one_at_a_time = threading.Lock()

    def make(self, url: str) -> ServerSession:
        writer = WeightWriter(RolloutClient(url))
        return ServerSession(
            writer, self.expected, self.timeout_s, self.transport, self.pool.first, newcomer=True
        )

    def follow(self, *urls: str) -> None:
        with self._one_at_a_time:
            self.pool.follow(urls, self.make)

    def ready(self, count: int) -> None:
        until(lambda: len(self.pool.health.ready) == count, WAIT_S)

    def generated(
        self, on_answer: Callable[[int], None] = lambda _count: None, count: int = 12
    ) -> list[Any]:
        """Tokens of every completion; each request must be answered once, in order."""
        told: list[int] = []

        def on_done(number: int) -> None:
            told.append(number)
            on_answer(len(told))

        # servers remember
        sampling, name = SamplingParams(max_tokens=8, ignore_eos=True), uuid.uuid4().hex
        asked = [
            RolloutRequest(
                request_id=f"{name}/{number}",
                prompt_token_ids=(1, 20 + number, 31),
                n=2,
                seeds=(2 * number, 2 * number + 1),
                sampling=sampling,
            )
            for number in range(count)
        ]
        outputs = self.rollouts.generate(asked, on_done, ignore_output)
        assert outputs is not None and [one.request_id for one in outputs] == [
            one.request_id for one in asked
        ]
        assert told == [2] * count
        return [completion.token_ids for output in outputs for completion in output.completions]


@pytest.fixture
def begin(tiny_model: Path, backend: OneWeightABucket) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def of(*urls: str, timeout_s: float = WAIT_S, **options: Any) -> Run:
        runs.append(Run(urls, tiny_model, backend, timeout_s, **options))
        return runs[-1]

    yield of
    for run in runs:
        run.pool.close()


def test_one_joins_gets_the_weights_and_a_part_of_the_round(
    begin: Any, serve: Any, backend: OneWeightABucket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="swift_r1")
    one, other = serve(), serve()
    # another run's weights, under the number that this one's will have
    with RolloutClient(other) as client:
        push_weights(
            client, 1, [[(name, -w.detach()) for name, w in backend.model.named_parameters()]]
        )
    run = begin(one)
    run.rollouts.publish_weights()
    assert run.rollouts.weight_version == 1

    def at_first(answers: int) -> None:
        if answers == 1:
            run.follow(one, other)

    # All of a longer round was asked of the first one when the second came.
    longer = run.generated(count=32)
    undisturbed = longer[:24]
    assert run.generated(at_first, count=32) == longer
    [newcomer] = [session for session in run.pool.sessions if session.url == other]
    assert run.pool.health.state(newcomer) is ServerState.READY and newcomer.take_pace() > 0
    assert (
        f"the rollout server at {other} joins with weight version 2: 2 of 2 servers" in caplog.text
    )
    assert run.rollouts.take_metrics()["rollout/servers"] == 2
    # The first one leaves in a round: the other does what it has not answered.
    assert run.generated(lambda answers: run.follow(other) if answers == 2 else None) == undisturbed
    assert run.rollouts.take_metrics()["rollout/servers"] == 1
    until(lambda: lease_is_free(one), WAIT_S)
    # It comes back, with weights of before.
    learn(run.backend, 0.3)
    run.rollouts.publish_weights()
    alone = run.generated(count=4)
    assert alone != undisturbed[:8]
    run.follow(one, other)
    run.ready(2)
    run.follow(one)
    assert run.generated(count=4) == alone


def lease_is_free(url: str) -> bool:
    """Whether nobody has it; tried as another run would."""
    with (
        RolloutClient(url) as client,
        WeightWriter(client, "somebody") as writer,
        suppress(RunFailed),
    ):
        writer.take()
        return True
    return False


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"transport": "http", "compare": True}, id="delta", marks=pytest.mark.long),
        pytest.param({"transport": "http", "compare": False}, id="http", marks=pytest.mark.long),
        pytest.param(
            {"transport": "http", "compare": True, "fanout": 1}, id="chain", marks=pytest.mark.long
        ),
        pytest.param({"transport": "shm"}, id="shm"),
    ],
)
@pytest.mark.parametrize(
    ("seed", "rounds"),
    [pytest.param(seed, 40, marks=pytest.mark.long) for seed in range(1, 8)],
)
def test_at_random_moments_completions_are_those_of_one_server(
    begin: Any,
    serve: Any,
    backend: OneWeightABucket,
    options: dict[str, Any],
    seed: int,
    rounds: int,
) -> None:
    urls = [serve() for _ in range(3)]
    draw = random.Random(seed)
    first = {name: weight.clone() for name, weight in backend.model.state_dict().items()}

    def story(run: Run, at: Callable[[int], None]) -> list[Any]:
        backend.model.load_state_dict(first)
        found = []
        for _ in range(rounds):
            learn(backend, 0.05)
            backend.at_bucket = at
            run.rollouts.publish_weights()
            backend.at_bucket = lambda _number: None
            found.append(run.generated(at, count=6))
        return found

    alone = begin(urls[0], **options)
    calm = story(alone, lambda _number: None)
    alone.pool.close()
    run, timers = begin(urls[0], **options), list[threading.Timer]()
    moments = 0

    def disturb(_number: int) -> None:
        nonlocal moments
        if draw.random() < 0.2:
            moments += 1
            run.follow(*(some := draw.sample(urls, draw.randrange(4))))
            if not some:  # whoever is waited for comes a little later
                timers.append(threading.Timer(0.05, run.follow, (draw.choice(urls),)))
                timers[-1].start()

    try:
        assert story(run, disturb) == calm
    finally:
        for timer in timers:
            timer.join()
    assert moments > rounds
    versions = run.rollouts.take_metrics()
    assert versions["rollout/refused"] == 0 and versions["rollout/bytes"] > 0


def test_who_is_not_alike_or_not_free_does_not_join(
    begin: Any, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, shorter, taken = serve(), serve(length=512), serve()
    run = begin(one)
    run.rollouts.publish_weights()
    with RolloutClient(taken) as client, WeightWriter(client, "somebody", ttl_s=2.0) as somebody:
        somebody.hold(WAIT_S)
        again = one.replace("127.0.0.1", "localhost")
        run.follow(one, shorter, taken, again)
        until(lambda: caplog.text.count("does not join") == 3, WAIT_S)
    assert (
        f"{shorter} does not join: the rollout server at {one} has max_model_len 1024"
        in caplog.text
    )
    assert f"{taken} does not join" in caplog.text and "somebody" in caplog.text
    assert f"{again} does not join: {one} and {again} are the same rollout server" in caplog.text
    assert len(run.generated()) == 24 and len(run.pool.health.ready) == 1
    # Free by now, and named again.
    run.follow(one)
    run.follow(one, taken)
    run.ready(2)


@pytest.mark.long
def test_without_any_the_run_waits_for_one_and_then_ends(begin: Any, serve: Any) -> None:
    one = serve()
    run = begin(one, timeout_s=1.5)
    run.rollouts.publish_weights()
    undisturbed = run.generated()
    timers = []

    def leave(answers: int) -> None:
        if answers == 2:
            run.follow()
            timers.append(threading.Timer(0.5, run.follow, (one,)))
            timers[-1].start()

    assert run.generated(leave) == undisturbed
    timers[0].join()
    with pytest.raises(
        ServerUnreachable, match=r"no rollout server of servers.txt came within 1.5 s"
    ):
        run.generated(lambda answers: run.follow() if answers == 1 else None)
    # One that is not there is waited for until it is no longer named.
    run.follow("http://127.0.0.1:9")
    with pytest.raises(ServerUnreachable, match=r"127.0.0.1:9"):
        run.generated()
    run.follow(one)
    assert run.generated() == undisturbed
    until(lambda: not [one for one in threading.enumerate() if ":9" in one.name], WAIT_S)


def test_a_server_that_is_getting_its_weights_is_waited_for(
    begin: Any, serve: Any, serve_engine: Any, tiny_model: Path
) -> None:
    """A large model takes longer than `--vllm_server_timeout`."""
    may_load, timeout_s = threading.Event(), 1.5

    class Large(TinyEngine):
        async def load_weights(self, files: Sequence[Path], version: int) -> None:
            threading.Timer(2 * timeout_s, may_load.set).start()
            await asyncio.to_thread(may_load.wait, WAIT_S)
            await super().load_weights(files, version)

    one, large = serve(), serve_engine(Large(str(tiny_model)), expected_weights(str(tiny_model)))
    run = begin(one, timeout_s=timeout_s)
    run.rollouts.publish_weights()
    undisturbed = run.generated()
    assert run.generated(lambda answers: run.follow(large) if answers == 2 else None) == undisturbed
    assert may_load.is_set()


@pytest.mark.long
def test_200_joins_and_leaves_leave_nothing_behind(begin: Any, serve: Any) -> None:
    one, other = serve(), serve()
    run = begin(one)
    run.rollouts.publish_weights()
    this = psutil.Process()

    def counts() -> tuple[int, int, int]:
        # Those of the servers, which are in this process too, come as they have work.
        threads = [one for one in threading.enumerate() if not one.name.startswith("asyncio_")]
        return len(threads), len(this.net_connections("tcp")), len(os.listdir("/proc/self/fd"))

    def no_more_than(before: tuple[int, int, int]) -> bool:
        return all(now <= then for now, then in zip(counts(), before, strict=True))

    def cycle(number: int) -> None:
        run.follow(one, other)
        if number % 3:
            run.ready(2)
        if number % 20 == 0:
            run.generated(count=4)
        run.follow(one)

    def settled() -> bool:
        return not any(
            thread.name.startswith(("leave", "restore")) for thread in threading.enumerate()
        )

    for number in range(10):  # what is made once
        cycle(number)
    until(settled, WAIT_S)
    before = counts()
    for number in range(200):
        cycle(number)
    until(settled, WAIT_S)
    until(lambda: no_more_than(before), 20)  # idle connections are kept for some seconds
    assert lease_is_free(other) and not lease_is_free(one)
    assert [session.url for session in run.pool.sessions] == [one]


def test_lines_of_the_file(tmp_path: Path) -> None:
    text = "# all\n http://a:1/ # first\n\nhttps://b.c_d.\nhttp://a:1\nhttp://[::1]:8\nhttp://10.0.0.1\n"
    servers = parsed(text, "f")
    assert servers.urls == ("http://a:1", "https://b.c_d.", "http://[::1]:8", "http://10.0.0.1")
    assert servers.faults == ()
    # Of these a client would raise as it is made, or at its first request.
    wrong = [
        "b:2",
        "http://c:port",
        "http://",
        "http://d e",
        "http://10.0.0.256:1",
        "http://[v1.a]:2",
        "http://e..f:80",
    ]
    wrong += [
        "http://é..x",
        "http://xn--\u0080",
        "http://" + "g" * 64,
        "http://h:70000",
        "http://i:0",
        "http://j\\k",
    ]
    servers = parsed("\n".join(wrong), "f")
    assert servers.urls == ()
    assert [fault.partition(":")[0] for fault in servers.faults] == [
        f"f, line {n + 1}" for n in range(len(wrong))
    ]
    assert "'b:2' must begin with http://" in servers.faults[0]
    path = tmp_path / "servers.txt"
    assert "No such file" in server_file_faults(str(path))[0]
    path.write_text("gen1\n")
    assert server_file_faults(str(path)) == [
        f"--vllm_server_file {path}, line 1: 'gen1' must begin with http:// or https://"
    ]
    path.write_bytes(b"\xff\xfe")
    assert len(server_file_faults(str(path))) == 1
    path.write_text("")
    with pytest.raises(ServerUnreachable, match="it names none"):
        ready_servers(str(path), None, 0.1, lambda _text: None)


def test_the_servers_of_the_file_that_are_ready(
    tmp_path: Path, serve: Any, serve_engine: Any
) -> None:
    one, path, said = serve(), tmp_path / "servers.txt", list[str]()

    def report(text: str) -> None:
        said.append(text)
        path.write_text(f"http://127.0.0.1:9\n{one}\n")

    path.write_text("http://127.0.0.1:9\n")
    assert list(ready_servers(str(path), None, WAIT_S, report)) == [one]
    assert len(said) == 1 and "http://127.0.0.1:9: no answer" in said[0] and "s left" in said[0]


class Followed:
    """A `ServerPool` that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []

    def follow(self, urls: tuple[str, ...], _make: Any) -> None:
        self.told.append(urls)


def test_the_file_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # the looks are the test's
    monkeypatch.setattr("swift_r1.rollout.pool.pool._FILE_LOOK_S", WAIT_S)
    path, pool = tmp_path / "servers.txt", Followed()
    path.write_text("http://a\n")
    file = Membership(path, pool, lambda _url: None)  # type: ignore[arg-type]
    told, look = pool.told, file._look
    look()
    assert told == []  # it may be half-written
    look()
    look()
    assert told == [("http://a",)]
    path.write_text("")  # about to be written anew
    look()
    path.write_text("http://a\nhttp://b")
    look()
    assert len(told) == 1
    path.write_text("http://a\nhttp://b:80\nnonsense\n")
    look()
    look()
    assert told[1:] == [("http://a", "http://b:80")]
    path.unlink()
    for _ in range(3):
        look()
    assert len(told) == 2 and caplog.text.count("stay as they are") == 1
    (tmp_path / "new").write_text("http://b:80\nnonsense\n")
    (tmp_path / "new").rename(path)
    for _ in range(3):
        look()
    assert told[2:] == [("http://b:80",)]
    assert caplog.text.count("servers.txt, line 3: 'nonsense' must begin with http://") == 1
    path.write_text("# nobody\n")
    look()
    look()
    assert told[3:] == [()]
    file.close()
    assert not file._thread.is_alive()
