"""Several servers as one: real kills of one and of all, updates to each, and what keeps them from being a pool."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_r1.cli.rlhf import wait_for_servers
from swift_r1.errors import RunFailed, ServerUnreachable, UsageError
from swift_r1.models.expected import expected_weights
from swift_r1.rollout.base import ignore_output
from swift_r1.rollout.pool.health import ServerState
from swift_r1.rollout.pool.pool import ServerPool
from swift_r1.rollout.pool.session import Expected, why_not_alike
from swift_r1.rollout.remote import TOLERANCE, ServerRollouts
from swift_r1.runtime.ranks import Ranks
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutRequest, SamplingParams, ServerRefused, tokenizer_hash
from tests.conftest import until
from tests.live_servers import OneWeightABucket, learn, pool_of, push_weights
from tests.tiny_server import TinyEngine

BACK_WITHIN_S = 240
ONE_RANK = Ranks(0, 1, torch.device("cpu"), None)


@pytest.fixture
def connect(tiny_model: Path, backend: OneWeightABucket) -> Iterator[Callable[..., ServerRollouts]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    open_: list[Any] = []

    def to(
        urls: Sequence[str],
        timeout_s: float = BACK_WITHIN_S,
        silence_s: float = 60.0,
        check: int = 0,
        **options: Any,
    ) -> ServerRollouts:
        clients = [RolloutClient(url, silence_s=silence_s) for url in urls]
        open_.extend(clients)
        for client in clients:
            client.wait_until_ready(BACK_WITHIN_S)
        expected = Expected("tiny", tokenizer_hash(tokenizer), len(tokenizer), None)
        open_.append(pool_of(clients, expected, timeout_s, **options))
        return ServerRollouts(open_[-1], backend, ONE_RANK, check)

    yield to
    for one in reversed(open_):
        one.close()


@pytest.fixture
def two(tiny_server: Any, second_tiny_server: Any) -> list[Any]:
    return [tiny_server, second_tiny_server]


def requests(count: int = 12, tokens: int = 12) -> list[RolloutRequest]:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    run = uuid.uuid4().hex  # a server outlives a test, and remembers
    return [
        RolloutRequest(
            request_id=f"{run}/{number}",
            prompt_token_ids=(1, 20 + number, 31),
            n=2,
            seeds=(2 * number, 2 * number + 1),
            sampling=sampling,
        )
        for number in range(count)
    ]


def generated(
    rollouts: ServerRollouts, at_first: Callable[[], None] = lambda: None, tokens: int = 12
) -> list[Any]:
    """Tokens and version of every completion; each request must be answered once, in order."""
    told: list[int] = []

    def on_done(count: int) -> None:
        told.append(count)
        if len(told) == 1:
            at_first()

    asked = requests(tokens=tokens)
    outputs = rollouts.generate(asked, on_done, ignore_output)
    assert outputs is not None and [output.request_id for output in outputs] == [
        one.request_id for one in asked
    ]
    assert told == [2] * len(asked)
    return [(c.token_ids, c.weight_version) for output in outputs for c in output.completions]


def of(rollouts: ServerRollouts) -> ServerPool:
    assert rollouts.pool is not None
    return rollouts.pool


def test_one_is_killed_the_other_does_its_work_and_it_comes_back(
    connect: Any, two: list[Any], backend: OneWeightABucket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="swift_r1")
    rollouts = connect([one.url for one in two])
    rollouts.publish_weights()
    undisturbed = generated(rollouts)
    assert rollouts.take_metrics()["rollout/servers"] == 2
    # While it generates.
    assert generated(rollouts, at_first=two[1].kill) == undisturbed
    assert rollouts.take_metrics()["rollout/servers"] == 1
    assert f"server at {two[1].url} is lost: its work goes to the other one" in caplog.text
    # A new version while it is away; brought to it when it is back, without a push of the trainer's.
    learn(backend, 0.3)
    rollouts.publish_weights()
    version, alone = rollouts.weight_version, generated(rollouts)
    assert [number for _, number in alone] == [version] * len(alone) != undisturbed
    two[1].start()
    until(lambda: rollouts.take_metrics()["rollout/servers"] == 2, BACK_WITHIN_S)
    assert f"{two[1].url} is back with weight version {version}: 2 of 2 servers" in caplog.text
    # It alone: the same weights, the same seeds, the same completions.
    two[0].kill()
    assert generated(rollouts) == alone
    assert rollouts.take_metrics()["rollout/servers"] == 1
    two[0].start()
    until(lambda: rollouts.take_metrics()["rollout/servers"] == 2, BACK_WITHIN_S)


def test_killed_in_an_update_and_in_an_idle_moment(
    connect: Any, two: list[Any], backend: OneWeightABucket
) -> None:
    rollouts = connect([one.url for one in two])
    rollouts.publish_weights()
    before = [tokens for tokens, _ in generated(rollouts)]
    backend.at_bucket = lambda number: two[0].kill() if number == 3 else None
    rollouts.publish_weights()
    backend.at_bucket = lambda _number: None
    version = rollouts.weight_version
    assert generated(rollouts) == [(tokens, version) for tokens in before]
    two[0].start()
    until(lambda: len(of(rollouts).health.ready) == 2, BACK_WITHIN_S)
    # Killed and back with nobody looking: no connection breaks, only the version of its answers tells.
    two[1].kill()
    two[1].start()
    two[1].wait()
    assert generated(rollouts) == [(tokens, version) for tokens in before]
    assert rollouts.take_metrics()["rollout/refused"] >= 1
    until(lambda: len(of(rollouts).health.ready) == 2, BACK_WITHIN_S)


def test_one_server_by_two_names_is_refused(tiny_server: Any) -> None:
    urls = [tiny_server.url, tiny_server.url.replace("127.0.0.1", "localhost")]
    args = SimpleNamespace(
        rollout_base_urls=urls, vllm_server_file=None, vllm_server_timeout=60, api_key=None
    )
    with pytest.raises(UsageError, match="are the same rollout server"):
        wait_for_servers(args, None)


def test_all_are_dead_and_one_is_dead_for_longer_than_the_deadline(
    connect: Any, two: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    rollouts = connect([one.url for one in two], timeout_s=1.0)
    rollouts.publish_weights()
    two[0].kill()
    assert len(generated(rollouts, tokens=8)) == 24
    until(lambda: "continuing with 1 of 2 servers" in caplog.text, BACK_WITHIN_S)
    assert len(generated(rollouts, tokens=8)) == 24
    two[1].kill()
    with pytest.raises(
        ServerUnreachable, match=r"no rollout server came back within 1 s \(http.*http.*\)"
    ):
        rollouts.generate(requests(), lambda _count: None, ignore_output)
    with pytest.raises(ServerUnreachable, match="came back within 1 s"):
        rollouts.publish_weights()


def test_work_goes_to_the_least_loaded(
    connect: Any, tiny_model: Path, serve_engine: Callable[..., str]
) -> None:
    engines = [TinyEngine(str(tiny_model)) for _ in range(2)]
    asked = [0, 0]
    for number, engine in enumerate(engines):

        def counting(
            prompt: Any, sampling: Any, seed: Any, number: int = number, real: Any = engine.generate
        ) -> Any:
            asked[number] += 1
            return real(prompt, sampling, seed)

        engine.generate = counting
    expected = expected_weights(str(tiny_model))
    rollouts = connect([serve_engine(engine, expected) for engine in engines])
    rollouts.publish_weights()
    generated(rollouts, tokens=2)
    assert asked == [12, 12]


def test_each_servers_use_of_the_weights_is_checked(
    connect: Any,
    tiny_model: Path,
    serve_engine: Callable[..., str],
    backend: OneWeightABucket,
) -> None:
    engines = [TinyEngine(str(tiny_model)) for _ in range(2)]
    expected = expected_weights(str(tiny_model))
    rollouts = connect([serve_engine(engine, expected) for engine in engines], check=2)
    rollouts.publish_weights()
    assert rollouts.take_metrics()["rollout/weight_check"] < TOLERANCE
    real, forgets = engines[1].load_weights, [1]

    async def forgetful(files: Sequence[Path], version: int) -> None:
        kept = engines[1].model.model.norm.weight.clone()
        await real(files, version)
        if forgets[0]:
            forgets[0] -= 1
            engines[1].model.model.norm.weight.copy_(kept)

    engines[1].load_weights = forgetful
    with torch.no_grad():
        backend.model.model.norm.weight.mul_(2)
    rollouts.publish_weights()
    assert rollouts.take_metrics()["rollout/weight_check"] > 10 * TOLERANCE
    for engine in engines:  # repaired by one push to all
        torch.testing.assert_close(
            engine.model.model.norm.weight, backend.model.model.norm.weight.detach()
        )
    forgets[0] = 9
    with torch.no_grad():
        backend.model.model.norm.weight.mul_(2)
    rollouts.publish_weights()
    with pytest.raises(RunFailed, match="does not use the weights that it was sent"):
        rollouts.publish_weights()


def test_only_changes_are_sent_and_a_server_that_was_away_gets_all(
    connect: Any,
    tiny_model: Path,
    serve_engine: Callable[..., str],
    backend: OneWeightABucket,
) -> None:
    class Remembering(TinyEngine):
        async def load_weights(self, files: Sequence[Path], version: int) -> None:
            self.files = files
            await super().load_weights(files, version)

    engines = [Remembering(str(tiny_model)) for _ in range(2)]
    expected = expected_weights(str(tiny_model))
    urls = [serve_engine(engine, expected) for engine in engines]
    rollouts = connect(urls, transport="http", compare=True)
    rollouts.publish_weights()
    whole = rollouts.take_metrics()["rollout/bytes"]
    size = sum(weight.nbytes for weight in backend.model.parameters())
    assert whole > 2 * size

    def change_one() -> None:
        with torch.no_grad():
            backend.model.model.norm.weight[3] += 0.25

    def all_have_it() -> bool:
        own = dict(backend.model.named_parameters())
        return all(
            torch.equal(w, own[name])
            for engine in engines
            for name, w in engine.model.named_parameters()
        )

    change_one()
    rollouts.publish_weights()
    metrics = rollouts.take_metrics()
    assert (
        metrics["rollout/bytes"] < whole / 50
        and 0 < metrics["rollout/changed_weights"] < 1e-4
        and all_have_it()
    )
    # Another writer's version in between: the server does not hold ours any more, and gets all.
    sessions = of(rollouts).sessions
    other = [[(name, weight * 2)] for name, weight in backend.model.named_parameters()]
    writer = sessions[1].writer
    writer.push(
        rollouts.weight_version + 1,
        [[(n, w.detach()) for n, w in bucket] for bucket in other],
        "http",
    )
    rollouts.take_metrics()
    change_one()
    rollouts.served.pushing(rollouts.weight_version + 1)
    rollouts.publish_weights()
    sent = rollouts.take_metrics()["rollout/bytes"]
    assert size < sent < 1.1 * size + whole / 50 and all_have_it()
    # What one holds was changed behind its back: the hash of the outcome tells, and all is sent again.
    first = engines[0].files[0].parent / "incoming-000000"
    with first.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x01\x02")
    change_one()
    rollouts.publish_weights()
    assert all_have_it() and len(of(rollouts).health.ready) == 2
    assert size < rollouts.take_metrics()["rollout/bytes"] < 1.1 * size + whole / 50


def info(url: str, **other: Any) -> tuple[str, Any]:
    from swift_r1.wire.protocol import ServerInfo

    values: dict[str, Any] = {
        "instance": url,
        "model": "m",
        "engine": "vllm",
        "engine_version": "1",
        "vocab_size": 10,
        "tokenizer_hash": "a",
        "weight_version": 0,
        "broken": None,
        "max_model_len": 100,
        "max_n": 4,
        "dtype": "float32",
        "max_lora_rank": None,
        "own_base": True,
        "nccl_workers": 0,
    }
    return url, ServerInfo(**values | other)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"weight_version": 7}, None),
        ({"model": "k"}, "http://a has model m, that at http://b k: start them alike"),
        ({"tokenizer_hash": "b"}, "http://a and http://b have different tokenizers"),
        ({"dtype": "bfloat16"}, "http://a has dtype float32, that at http://b bfloat16"),
        ({"max_model_len": 50}, "has max_model_len 100, that at http://b 50"),
        ({"max_lora_rank": 8}, "has max_lora_rank None, that at http://b 8"),
        (
            {"instance": "http://a"},
            "http://a and http://b are the same rollout server: name each once",
        ),
    ],
)
def test_servers_that_are_not_alike(other: dict[str, Any], says: str | None) -> None:
    why = why_not_alike([info("http://a"), info("http://b", **other)])
    assert why is None if says is None else (why is not None and says in why)


def test_a_server_that_dies_of_every_request_is_given_up(
    connect: Any,
    tiny_model: Path,
    serve_engine: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It refuses for now, again and again; the other goes on alone."""
    from swift_r1.wire.protocol import HTTPError

    engines = [TinyEngine(str(tiny_model)) for _ in range(2)]

    async def refuses(*_args: Any) -> Any:
        raise HTTPError(503, "not now", 1)

    engines[0].generate = refuses
    expected = expected_weights(str(tiny_model))
    rollouts = connect([serve_engine(engine, expected) for engine in engines])
    rollouts.publish_weights()

    def states() -> list[ServerState]:
        return [of(rollouts).health.state(one) for one in of(rollouts).sessions]

    until(
        lambda: bool(generated(rollouts, tokens=1)) and states()[0] is ServerState.GIVEN_UP,
        BACK_WITHIN_S,
    )
    assert "is given up: " in caplog.text and states()[1] is ServerState.READY


