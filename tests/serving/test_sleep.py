"""An engine that sleeps between rounds: the real server refuses all work meanwhile, and the trainer's parts wake it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from swift_r1.models.expected import expected_weights
from swift_r1.models.loading import load_model
from swift_r1.rollout.base import ignore_output
from swift_r1.rollout.pool.session import Expected
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.base import EngineInfo
from swift_r1.sync.writer import WeightWriter
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutRequest, SamplingParams, ServerRefused, tokenizer_hash
from tests.live_servers import pool_of
from tests.rollout.test_server_pool import learn, requests, until
from tests.serving.test_server_waits import StandingEngine
from tests.tiny_server import TinyEngine

ONE_RANK = Ranks(0, 1, torch.device("cpu"), None)
WAIT_S = 60
ASKING: dict[str, dict[str, Any]] = {
    "/v1/rollouts": {
        "requests": [
            {
                "request_id": "r",
                "prompt_token_ids": [1, 2],
                "sampling": {"max_tokens": 2},
                "seeds": [1],
            }
        ]
    },
    "/v1/score": {"sequences": [[1, 2, 3]]},
    "/v1/completions": {"model": "none", "prompt": [1, 2], "max_tokens": 2},
}


@pytest.fixture
def engine(tiny_model: Path) -> TinyEngine:
    return TinyEngine(str(tiny_model))


@pytest.fixture
def client(
    engine: TinyEngine, serve_engine: Callable[..., str], tiny_model: Path
) -> Iterator[RolloutClient]:
    with RolloutClient(
        serve_engine(engine, expected_weights(str(tiny_model)), update_timeout=WAIT_S)
    ) as client:
        yield client


@pytest.fixture
def writer(client: RolloutClient) -> Iterator[WeightWriter]:
    with WeightWriter(client) as writer:
        yield writer


@pytest.fixture
def backend(tiny_model: Path) -> LocalBackend:
    backend = LocalBackend(
        load_model(tiny_model, "float32", False), OptimizerConfig(1e-3, 0.0, 0.9, 0.99, 1e-8, 1.0)
    )
    learn(backend, 0.3)  # far from what an engine that was started anew holds
    return backend


def weights(backend: LocalBackend) -> list[list[tuple[str, torch.Tensor]]]:
    return [[(name, weight.detach().clone())] for name, weight in backend.model.named_parameters()]


def sampled(client: RolloutClient, run: str) -> list[tuple[tuple[int, ...], int]]:
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    asked = [
        RolloutRequest(
            request_id=f"{run}/{n}",
            prompt_token_ids=(1, 20 + n),
            n=1,
            seeds=(n,),
            sampling=sampling,
        )
        for n in range(3)
    ]
    return [
        (one.token_ids, one.weight_version)
        for output in client.generate(asked)
        for one in output.completions
    ]


def refused(client: RolloutClient, sentence: str) -> None:
    """Whatever is asked is answered at once, in one line."""
    for path, body in ASKING.items():
        answer = httpx.post(client.base_url + path, json=body, trust_env=False, timeout=10)
        error = answer.json()["error"]
        said = error if isinstance(error, str) else error["message"]
        assert answer.status_code == 503 and sentence in said and "\n" not in said, (path, said)
    ready = httpx.get(f"{client.base_url}/ready", trust_env=False)
    assert ready.status_code == 503 and sentence in ready.json()["error"]


@pytest.mark.parametrize("level", [1, 2])
def test_nothing_is_answered_while_it_sleeps(
    client: RolloutClient, writer: WeightWriter, backend: LocalBackend, level: int
) -> None:
    writer.push(1, weights(backend))
    before = sampled(client, "before")
    writer.sleep(level)
    refused(client, f"the engine sleeps (level {level})")
    health = httpx.get(f"{client.base_url}/health", trust_env=False)
    assert (health.status_code, health.json()) == (
        200,
        {"status": "asleep"},
    ) and client.info().asleep == level
    assert (
        f"swift_asleep {level}.0" in httpx.get(f"{client.base_url}/metrics", trust_env=False).text
    )
    writer.sleep(3 - level)
    assert client.info().asleep == level
    for path, body in (("/v1/wake", None), ("/v1/sleep", {"level": 1})):
        answer = httpx.post(
            client.base_url + path, json=body, headers={"X-Swift-Lease": "0" * 32}, trust_env=False
        )
        assert answer.status_code == 409 and "not the lease in force" in answer.json()["error"]
    writer.wake()
    writer.wake()
    assert client.info().asleep == 0
    if level == 2:
        refused(client, "holds no weights")
        assert client.info().broken
        writer.push(2, weights(backend))
    after = sampled(client, "after")
    assert [tokens for tokens, _ in after] == [tokens for tokens, _ in before]
    assert {version for _, version in after} == {level}
    assert (
        httpx.post(f"{client.base_url}/v1/sleep", json={"level": 3}, trust_env=False).status_code
        == 422
    )


@pytest.mark.parametrize("level", [1, 2])
def test_new_weights_come_while_it_sleeps(
    client: RolloutClient,
    writer: WeightWriter,
    backend: LocalBackend,
    engine: TinyEngine,
    level: int,
) -> None:
    """A load wakes the weights and nothing else; one that is not whole leaves all as it was."""
    writer.sleep(level)
    half = weights(backend)[:3]
    with pytest.raises(ServerRefused, match="422"):
        writer.push(1, half)
    refused(client, f"the engine sleeps (level {level})")
    assert bool(client.info().broken) == (level == 2) and engine.asleep == {"weights", "kv_cache"}
    writer.push(1, weights(backend))
    assert engine.asleep == {"kv_cache"} and client.info().broken is None
    refused(client, f"the engine sleeps (level {level})")
    writer.sleep(1)  # for a save, say
    assert engine.asleep == {"weights", "kv_cache"} and client.info().asleep == 1
    writer.wake()
    assert {version for _, version in sampled(client, "new")} == {1}
    own = dict(backend.model.named_parameters())
    assert all(torch.equal(weight, own[name]) for name, weight in engine.model.named_parameters())


class Standing(StandingEngine):
    """Generates until it is told to end, and sleeps then."""

    def __init__(self, can_sleep: bool = True) -> None:
        super().__init__()
        self.info = EngineInfo("standing", "0", 100, "", 100, "float32", can_sleep=can_sleep)
        self.slept: list[int] = []

    async def sleep(self, level: int) -> None:
        self.slept.append(level)

    async def wake(self, weights_only: bool = False) -> None: ...


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Starts it; the result when called."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append(work())
        except ServerRefused as error:
            done.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(WAIT_S)
        return done[0]

    return result


def test_what_runs_ends_first_and_what_comes_is_refused(serve_engine: Callable[..., str]) -> None:
    engine = Standing()
    url = serve_engine(engine, {"w": (2,)}, update_timeout=WAIT_S)
    with RolloutClient(url) as client, WeightWriter(client) as writer:
        running = in_thread(lambda: sampled(client, "running"))
        assert engine.started.wait(WAIT_S)
        falling = in_thread(lambda: writer.sleep(1))
        while httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
            pass
        refused(client, "the engine sleeps (level 1)")
        assert not engine.slept
        engine.may_end.set()
        assert len(running()) == 3 and falling() is None and engine.slept == [1]


def test_it_stays_awake_where_work_does_not_end(serve_engine: Callable[..., str]) -> None:
    engine = Standing()
    with (
        RolloutClient(serve_engine(engine, {"w": (2,)}, update_timeout=0.3)) as client,
        WeightWriter(client) as writer,
    ):
        writer.hold(WAIT_S)
        running = in_thread(lambda: sampled(client, "running"))
        assert engine.started.wait(WAIT_S)
        lease = {"X-Swift-Lease": writer.token}
        refused = httpx.post(
            f"{client.base_url}/v1/sleep", json={"level": 2}, headers=lease, trust_env=False
        )
        assert refused.status_code == 503
        assert re.search(r"the engine's sleep waited 0.3 s for \d running requests", refused.text)
        engine.may_end.set()
        assert len(running()) == 3 and not engine.slept
        assert (
            client.info().asleep == 0
            and client.info().broken is None
            and len(sampled(client, "more")) == 3
        )


def test_who_may_not_sleep(serve_engine: Callable[..., str]) -> None:
    with (
        RolloutClient(serve_engine(Standing(False), {"w": (2,)})) as client,
        WeightWriter(client) as writer,
    ):
        with pytest.raises(ServerRefused, match=r"422.* cannot sleep: vLLM can on a GPU"):
            writer.sleep(1)
        assert client.info().asleep == 0
    adapters = serve_engine(Standing(), {"w": (2,)}, vllm_enable_lora=True)
    with RolloutClient(adapters) as client, WeightWriter(client) as writer:
        with pytest.raises(
            ServerRefused, match="adapters need the weights that sleep level 2 discards"
        ):
            writer.sleep(2)
        writer.sleep(1)
    open_update = Standing()
    with (
        RolloutClient(serve_engine(open_update, {"w": (2,)})) as client,
        WeightWriter(client) as writer,
    ):
        writer.take()
        headers = {"X-Swift-Lease": writer.token}
        assert httpx.post(
            f"{client.base_url}/v1/weights/begin", json={"version": 1}, headers=headers
        ).is_success
        with pytest.raises(ServerRefused, match="the update to weight version 1 is open"):
            writer.sleep(1)


# The trainer's parts


@pytest.fixture
def connect(tiny_model: Path, backend: LocalBackend) -> Iterator[Callable[..., ServerRollouts]]:
    """`connect(urls, check, compare) -> rollouts`; with `compare` only changes are sent."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    open_: list[Any] = []

    def to(urls: Sequence[str], check: int = 0, compare: bool = False) -> ServerRollouts:
        expected = Expected("tiny", tokenizer_hash(tokenizer), len(tokenizer), None)
        clients = [RolloutClient(url) for url in urls]
        open_.extend(clients)
        open_.append(pool_of(clients, expected, 240, "http" if compare else "auto", compare))
        return ServerRollouts(open_[-1], backend, ONE_RANK, check)

    yield to
    for one in reversed(open_):
        one.close()


