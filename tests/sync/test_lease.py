"""One writer: who holds the lease on a server's weights, for how long, and who gets it next."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_r1.errors import ServerUnreachable, UsageError
from swift_r1.serving.engines.base import EngineInfo
from swift_r1.sync import writer as writer_module
from swift_r1.sync.writer import WeightWriter, save_token, saved_token
from swift_r1.wire import client as client_module
from swift_r1.wire import protocol as wire
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import ServerRefused
from tests import forks
from tests.conftest import until

WAIT_S = 60


class NoEngine:
    """Takes weights and forgets them."""

    dead = False
    scores_alone = False
    info = EngineInfo("none", "0", 100, "hash", 64, "float32")

    async def load_weights(self, files: Any, version: int) -> None: ...

    def shutdown(self) -> None: ...


@pytest.fixture
def client(serve_engine: Callable[..., str]) -> Iterator[RolloutClient]:
    with RolloutClient(serve_engine(NoEngine(), {"w": (2,)})) as client:
        yield client


def refusal_of(writer: WeightWriter) -> ServerRefused | None:
    try:
        writer.take()
    except ServerRefused as refused:
        return refused
    return None


def test_a_second_trainer_is_told_who_writes_also_between_pushes(client: RolloutClient) -> None:
    with WeightWriter(client, "first", ttl_s=2) as first:
        first.hold(WAIT_S)
        with (
            WeightWriter(client, "second") as second,
            pytest.raises(
                UsageError, match=r"first writes this server's weights .* stop that trainer"
            ) as error,
        ):
            second.hold(WAIT_S)
        assert "409" in str(error.value)
    with WeightWriter(client, "third") as third:
        third.hold(0)


def test_a_dead_trainers_lease_ends_and_the_next_takes_over(client: RolloutClient) -> None:
    lines: list[str] = []
    dead = WeightWriter(client, "dead", ttl_s=1.5)
    dead.take()
    with WeightWriter(client, "next") as successor:
        successor.hold(WAIT_S, lines.append)
        assert "dead writes this server's weights" in lines[0]
        refused = refusal_of(dead)
        assert refused is not None and refused.status == 409 and "next writes" in str(refused)


def test_a_resumed_run_takes_its_own_lease_back(client: RolloutClient, tmp_path: Path) -> None:
    killed = WeightWriter(client, "killed", ttl_s=3000)
    save_token(tmp_path, killed.token)
    assert (tmp_path / ".lease").stat().st_mode & 0o077 == 0
    killed.take()
    with WeightWriter(client, "resumed", token=saved_token(tmp_path)) as resumed:
        resumed.hold(0)
        other = refusal_of(WeightWriter(client, "other"))
        assert other is not None and "resumed writes" in str(other)
    (tmp_path / ".lease").write_text("../../etc")
    assert saved_token(tmp_path) is None and saved_token(None) is None


def test_a_silent_server_holds_nobody_for_longer_than_it_may(
    tiny_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, it keeps its connections: only the deadlines of each call end the waiting."""
    monkeypatch.setattr(writer_module, "QUICK_S", 0.5)
    monkeypatch.setattr(client_module, "QUICK_S", 0.5)
    lines: list[str] = []
    with RolloutClient(tiny_server.url) as client:
        client.wait_until_ready(WAIT_S)
        writer = WeightWriter(client, "writer", ttl_s=2)
        writer.hold(WAIT_S)
        os.kill(tiny_server.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(ServerUnreachable, match="was not ready within 2 s"):
                client.wait(2, client.info, lines.append)
            with pytest.raises(ServerUnreachable):
                WeightWriter(client, "another").hold(2, lines.append)
            writer.close()
            assert time.monotonic() - started < WAIT_S / 2
        finally:
            os.kill(tiny_server.pid, signal.SIGCONT)
    assert "is gone" in lines[0] and "waiting for a lease" in lines[-1]


def test_a_lease_is_renewed_on_a_server_that_was_started_anew(tiny_server: Any) -> None:
    """Also while nothing is pushed: else another trainer could come between."""
    with RolloutClient(tiny_server.url) as client, WeightWriter(client, "first", ttl_s=2) as first:
        client.wait_until_ready(WAIT_S)
        first.hold(WAIT_S)
        tiny_server.kill()
        tiny_server.start()
        client.wait_until_ready(WAIT_S)

        def refusal_of_another() -> str:
            """Its own lease is over before it asks again."""
            try:
                ask = wire.LeaseRequest(owner="other", ttl_seconds=0.001)
                client.call("POST", "/v1/weights/lease", wire.Lease, ask)
            except ServerRefused as refused:
                return str(refused)
            return ""

        assert "first writes" in until(refusal_of_another)


def test_swift_rlhf_stops_before_it_loads_a_model(
    tiny_server: Any, tiny_model: Path, tmp_path: Path
) -> None:
    plugin = Path(__file__).parents[1] / "e2e" / "digits_plugin.py"
    words = [
        *(
            "--model",
            str(tiny_model),
            "--external_plugins",
            str(plugin),
            "--dataset",
            "counting#50",
        ),
        *(
            "--reward_funcs",
            "digits",
            "--use_vllm",
            "true",
            "--vllm_server_base_url",
            tiny_server.url,
        ),
        *(
            "--num_generations",
            "4",
            "--per_device_train_batch_size",
            "4",
            "--output_dir",
            str(tmp_path / "out"),
        ),
    ]
    with (
        RolloutClient(tiny_server.url) as client,
        WeightWriter(client, "somebody", ttl_s=3) as somebody,
    ):
        client.wait_until_ready(WAIT_S)
        somebody.hold(WAIT_S)
        ended = forks.run(["-m", "swift_r1", "rlhf", "--rlhf_type", "grpo", *words], timeout=WAIT_S)
    assert ended.returncode == 2
    assert "somebody writes this server's weights" in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
