"""Weights that servers pass on to others: all get the same ones, whatever becomes of a server on the way."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_r1.rollout.pool.pool import ServerPool
from swift_r1.rollout.pool.session import Expected, ServerSession
from swift_r1.sync import writer
from swift_r1.sync.writer import Link, WeightWriter, fanout_of, joined
from swift_r1.wire import protocol as wire
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import ServerRefused
from tests import forks
from tests.conftest import until
from tests.live_servers import pool_of, to_bytes
from tests.sync.fanout_server import BUCKETS, SHAPES, hash_of

SERVER = Path(__file__).with_name("fanout_server.py")
EXPECTED = Expected("none", "", 100, None)
KEY = "of-the-run"
SIZE = BUCKETS * 2000 * 4


class Served:
    """A server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.process = forks.start([str(SERVER), str(self.folder), KEY])

    @property
    def url(self) -> str:
        return str(
            until(lambda: (self.folder / "url").exists() and (self.folder / "url").read_text())
        )

    @property
    def client(self) -> RolloutClient:
        return RolloutClient(self.url, KEY)

    @property
    def loaded(self) -> list[str]:
        file = self.folder / "loaded"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def received(self) -> int:
        """Bytes of its last version's buckets."""
        return sum(map(int, (self.folder / "sizes").read_text().split()[-BUCKETS:]))

    def mark(self, name: str) -> Path:
        (self.folder / name).touch()
        return self.folder / name

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


url_of = Served.url.__get__


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[int], list[Served]]]:
    started: list[Served] = []

    def several(count: int) -> list[Served]:
        started.extend(Served(tmp_path / str(number)) for number in range(count))
        return started

    yield several
    for one in started:
        one.kill()


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[Callable[..., ServerPool]]:
    with contextlib.ExitStack() as cleanup:

        def of(
            servers: list[Served], fanout: int, silence_s: float = 60, **options: Any
        ) -> ServerPool:
            clients = [
                cleanup.enter_context(RolloutClient(one.url, KEY, silence_s)) for one in servers
            ]
            made = pool_of(clients, EXPECTED, 60, "http", fanout=fanout, **options)
            cleanup.callback(made.close)
            return made

        yield of


