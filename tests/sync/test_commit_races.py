"""Commits that wait, and what must not come between: a successor, requests that wait, the update's own deadline."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
import torch

from swift_r1.flags.server import RolloutArguments
from swift_r1.serving.admission import Admission
from swift_r1.sync.buckets import bucket_digest, content_hash
from swift_r1.sync.update import UpdateMachine
from swift_r1.sync.writer import WeightWriter
from swift_r1.wire import protocol as wire
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import HTTPError, RolloutRequest, SamplingParams
from tests.live_servers import to_bytes
from tests.serving.test_server_waits import StandingEngine

WAIT_S = 20
OLD, NEW = [("w", torch.ones(2))], [("w", torch.zeros(2))]


@pytest.fixture
def engine() -> Iterator[StandingEngine]:
    engine = StandingEngine()
    yield engine
    engine.may_end.set()


def request(name: str) -> RolloutRequest:
    return RolloutRequest(
        request_id=name, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1)
    )


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_dead_trainers_commit_leaves_its_successors_update_alone(
    engine: StandingEngine, serve_engine: Callable[..., str]
) -> None:
    """Both have the run's token and want the same version; the first one's commit still waits for a generation."""
    url = serve_engine(engine, {"w": (2,)}, update_timeout=WAIT_S)
    with RolloutClient(url) as client, RolloutClient(url) as asker:
        dead = WeightWriter(client, "dead")
        running = in_thread(lambda: asker.generate([request("r")]))
        assert engine.started.wait(WAIT_S)
        dead.take()
        headers = {wire.LEASE_HEADER: dead.token}
        client.call(
            "POST", "/v1/weights/begin", wire.UpdateStatus, wire.UpdateBegin(version=1), headers
        )
        body = to_bytes(OLD)
        about = {wire.VERSION_HEADER: "1", wire.BUCKET_HEADER: "0"}
        with httpx.Client(base_url=url, trust_env=False, headers=headers) as http:
            digest = bucket_digest(body)
            assert http.put("/v1/weights/bucket", content=body, headers=about).status_code == 200
            commit = wire.UpdateCommit(
                version=1, buckets=1, content_hash=content_hash([digest])
            ).model_dump()
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/weights/commit", json=commit, timeout=0.5)

        def bucket_that_takes_its_time() -> Iterator[list[tuple[str, torch.Tensor]]]:
            yield NEW
            engine.may_end.set()
            running.join(WAIT_S)  # the dead one's commit goes on now

        with WeightWriter(asker, "resumed", token=dead.token) as resumed:
            assert resumed.push(1, bucket_that_takes_its_time(), "http").weight_version == 1
        assert engine.loaded == [to_bytes(NEW)]


def test_nothing_comes_in_between_a_load_that_failed_and_the_word_of_it() -> None:
    async def admitted() -> int:
        machine = SimpleNamespace(pending_version=1, broken=None, owner="me")
        admission = Admission(RolloutArguments(update_timeout=WAIT_S), cast(UpdateMachine, machine))
        inside = 0

        async def ask() -> None:
            nonlocal inside
            with contextlib.suppress(HTTPError):
                async with admission.admitted():
                    inside += 1

        asked = [asyncio.create_task(ask()) for _ in range(5)]
        for _ in range(100):
            await asyncio.sleep(0)
        machine.pending_version, machine.broken = None, "half of it is loaded"
        asked.append(asyncio.create_task(ask()))
        admission.notify()
        asked += [asyncio.create_task(ask()) for _ in range(3)]
        await asyncio.gather(*asked)
        return inside

    assert asyncio.run(admitted()) == 0