def versions(rollouts: ServerRollouts) -> set[int]:
    outputs = rollouts.generate(requests(4, 8), lambda _: None, ignore_output)
    assert outputs is not None
    return {one.weight_version for output in outputs for one in output.completions}


@pytest.mark.parametrize("level", [1, 2])
def test_no_change_is_sent_to_discarded_weights(
    client: RolloutClient, connect: Callable[..., ServerRollouts], backend: LocalBackend, level: int
) -> None:
    rollouts = connect([client.base_url], check=1, compare=True)
    rollouts.before_scoring = rollouts.wake
    whole = sum(weight.nbytes for weight in backend.model.parameters())
    sent = []
    for _ in range(3):
        with torch.no_grad():
            backend.model.model.norm.weight[3] += 0.25
        rollouts.publish_weights()
        metrics = rollouts.take_metrics()
        assert metrics["rollout/weight_check"] < 1e-4
        sent.append(metrics["rollout/bytes"])
        rollouts.sleep(level)
    assert sent[0] > whole
    assert (
        all(size < whole / 50 for size in sent[2:])
        if level == 1
        else all(size > whole for size in sent)
    )


@pytest.mark.parametrize(
    ("level", "published"), [(2, True), pytest.param(1, False, marks=pytest.mark.long)]
)
def test_one_that_dies_asleep_is_brought_back(
    tiny_server: Any, connect: Callable[..., ServerRollouts], level: int, published: bool
) -> None:
    """With weights that are published next, or without: then it is asked with those of before."""
    rollouts = connect([tiny_server.url])
    rollouts.publish_weights()
    rollouts.sleep(level)
    tiny_server.kill()
    tiny_server.start()
    if published:
        rollouts.publish_weights()
    rollouts.wake()
    assert versions(rollouts) == {rollouts.weight_version}
    pool = rollouts.pool
    assert pool is not None
    until(lambda: len(pool.health.ready) == 1)
    assert {one.client.info().weight_version for one in pool.sessions} == {rollouts.weight_version}


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_vllm_sleeps(
    launch_server: Callable[..., Any], tiny_model: Path, backend: LocalBackend, level: int
) -> None:
    """With real vLLM on a GPU: its memory is free meanwhile, and log-probs are those of what was pushed."""
    server = launch_server(
        tiny_model,
        torch_dtype="float32",
        vllm_engine_kwargs={"enable_sleep_mode": True},
        vllm_gpu_memory_utilization=0.3,
    )
    sequence = list(range(5, 45))
    ids = torch.tensor([sequence])
    with RolloutClient(server.url) as client, WeightWriter(client) as writer:
        for version in (1, 2):
            learn(backend, 0.1)
            writer.push(version, weights(backend))
            writer.wake()
            with torch.no_grad():
                own = (
                    backend.model(ids)
                    .logits[0, :-1]
                    .log_softmax(-1)
                    .gather(-1, ids[0, 1:, None])
                    .squeeze(-1)
                )
            served = torch.tensor(client.score([sequence]).logprobs[0])
            torch.testing.assert_close(served, own, rtol=0, atol=2e-3)
            assert len(sampled(client, f"run {version}")) == 3
            awake = torch.cuda.mem_get_info()[0]
            writer.sleep(level)
            asleep, total = torch.cuda.mem_get_info()
            assert asleep - awake > 0.2 * total
            refused(client, f"the engine sleeps (level {level})")
