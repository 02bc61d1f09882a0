"""Admission, the idempotency cache and the client's deadlines, without an engine."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import cast

import pytest

from swift_r1.errors import RunFailed, ServerUnreachable
from swift_r1.flags.server import RolloutArguments
from swift_r1.serving.admission import Admission
from swift_r1.serving.engines.vllm_start import engine_environment
from swift_r1.serving.service import IdempotencyCache
from swift_r1.sync.update import UpdateMachine
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import (
    Completion,
    HTTPError,
    RolloutOutput,
    RolloutRequest,
    SamplingParams,
)


def admission_with(update_timeout: float, **machine: object) -> tuple[Admission, SimpleNamespace]:
    state = SimpleNamespace(
        **{"broken": None, "pending_version": None, "owner": None, "holds": bool} | machine
    )
    config = RolloutArguments(update_timeout=update_timeout, client_grace=60)
    return Admission(config, cast(UpdateMachine, state)), state


def test_waits_for_admission_have_a_deadline_and_say_what_for() -> None:
    async def story() -> None:
        admission, machine = admission_with(0.01)
        async with admission.admitted():
            with pytest.raises(HTTPError, match=r"the update waited 0.01 s for 1 running requests"):
                await admission.drained("the update")
        machine.pending_version, machine.owner = 3, "trainer"
        with pytest.raises(
            HTTPError, match=r"waited 0.01 s for the update to weight version 3 by trainer to end"
        ):
            async with admission.admitted():
                raise AssertionError("let in")
        admission, machine = admission_with(60, broken="no whole version")
        with pytest.raises(HTTPError, match="no whole version"):
            async with admission.admitted():
                raise AssertionError("let in")

    asyncio.run(story())


def request(name: str, **changes: object) -> RolloutRequest:
    return RolloutRequest(
        request_id=name, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=4), **changes
    )


def output(name: str, tokens: int = 4) -> RolloutOutput:
    one = Completion(
        token_ids=(1,) * tokens, logprobs=(0.0,) * tokens, finish_reason="length", weight_version=0
    )
    return RolloutOutput(request_id=name, completions=(one,))


def test_the_cache_is_bounded_forgets_failures_and_cancels_what_no_one_waits_for() -> None:
    async def story() -> None:
        cache, calls = IdempotencyCache(max_requests=3, max_tokens=100), []
        cancelled = asyncio.Event()

        async def generate(asked: RolloutRequest) -> RolloutOutput:
            calls.append(asked.request_id)
            if asked.request_id == "fails":
                raise HTTPError(503, "not now")
            if asked.request_id == "slow":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.set()
                    raise
            return output(asked.request_id, 60 if asked.request_id == "long" else 4)

        for name in ("a", "a", "b", "c", "d", "a"):
            await cache.answer(request(name), generate)
        assert calls == ["a", "b", "c", "d", "a"] and len(cache) == 3
        for _ in range(2):
            with pytest.raises(HTTPError, match="not now"):
                await cache.answer(request("fails"), generate)
        assert calls[-2:] == ["fails", "fails"]
        with pytest.raises(HTTPError, match="used before for a different request"):
            await cache.answer(request("a", n=2), generate)
        waiters = [asyncio.create_task(cache.answer(request("slow"), generate)) for _ in range(2)]
        while "slow" not in calls:
            await asyncio.sleep(0)
        waiters[0].cancel()
        await asyncio.sleep(0)
        assert not cancelled.is_set()
        waiters[1].cancel()
        await asyncio.wait_for(cancelled.wait(), 5)
        assert calls.count("slow") == 1
        await cache.answer(request("long"), generate)
        await cache.answer(request("long2"), generate)
        await cache.answer(request("long3"), generate)
        assert len(cache) <= 3

    asyncio.run(story())


def test_a_server_that_is_not_there_is_said_with_a_countdown() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        lines: list[str] = []
        started = time.monotonic()
        with (
            RolloutClient(f"http://127.0.0.1:{port}") as client,
            pytest.raises(ServerUnreachable) as error,
        ):
            client.wait_until_ready(1.0, lines.append)
    assert time.monotonic() - started < 5
    assert f"http://127.0.0.1:{port} was not ready within 1 s" in str(
        error.value
    ) and "\n" not in str(error.value)
    assert lines and "s left" in lines[0]


def test_an_answer_of_another_version_is_one_line() -> None:
    class Newer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"instance": "1", "something": "new"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Newer) as server:
        threading.Thread(target=server.handle_request).start()
        refusal = pytest.raises(RunFailed, match="is it another version of swift-r1")
        with RolloutClient(f"http://127.0.0.1:{server.server_port}") as client, refusal as error:
            client.info()
    assert "\n" not in str(error.value)


def test_a_connection_that_breaks_says_who_waited_for_what() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        with (
            RolloutClient(f"http://127.0.0.1:{probe.getsockname()[1]}") as client,
            pytest.raises(
                ServerUnreachable, match="the trainer waited for the completions of a prompt"
            ),
        ):
            client.generate([request("x")])


def test_the_engines_environment_respects_what_is_set() -> None:
    assert engine_environment({}, has_gpu=False, eager=True)["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in engine_environment({}, has_gpu=False, eager=False)
    assert "TORCH_COMPILE_DISABLE" not in engine_environment(
        {"TORCH_COMPILE_DISABLE": "0"}, has_gpu=False, eager=True
    )
    on_gpu = engine_environment({"VLLM_USE_DEEP_GEMM": "1"}, has_gpu=True, eager=True)
    assert on_gpu["VLLM_USE_FLASHINFER_SAMPLER"] == "0" and "VLLM_USE_DEEP_GEMM" not in on_gpu
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in engine_environment({}, has_gpu=False, eager=True)
