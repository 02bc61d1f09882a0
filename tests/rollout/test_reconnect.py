"""The trainer survives its server: real kills (SIGKILL, SIGSTOP) while it generates, updates, or stands between."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import ssl
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_r1.errors import RunFailed, ServerUnreachable
from swift_r1.rollout.base import ignore_output
from swift_r1.rollout.pool import session
from swift_r1.rollout.pool.pool import ServerPool
from swift_r1.rollout.pool.session import Expected
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.runtime.ranks import Ranks
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.connections import ServerLoop
from swift_r1.wire.protocol import (
    RolloutOutput,
    RolloutRequest,
    SamplingParams,
    ServerRefused,
    tokenizer_hash,
)
from tests.live_servers import OneWeightABucket, pool_of, push_weights

BACK_WITHIN_S = 240
ONE_RANK = Ranks(0, 1, torch.device("cpu"), None)


class OnWaiting(logging.Handler):
    """Calls `then` when the trainer says that it has lost the server."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], None] = lambda: None
        self.losses = 0

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting up to" in record.getMessage():
            self.losses += 1
            self.then()


@pytest.fixture
def on_waiting() -> Iterator[OnWaiting]:
    handler, logger = OnWaiting(), logging.getLogger("swift_r1.rollout.pool.session")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture
def connect(
    tiny_server: Any, tiny_model: Path, backend: OneWeightABucket
) -> Iterator[Callable[..., ServerRollouts]]:
    from transformers import AutoTokenizer

    clients: list[RolloutClient] = []
    pools: list[ServerPool] = []

    def to(
        timeout_s: float = BACK_WITHIN_S, silence_s: float = 60.0, max_tokens: int | None = None
    ) -> ServerRollouts:
        client = RolloutClient(tiny_server.url, silence_s=silence_s)
        clients.append(client)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        expected = Expected(str(tiny_model), tokenizer_hash(tokenizer), len(tokenizer), max_tokens)
        pools.append(pool_of([client], expected, timeout_s))
        return ServerRollouts(pools[-1], backend, ONE_RANK)

    yield to
    for pool in pools:
        pool.close()
    for client in clients:
        client.close()


def requests(name: str) -> list[RolloutRequest]:
    sampling = SamplingParams(max_tokens=48, ignore_eos=True)
    run = uuid.uuid4().hex  # the server outlives a test, and remembers
    return [
        RolloutRequest(
            request_id=f"{run}/{name}/{number}",
            prompt_token_ids=(1, 20 + number, 31),
            n=2,
            seeds=(2 * number, 2 * number + 1),
            sampling=sampling,
        )
        for number in range(6)
    ]


def generated(
    rollouts: ServerRollouts, name: str, at_first: Callable[[], None] = lambda: None
) -> list[Any]:
    """Tokens and version of every completion; each request must be answered once, in order."""
    told: list[int] = []
    given: list[RolloutOutput] = []

    def on_done(count: int) -> None:
        told.append(count)
        if len(told) == 1:
            at_first()

    asked = requests(name)
    outputs = rollouts.generate(asked, on_done, given.append)
    assert outputs is not None and [output.request_id for output in outputs] == [
        one.request_id for one in asked
    ]
    assert told == [2] * len(asked)
    assert sorted(one.request_id for one in given) == sorted(one.request_id for one in asked)
    return [(c.token_ids, c.weight_version) for output in outputs for c in output.completions]


def test_killed_while_it_generates(
    connect: Any, tiny_server: Any, on_waiting: OnWaiting, caplog: pytest.LogCaptureFixture
) -> None:
    """What was answered is kept, the rest is asked again, of the same weights: the same tokens as undisturbed."""
    caplog.set_level(logging.INFO, logger="swift_r1")
    rollouts = connect()
    rollouts.publish_weights()
    undisturbed = generated(rollouts, "a")
    on_waiting.then = tiny_server.start
    assert generated(rollouts, "b", at_first=tiny_server.kill) == undisturbed
    assert on_waiting.losses == 1
    said = caplog.text
    version = rollouts.weight_version
    assert (
        f"{tiny_server.url} was started again and holds weight version 0: pushing version {version}"
        in said
    )
    [again] = [
        record
        for record in caplog.records
        if record.getMessage().startswith("asking again for the")
    ]
    assert 0 < again.args[0] < again.args[1] == 6
    assert "s left" in said  # the countdown
    # The next round has nothing to repair.
    assert generated(rollouts, "c") == undisturbed and on_waiting.losses == 1