def weights(
    of: float, dtype: torch.dtype = torch.float32
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    for number, (name, shape) in enumerate(SHAPES.items()):
        yield [(name, torch.arange(shape[0], dtype=dtype).remainder(97) + of + number)]


def disturbed(
    servers: list[Served], disturb: Callable[[], None]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The weights of 2; in the middle, when the servers have two buckets of them, something happens."""
    for index, bucket in enumerate(weights(2)):
        if index == 2:
            until(lambda: all(is_open(one, 2) for one in servers))
            disturb()
        yield bucket


def is_open(one: Served, buckets: int) -> bool:
    status = one.client.call("GET", "/v1/weights/update", wire.UpdateStatus)
    return status.pending_version == 2 and status.buckets >= buckets


def broken_off() -> Iterator[list[tuple[str, torch.Tensor]]]:
    yield next(weights(5))
    raise StopAsyncIteration


def line(version: int, of: float) -> str:
    return f"{version} {hash_of([to_bytes(bucket) for bucket in weights(of)])}"


def test_the_tree() -> None:
    def shape(count: int, fanout: int) -> list[int | None]:
        links = [Link(RolloutClient("http://127.0.0.1:1"), "0") for _ in range(count)]
        found = list(joined(links, fanout))
        assert [one.children for one in found] == [
            sum(other.parent is one for other in found) for one in found
        ]
        return [None if one.parent is None else links.index(one.parent) for one in found]

    assert shape(7, 2) == [None, None, 0, 0, 1, 1, 2]
    assert shape(4, 1) == [None, 0, 1, 2]
    assert shape(3, 0) == [None, None, None]
    assert [fanout_of(None, count) for count in (1, 4, 5, 1024)] == [0, 0, 2, 2]
    assert [fanout_of(3, count) for count in (2, 3, 4)] == [0, 0, 3] and fanout_of(0, 100) == 0


def test_all_get_what_a_direct_push_brings(
    serve: Any, pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    servers = serve(5)
    run = pool(servers, 2)
    caplog.set_level(logging.INFO)
    run.publish(weights(1))
    assert run.take_metrics()["rollout/bytes"] == pytest.approx(2 * SIZE, rel=0.01)
    assert (
        "weights go to 2 of 5 servers, which pass them on" in caplog.text
        and "straight" not in caplog.text
    )
    run.publish(weights(2))
    run.close()
    direct = pool(servers, 0)
    direct.publish(weights(2))
    assert direct.take_metrics()["rollout/bytes"] == pytest.approx(5 * SIZE, rel=0.01)
    for one in servers:
        assert one.loaded == [line(1, 1), line(2, 2), line(3, 2)]


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("begin", marks=pytest.mark.long),
        "bucket",
        pytest.param("commit", marks=pytest.mark.long),
    ],
)
def test_a_relay_dies(serve: Any, pool: Any, phase: str, caplog: pytest.LogCaptureFixture) -> None:
    """0 passes on to 1, and 1 to 2, which does not notice that 0 died."""
    servers = serve(3)
    run = pool(servers, 1)
    run.publish(weights(1))
    run.take_metrics()
    if phase == "commit":
        servers[0].mark("hold-load")

    def dying() -> Iterator[Any]:
        dies_at = {"begin": 0, "bucket": 2}.get(phase)
        for index, bucket in enumerate(weights(2)):
            if index == dies_at:
                until(lambda: all(is_open(one, dies_at) for one in servers))
                servers[0].kill()
            yield bucket

    pushing = threading.Thread(target=run.publish, args=(dying(),))
    pushing.start()
    if phase == "commit":
        until(lambda: len(servers[1].loaded) == len(servers[2].loaded) == 2)
        servers[0].kill()
    pushing.join(60)
    assert not pushing.is_alive()
    # A version that is being loaded when its server dies may be lost there, and nowhere is a mixture.
    assert [one.loaded for one in servers[1:]] == [[line(1, 1), line(2, 2)]] * 2
    straight = [
        record.getMessage()
        for record in caplog.records
        if "goes straight to" in record.getMessage()
    ]
    assert not any(servers[2].url in text.partition(":")[0] for text in straight)
    if phase == "bucket":
        [told] = straight
        assert told.startswith(f"the rest of weight version 2 goes straight to {servers[1].url}: ")
        # What it had is not sent again: at most all to 0, and the other half to 1.
        assert run.take_metrics()["rollout/bytes"] < 1.6 * SIZE
    (servers[0].folder / "hold-load").unlink(missing_ok=True)
    servers[0].start()
    until(lambda: len(run.health.ready) == 3)
    assert servers[0].loaded[-1] == line(2, 2)
    run.publish(weights(3))
    assert {one.loaded[-1] for one in servers} == {line(3, 3)}


@pytest.mark.long
@pytest.mark.parametrize("level", range(3))
def test_a_relay_is_stopped(
    serve: Any, pool: Any, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds up nobody for longer than `_RELAY_S`; what it still sends when it goes on changes nothing."""
    monkeypatch.setattr(writer, "_RELAY_S", 2.0)
    servers = serve(3)
    run = pool(servers, 1, silence_s=2)
    run.publish(weights(1))
    others = [one for one in servers if one is not servers[level]]
    run.publish(disturbed(servers, lambda: servers[level].process.send_signal(signal.SIGSTOP)))
    assert [one.loaded for one in others] == [[line(1, 1), line(2, 2)]] * 2
    assert len(run.health.ready) == 2
    servers[level].process.send_signal(signal.SIGCONT)
    until(lambda: len(run.health.ready) == 3)
    first, *later = servers[level].loaded
    assert first == line(1, 1) and {one.split()[1] for one in later} == {line(0, 2).split()[1]}
    run.publish(weights(3))
    assert {one.loaded[-1].split()[1] for one in servers} == {line(0, 3).split()[1]}
    assert [one.loaded[:2] for one in others] == [[line(1, 1), line(2, 2)]] * 2


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.long)])
def test_one_joins_and_one_leaves_in_a_push(serve: Any, pool: Any, who: int) -> None:
    servers = serve(4)
    run = pool(servers[:3], 1, source="servers.txt")
    run.publish(weights(1))
    stay = [one for one in servers if one is not servers[who]]

    def newcomer(url: str) -> ServerSession:
        client = RolloutClient(url, KEY)
        return ServerSession(WeightWriter(client), EXPECTED, 60, "http", run.first, newcomer=True)

    run.publish(disturbed(servers[:3], lambda: run.follow([one.url for one in stay], newcomer)))
    until(lambda: len(run.health.ready) == 3)
    # The one that left goes on with the version that it had, and another run may write to it.
    assert servers[who].loaded == [line(1, 1)]
    assert [one.loaded for one in stay[:2]] == [[line(1, 1), line(2, 2)]] * 2
    assert [one.split()[1] for one in servers[3].loaded] == [line(0, 2).split()[1]]
    until(lambda: servers[who].url not in run.health._leaving)
    with WeightWriter(servers[who].client, "another run") as other:
        other.take()
    run.publish(weights(3))
    assert {one.loaded[-1].split()[1] for one in stay} == {line(0, 3).split()[1]}
    assert servers[who].loaded == [line(1, 1)]


