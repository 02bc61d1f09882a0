"""Weight updates over real HTTP into real vLLM: the engine holds exactly what the trainer sent, or says so."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from swift_r1.errors import EXIT_RUN_FAILED, RunFailed, UsageError
from swift_r1.sync.buckets import bucket_digest, content_hash
from swift_r1.wire import protocol as wire
from swift_r1.wire.client import RolloutClient
from tests.conftest import ServerProcess, wait_until_serving
from tests.live_servers import in_buckets, push_weights, to_bytes

SEQUENCES = ((1, 20, 31, 42, 7, 55, 60), (1, 99, 98, 97, 3, 4, 5, 6, 80))
SMALL_BUCKETS = 40_000


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def shake(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Very different weights: each one is replaced by another draw of its own size."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model


@torch.no_grad()
def difference(client: RolloutClient, model: torch.nn.Module) -> float:
    """Largest difference between the server's log-probs and transformers'."""
    worst = 0.0
    for sequence, served in zip(SEQUENCES, client.score(SEQUENCES).logprobs, strict=True):
        ids = torch.tensor([sequence])
        own = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        worst = max(worst, float((own - torch.tensor(served)).abs().max()))
    return worst


def push(client: RolloutClient, model: torch.nn.Module, transport: str = "auto") -> int:
    version = client.info().weight_version + 1
    status = push_weights(
        client, version, in_buckets(model.named_parameters(), SMALL_BUCKETS), transport
    )
    assert (status.weight_version, status.pending_version) == (version, None)
    return version


def test_an_update_brings_exactly_the_trainers_weights(
    client: RolloutClient, tiny_model: Path
) -> None:
    check_updates(client, tiny_model)


def check_updates(client: RolloutClient, folder: Path) -> None:
    model = load(folder)
    push(client, model)
    before = client.score(SEQUENCES)
    assert difference(client, model) < 2e-3
    # Learning rate 0: the same weights again change nothing.
    version = push(client, model)
    same = client.score(SEQUENCES)
    assert same.logprobs == before.logprobs and same.weight_version == version
    # A huge step: everything changes, a stale output head would show.
    for seed, transport in ((1, "http"), (2, "shm")):
        other = shake(load(folder), seed)
        assert difference(client, other) > 0.5
        push(client, other, transport)
        assert difference(client, other) < 2e-3


def test_the_engine_keeps_no_hold_on_the_files_of_a_version(
    client: RolloutClient, tiny_model: Path
) -> None:
    """They are written to again for the next one, while requests may still run on this one."""
    push(client, shake(load(tiny_model), 9))
    mapped, looked_at = [], 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process.pid}/maps").read_text()
            mapped += [process for line in text.splitlines() if "/swift-r1-weights-" in line]
            looked_at += "vllm" in text
    assert looked_at and not mapped


def test_a_cached_prefix_of_old_weights_is_not_used(
    client: RolloutClient, tiny_model: Path
) -> None:
    prompt = tuple(3 + i % 90 for i in range(300))

    def first_token_logprob() -> float:
        asked = wire.RolloutRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt,
            sampling=wire.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        )
        completion = client.generate([asked])[0].completions[0]
        return completion.logprobs[0]

    push(client, shake(load(tiny_model), 3))
    first_token_logprob()
    model = shake(load(tiny_model), 4)
    push(client, model)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).max()
    assert first_token_logprob() == pytest.approx(float(expected), abs=2e-3)


class Writer:
    """Speaks the wire by hand, so that a test can speak it wrongly."""

    def __init__(self, url: str, model: torch.nn.Module) -> None:
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=60)
        self.version = self.http.get("/info").json()["weight_version"] + 1
        self.bodies = [
            to_bytes(bucket) for bucket in in_buckets(model.named_parameters(), SMALL_BUCKETS)
        ]
        lease = self.http.post("/v1/weights/lease", json={"owner": "writer"})
        self.headers = {wire.LEASE_HEADER: lease.json()["token"]}
        begun = self.post("begin", {"version": self.version})
        assert begun.status_code == 200
        self.folder = Path(begun.json()["folder"])

    def post(self, what: str, body: dict[str, object]) -> httpx.Response:
        return self.http.post(f"/v1/weights/{what}", json=body, headers=self.headers)

    def put(self, index: int, body: bytes, **headers: str) -> httpx.Response:
        about = {wire.VERSION_HEADER: str(self.version), wire.BUCKET_HEADER: str(index)}
        return self.http.put(
            "/v1/weights/bucket", content=body, headers=self.headers | about | headers
        )

    def commit(self) -> httpx.Response:
        digests = [bucket_digest(body) for body in self.bodies]
        return self.post(
            "commit",
            {
                "version": self.version,
                "buckets": len(digests),
                "content_hash": content_hash(digests),
            },
        )

    def release(self) -> None:
        self.http.delete("/v1/weights/lease", headers=self.headers)


@pytest.fixture
def writer(client: RolloutClient, server_url: str, tiny_model: Path) -> Iterator[Writer]:
    push(client, load(tiny_model))
    writer = Writer(server_url, shake(load(tiny_model), 5))
    yield writer
    writer.release()
    writer.http.close()


def flipped(body: bytes) -> bytes:
    return body[:-9] + bytes([body[-9] ^ 1]) + body[-8:]


def test_a_changed_or_cut_bucket_is_refused_and_the_version_stays(
    writer: Writer, client: RolloutClient, tiny_model: Path
) -> None:
    body = writer.bodies[0]
    digest = {wire.DIGEST_HEADER: bucket_digest(body)}
    assert "their hash differs" in writer.put(0, flipped(body), **digest).json()["error"]
    assert writer.put(0, body[:-100]).status_code == 422
    assert writer.put(0, b"garbage").status_code == 422
    # Without a digest of its own a flipped bit passes as a bucket, but the commit sees it.
    for index, good in enumerate(writer.bodies):
        assert writer.put(index, flipped(good) if index == 1 else good).status_code == 200
    refused = writer.commit()
    assert refused.status_code == 422 and "content hash" in refused.json()["error"]
    assert client.info().weight_version == writer.version - 1
    client.wait_until_ready(10)
    assert difference(client, load(tiny_model)) < 2e-3


def test_missing_unknown_misshapen_and_tied_weights_are_named(
    writer: Writer, client: RolloutClient
) -> None:
    for name, tensor, sentence in [
        ("model.layers.9.mlp.up_proj.weight", torch.zeros(2, 2), "no such weight"),
        ("model.norm.weight", torch.zeros(63), "has shape [63], the model's is [64]"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.int32), "dtype I32"),
        ("lm_head.weight", torch.zeros(103, 64), "tied to the embedding"),
    ]:
        refused = writer.put(0, save({name: tensor}))  # our own sender refuses such a dtype itself
        assert refused.status_code == 422 and sentence in refused.json()["error"]
    writer.bodies = writer.bodies[:-1]
    for index, body in enumerate(writer.bodies):
        writer.put(index, body)
    refused = writer.commit()
    assert refused.status_code == 422 and "weights were not sent" in refused.json()["error"]
    assert client.info().weight_version == writer.version - 1


def test_a_failed_load_is_not_ready_until_a_full_push(
    writer: Writer, client: RolloutClient, server_url: str, tiny_model: Path
) -> None:
    for index, body in enumerate(writer.bodies):
        assert writer.put(index, body).status_code == 200
    # What cannot be foreseen: a staged file changes under the server, after the first layers are loaded.
    last = sorted(writer.folder.iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-200])
    assert writer.commit().status_code == 500
    writer.release()
    with httpx.Client(base_url=server_url, trust_env=False) as http:
        why = http.get("/ready")
        assert (
            why.status_code == 503 and "a full push of a version repairs it" in why.json()["error"]
        )
        assert http.get("/health").status_code == 200
    with pytest.raises(RunFailed, match="failed while loading"):
        client.score(SEQUENCES)
    assert client.info().weight_version == writer.version - 1
    model = shake(load(tiny_model), 6)
    push(client, model)
    client.wait_until_ready(10)
    assert difference(client, model) < 2e-3


@pytest.mark.long
def test_kept_generations_go_on_over_an_update(
    launch_server: Callable[..., Any], tiny_model: Path
) -> None:
    """`--update_policy keep` with vLLM: running completions end with newer weights, later ones know only the new."""
    server = launch_server(tiny_model, torch_dtype="float32", update_policy="keep")
    model = shake(load(tiny_model), 8)
    long = wire.RolloutRequest(
        request_id="long",
        prompt_token_ids=(1, 2, 3),
        n=64,
        sampling=wire.SamplingParams(max_tokens=900, ignore_eos=True),
    )
    spans: list[list[int]] = []
    with RolloutClient(server.url) as client, RolloutClient(server.url) as trainer:

        def generate() -> None:
            for one in client.generate([long])[0].completions:
                spans.append([version for _, version in one.version_spans])

        thread = threading.Thread(target=generate)
        thread.start()
        with httpx.Client(base_url=server.url, trust_env=False) as http:
            while "swift_running_requests 1.0" not in http.get("/metrics").text:
                assert thread.is_alive()
        push(trainer, model)
        assert not spans
        assert difference(trainer, model) < 2e-3
        thread.join(200)
        assert spans == [[0, 1]] * 64


def test_the_key_guards_all_but_health(start_tiny: Callable[..., Any], tiny_model: Path) -> None:
    server = start_tiny(tiny_model, api_key="secret")
    wait_until_serving(server, "secret")
    check_key(server.url)


def check_key(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as http:
        assert http.get("/info").status_code == 401
        assert http.put("/v1/weights/bucket", content=b"x" * 100).status_code == 401
        assert http.get("/info", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert http.get("/info", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert http.get("/health").status_code == 200
    with (
        RolloutClient(url, api_key="wrong") as client,
        pytest.raises(UsageError, match="--api_key"),
    ):
        client.wait_until_ready(30)


def test_the_process_ends_with_its_engine(
    server_url: str, rollout_servers: dict[str, ServerProcess]
) -> None:
    """Last in this file and its group (`tests/scheduling.py`): the shared server is gone afterwards."""
    server = next(one for one in rollout_servers.values() if one.url == server_url)
    children = psutil.Process(server.process.pid).children(recursive=True)
    os.kill(next(child.pid for child in children if "EngineCore" in child.name()), signal.SIGKILL)
    seen, end = 200, time.monotonic() + 30
    with httpx.Client(base_url=server.url, trust_env=False, timeout=10) as http:
        while seen == 200 and time.monotonic() < end:
            seen = http.get("/health").status_code
    assert seen == 503
    assert server.process.wait(30) == EXIT_RUN_FAILED
    assert "the engine died" in server.log.read_text()