def test_killed_in_an_update_and_between(
    connect: Any, tiny_server: Any, on_waiting: OnWaiting, backend: OneWeightABucket
) -> None:
    rollouts = connect()
    rollouts.publish_weights()
    before = [tokens for tokens, _version in generated(rollouts, "a")]
    gathered: list[int] = []

    def kill_at_the_third(number: int) -> None:
        gathered.append(number)
        if gathered == [0, 1, 2]:
            tiny_server.kill()

    backend.at_bucket = kill_at_the_third
    on_waiting.then = tiny_server.start
    rollouts.publish_weights()
    # All ranks gather every bucket of the broken push too, and none again: the server is restored without them.
    assert gathered == list(range(len(list(backend.model.parameters()))))
    assert on_waiting.losses == 1
    version = rollouts.weight_version
    assert generated(rollouts, "b") == [(tokens, version) for tokens in before]
    # Killed and back in an idle moment: no connection breaks, only the answers' version tells.
    tiny_server.kill()
    tiny_server.start()
    tiny_server.wait()
    on_waiting.then = lambda: None
    assert generated(rollouts, "c") == [(tokens, version) for tokens in before]
    assert on_waiting.losses == 2 and rollouts.weight_version == version


def test_stopped_and_continued(connect: Any, tiny_server: Any, on_waiting: OnWaiting) -> None:
    """SIGSTOP keeps connections open: only /health's silence tells. Nothing is pushed to the same server again."""
    rollouts = connect(silence_s=1.0)
    rollouts.publish_weights()
    undisturbed = generated(rollouts, "a")
    pid, version = tiny_server.pid, rollouts.weight_version
    on_waiting.then = lambda: os.kill(pid, signal.SIGCONT)
    assert generated(rollouts, "b", at_first=lambda: os.kill(pid, signal.SIGSTOP)) == undisturbed
    assert on_waiting.losses == 1 and rollouts.weight_version == version


@pytest.mark.long
def test_a_server_that_stays_away_or_is_another_one(
    connect: Any, tiny_server: Any, tiny_model: Path, tmp_path: Path
) -> None:
    rollouts = connect(timeout_s=1.0)
    rollouts.publish_weights()
    tiny_server.kill()
    with pytest.raises(ServerUnreachable, match=r"was not ready within 1 s: no answer"):
        rollouts.generate(requests("a"), lambda _count: None, ignore_output)
    other = shutil.copytree(tiny_model, tmp_path / "another-model")
    tiny_server.start(other)
    tiny_server.wait()
    end, why = time.monotonic() + 60, "no answer"
    while "no answer" in why:  # what the last wait, of a second, has found
        assert time.monotonic() < end
        with pytest.raises(ServerUnreachable) as raised:
            rollouts.generate(requests("b"), lambda _count: None, ignore_output)
        why = str(raised.value)
    assert re.search("it serves .*another-model now, and served .* before", why)
    tiny_server.kill()


@pytest.mark.long
def test_a_server_that_dies_of_every_request_is_given_up(
    connect: Any, tiny_server: Any, on_waiting: OnWaiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it comes back it is killed at the first bucket: the trainer does not go on for ever."""
    monkeypatch.setattr(session, "_MAX_LOSSES", 3)
    rollouts = connect()

    def kill(client: RolloutClient, method: str, path: str, *more: Any, **named: Any) -> Any:
        if path == "/v1/weights/file":
            tiny_server.kill()
        return call(client, method, path, *more, **named)

    call = RolloutClient.call
    monkeypatch.setattr(RolloutClient, "call", kill)
    on_waiting.then = tiny_server.start
    with pytest.raises(ServerUnreachable, match="lost 3 times in a row"):
        rollouts.publish_weights()
    assert on_waiting.losses == 2


def test_another_trainers_update_is_no_loss(
    connect: Any, tiny_server: Any, backend: OneWeightABucket
) -> None:
    rollouts = connect()
    rollouts.publish_weights()
    ours = rollouts.weight_version
    with RolloutClient(tiny_server.url) as other:
        with pytest.raises(ServerRefused, match=f":{os.getpid()} writes this server's weights"):
            push_weights(other, ours + 7, [list(backend.model.named_parameters())])
        # As if this process had been stopped for longer than its lease lasts.
        rollouts.pool.sessions[0].writer.close()
        push_weights(other, ours + 7, [list(backend.model.named_parameters())])
    with pytest.raises(
        RunFailed, match=f"answered with weight version {ours + 7} .* was not published"
    ):
        rollouts.generate(requests("another"), lambda _count: None, ignore_output)
    assert rollouts.take_metrics()["rollout/refused"] == 1
    with pytest.raises(
        RunFailed, match=f"version {ours + 1} is not after the served version {ours + 7}"
    ):
        rollouts.publish_weights()


def test_certificates_are_read_for_https_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are 30 ms of a core for each server of each round."""
    read, times = ssl.create_default_context, 0

    def counted(*args: Any, **named: Any) -> ssl.SSLContext:
        nonlocal times
        times += 1
        return read(*args, **named)

    monkeypatch.setattr(ssl, "create_default_context", counted)
    # the connections of this test alone: others of the process may have read certificates already
    monkeypatch.setattr(ServerLoop, "_shared", None)
    with (
        RolloutClient("http://127.0.0.1:1") as client,
        RolloutClient("HTTPS://127.0.0.1:1") as secret,
    ):
        assert client.why_not_ready() and times == 0
        assert secret.why_not_ready() and secret.why_not_ready() and times == 1