def test_bytes_that_changed_on_the_way(
    serve: Any, pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    servers = serve(3)
    servers[0].mark("corrupt")
    run = pool(servers, 1, compare=False)
    run.publish(weights(1))
    assert [one.loaded for one in servers] == [[line(1, 1)]] * 3
    assert "bucket 0 has other bytes than were promised" in caplog.text
    # A server that its parent does not reach is not asked of it again.
    assert f"from now on weights go straight to {servers[1].url}" in caplog.text
    run.take_metrics()
    caplog.clear()
    (servers[0].folder / "corrupt").unlink()
    run.publish(weights(2))
    assert [one.loaded[-1] for one in servers] == [line(2, 2)] * 3 and "straight" not in caplog.text
    assert run.take_metrics()["rollout/bytes"] == pytest.approx(2 * SIZE, rel=0.01)


def test_a_name_that_only_the_trainer_knows(
    serve: Any, pool: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    servers, resolve = serve(3), socket.getaddrinfo

    def resolved(host: Any, *more: Any) -> Any:
        return resolve("127.0.0.1" if host in ("known.invalid", b"known.invalid") else host, *more)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(
        Served, "url", property(lambda one: url_of(one).replace("127.0.0.1", "known.invalid"))
    )
    run = pool(servers, 1)
    run.publish(weights(1))
    assert (
        caplog.text.count("bucket 0 was not passed on")
        == caplog.text.count("from now on weights go straight")
        == 2
    )
    caplog.clear()
    run.publish(weights(2))
    assert [one.loaded for one in servers] == [
        [line(1, 1), line(2, 2)]
    ] * 3 and "straight" not in caplog.text


def test_a_url_with_a_password_is_shown_to_no_other_server() -> None:
    for url, takes in (("http://gen1:8000/path", True), ("http://u:secret@gen1:8000", False)):
        with RolloutClient(url) as client:
            assert WeightWriter(client).takes_relays is takes


def test_a_slow_server_holds_up_only_those_below_it(serve: Any, pool: Any) -> None:
    servers = serve(5)  # 2 and 3 are below 0, 4 is below 1
    held = servers[2].mark("hold-buckets")
    run = pool(servers, 2)
    pushing = threading.Thread(target=run.publish, args=(weights(1),))
    pushing.start()
    quick = [one for one in servers if one is not servers[2]]
    until(lambda: all(one.loaded == [line(1, 1)] for one in quick))
    assert servers[2].loaded == [] and pushing.is_alive()
    held.unlink()
    pushing.join(60)
    assert not pushing.is_alive() and servers[2].loaded == [line(1, 1)]


def test_changes_go_down_the_tree(serve: Any, pool: Any) -> None:
    servers = serve(4)
    run = pool(servers, 1, compare=True)
    run.publish(weights(1))
    run.take_metrics()

    def little() -> Iterator[Any]:
        for bucket in weights(1):
            bucket[0][1][5] = 1000.5
            yield bucket

    run.publish(little())
    changed = f"2 {hash_of([to_bytes(bucket) for bucket in little()])}"
    assert [one.loaded[-1] for one in servers] == [changed] * 4
    assert run.take_metrics()["rollout/bytes"] < 500 and all(one.received < 500 for one in servers)
    # One that does not hold what changes any more gets all of it from its parent.
    with pytest.raises(StopAsyncIteration):
        run.sessions[2].writer.push(3, broken_off(), "http")
    run.take_metrics()
    run.publish(weights(1))
    assert {one.loaded[-1].split()[1] for one in servers} == {line(0, 1).split()[1]}
    assert run.take_metrics()["rollout/bytes"] < 500
    assert [one.received > SIZE for one in servers] == [False, False, True, True]


def test_only_the_holder_of_both_leases_has_weights_passed_on(serve: Any) -> None:
    one, other = serve(2)
    with (
        WeightWriter(one.client, "trainer") as holder,
        WeightWriter(other.client, "another") as theirs,
    ):
        holder.take()
        theirs.take()
        for status, token, version, says in (
            (409, holder.token, 1, "version 1 does not arrive here"),
            (409, "0" * 32, 1, "this is not the lease in force"),
            (409, None, 1, "this is not the lease in force"),
        ):
            headers = {} if token is None else {wire.LEASE_HEADER: token}
            ask = wire.RelayRequest(version=version, url=other.url, lease="1" * 32)
            with pytest.raises(ServerRefused, match=says) as refused:
                one.client.call("POST", "/v1/weights/relay", wire.RelayStatus, ask, headers)
            assert refused.value.status == status
        own = Link(one.client, holder.token, children=1)

        def buckets() -> Iterator[Any]:
            for bucket in weights(1):
                yield bucket
                ask = wire.RelayRequest(version=1, url=other.url, lease="1" * 32)
                with pytest.raises(
                    ServerRefused, match=r"bucket 0 was not passed on: .*another holds it"
                ) as refused:
                    one.client.call(
                        "POST", "/v1/weights/relay", wire.RelayStatus, ask, holder.headers
                    )
                assert refused.value.status == 502

        holder.push(1, buckets(), "http", link=own)
    assert one.loaded == [line(1, 1)] and other.loaded == []