def test_a_server_whose_numbers_depend_on_its_batch_is_refused() -> None:
    """Where `--batch_invariant` asks for one whose do not."""
    _, plain = info("http://a")
    _, invariant = info("http://a", batch_invariant=True)
    wanted = Expected(
        plain.model, plain.tokenizer_hash, plain.vocab_size, None, batch_invariant=True
    )
    assert "does not compute so" in str(wanted.fault(plain)) and wanted.fault(invariant) is None


def test_another_trainers_update_is_no_loss(
    connect: Any, tiny_server: Any, backend: OneWeightABucket
) -> None:
    rollouts = connect([tiny_server.url])
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
        rollouts.generate(requests(), lambda _count: None, ignore_output)
    assert rollouts.take_metrics()["rollout/refused"] == 1
    with pytest.raises(
        RunFailed, match=f"version {ours + 1} is not after the served version {ours + 7}"
    ):
        rollouts.publish_weights()


@pytest.mark.long
def test_a_server_that_stays_away_or_is_another_one(
    connect: Any, tiny_server: Any, tiny_model: Path, tmp_path: Path
) -> None:
    rollouts = connect([tiny_server.url], timeout_s=1.0)
    rollouts.publish_weights()
    tiny_server.kill()
    with pytest.raises(ServerUnreachable, match=r"was not ready within 1 s: no answer"):
        rollouts.generate(requests(), lambda _count: None, ignore_output)
    other = shutil.copytree(tiny_model, tmp_path / "another-model")
    tiny_server.start(other)
    tiny_server.wait()
    end, why = time.monotonic() + 60, "no answer"
    while "no answer" in why:  # what the last wait, of a second, has found
        assert time.monotonic() < end
        with pytest.raises(ServerUnreachable) as raised:
            rollouts.generate(requests(), lambda _count: None, ignore_output)
        why = str(raised.value)
    assert re.search("it serves .*another-model now, and served .* before", why)
    tiny_server.kill()
