"""LoRA adapters alone, from a trainer to the server: names, shapes, refusals, and what the engine then says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_r1.errors import RunFailed
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.models.expected import (
    adapter_in_checkpoint,
    adapter_shapes,
    expected_weights,
    write_adapter,
)
from swift_r1.models.loading import load_model
from swift_r1.models.lora import adapter_config
from swift_r1.models.weights import adapter_weights
from swift_r1.rollout.pool.session import Expected
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.base import EngineInfo
from swift_r1.sync.writer import WeightWriter
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import AdapterConfig, ServerRefused, tokenizer_hash
from tests.families import save_family
from tests.live_servers import pool_of

SETTINGS = AdapterArguments(
    train_type="lora", lora_rank=4, lora_alpha=8, target_modules=["all-linear"], use_rslora=True
)
ONE_RANK = Ranks(0, 1, torch.device("cpu"), None)
SEQUENCE = tuple(range(5, 45))


class PeftEngine:
    """The served model in this process; adapters are loaded by peft, from the folder that vLLM would read."""

    dead = False
    scores_alone = True

    def __init__(self, folder: Path, room: Path) -> None:
        from transformers import AutoTokenizer

        self.base, self.room = load_model(folder, "float32", False), room
        self.model: Any = self.base
        size = self.base.config.vocab_size
        self.info = EngineInfo(
            "peft",
            "0",
            size,
            tokenizer_hash(AutoTokenizer.from_pretrained(folder)),
            1024,
            "float32",
        )

    async def load_adapter(
        self, files: Sequence[Path], config: AdapterConfig, version: int
    ) -> None:
        from peft import PeftModel

        folder = self.room / str(len(list(self.room.iterdir())))
        write_adapter(folder, files, config)
        if isinstance(self.model, PeftModel):
            self.base = self.model.unload()
        self.model = PeftModel.from_pretrained(self.base, folder)

    async def load_weights(self, files: Sequence[Path], version: int) -> None: ...

    @torch.no_grad()
    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        return tuple(logprobs_of(self.model, sequence).tolist())

    async def set_score_temperature(self, temperature: float) -> None: ...

    def shutdown(self) -> None: ...


def logprobs_of(model: torch.nn.Module, sequence: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([list(sequence)])
    with torch.no_grad():
        return model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> PeftEngine:
    room = tmp_path / "adapters"
    room.mkdir()
    return PeftEngine(tiny_model, room)


@pytest.fixture
def url(engine: PeftEngine, tiny_model: Path, serve_engine: Callable[..., str]) -> str:
    return serve_engine(
        engine, expected_weights(str(tiny_model)), vllm_enable_lora=True, vllm_max_lora_rank=8
    )


@pytest.fixture
def policy(tiny_model: Path) -> torch.nn.Module:
    model = load_model(tiny_model, "float32", False, SETTINGS)
    learn(model, 1)
    return model


def learn(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))


@pytest.fixture
def rollouts(
    url: str, engine: PeftEngine, tiny_model: Path, policy: torch.nn.Module
) -> Iterator[ServerRollouts]:
    backend = LocalBackend(policy, OptimizerConfig(0.1, 0.0, 0.9, 0.99, 1e-8, 1.0))
    with RolloutClient(url) as client:
        expected = Expected(
            str(tiny_model), engine.info.tokenizer_hash, engine.info.vocab_size, None
        )
        pool = pool_of([client], expected, 60)
        assert pool.first.max_lora_rank == 8
        yield ServerRollouts(pool, backend, ONE_RANK, adapter=adapter_config(policy, SETTINGS))
        pool.close()


def test_the_engine_uses_the_adapter_of_each_version(
    rollouts: ServerRollouts, policy: Any, url: str
) -> None:
    base = None
    with RolloutClient(url) as client:
        for version in (1, 2):
            learn(policy, version)
            rollouts.publish_weights()
            scored = client.score([SEQUENCE])
            assert scored.weight_version == version
            own = logprobs_of(policy, SEQUENCE)
            torch.testing.assert_close(torch.tensor(scored.logprobs[0]), own, rtol=0, atol=1e-4)
            assert base is None or (own - base).abs().max() > 0.1
            base = own
    # Without --weight_check_steps too, the first adapter is checked: nothing else tells about the base.
    assert rollouts.take_metrics()["rollout/weight_check"] < 1e-4


def test_another_base_under_the_adapter_is_noticed(
    rollouts: ServerRollouts, engine: PeftEngine
) -> None:
    with torch.no_grad():
        engine.base.model.norm.weight.mul_(3.0)
    with pytest.raises(
        RunFailed, match=r"or its base weights \(its --model\) are not those of --model"
    ):
        rollouts.publish_weights()


@pytest.mark.parametrize("regex", [None, r".*layers\.1.*q_proj"])
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_an_adapter_goes_by_the_names_of_the_checkpoint(
    tmp_path: Path, family: str, regex: str | None
) -> None:
    """Which are not those that transformers has in memory."""
    folder, settings = save_family(tmp_path, family), replace(SETTINGS, target_regex=regex)
    policy = load_model(folder, "float32", False, settings)
    weights = {weight.name: weight.value() for weight in adapter_weights(policy)}
    sent = {
        name: tuple(tensor.shape) for name, tensor in adapter_in_checkpoint(policy, weights).items()
    }
    assert sent == adapter_shapes(expected_weights(str(folder)), adapter_config(policy, settings))
    assert len(sent) == (2 if regex else 28) and sent.keys().isdisjoint(weights)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rank": 16}, "rank 16, more than --vllm_max_lora_rank 8"),
        ({"target_modules": ("q_proj", "nowhere")}, "no linear module nowhere"),
        ({"target_modules": ("q_proj",)}, "unexpected weight"),
        ({"rank": 2}, "has shape"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    url: str, policy: torch.nn.Module, change: dict[str, Any], sentence: str
) -> None:
    config = adapter_config(policy, SETTINGS).model_copy(update=change)
    bucket = [(weight.name, weight.value()) for weight in adapter_weights(policy)]
    with RolloutClient(url) as client, WeightWriter(client) as writer:
        with pytest.raises(ServerRefused, match=sentence):
            writer.push(1, [bucket], adapter=config)
        assert client.info().weight_version == 0


def test_a_server_without_adapters_says_so(
    engine: PeftEngine, tiny_model: Path, serve_engine: Callable[..., str], policy: torch.nn.Module
) -> None:
    url = serve_engine(engine, expected_weights(str(tiny_model)))
    with RolloutClient(url) as client, WeightWriter(client) as writer:
        assert client.info().max_lora_rank is None
        with pytest.raises(ServerRefused, match="--vllm_enable_lora true"):
            writer.push(1, [], adapter=adapter_config(policy, SETTINGS))


def test_a_server_says_whether_an_adapter_would_be_on_its_own_base(
    url: str, policy: torch.nn.Module, tiny_model: Path
) -> None:
    adapter = [(weight.name, weight.value()) for weight in adapter_weights(policy)]
    whole = list(load_model(tiny_model, "float32", False).named_parameters())
    with RolloutClient(url) as client, WeightWriter(client) as writer:
        writer.push(1, [adapter], adapter=adapter_config(policy, SETTINGS))
        assert client.info().own_base
        writer.push(2, [whole])
        assert not client.info().own_base
        with pytest.raises(ServerRefused, match="adapters need the server's own: start it again"):
            writer.push(3, [adapter], adapter=adapter_config(policy, SETTINGS))


def test_an_adapter_does_not_repair_a_base_that_is_half_loaded(
    url: str,
    engine: PeftEngine,
    policy: torch.nn.Module,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks_off(_files: Sequence[Path], _version: int) -> None:
        raise RuntimeError("out of memory")

    adapter = [(weight.name, weight.value()) for weight in adapter_weights(policy)]
    whole = list(load_model(tiny_model, "float32", False).named_parameters())
    with RolloutClient(url) as client, WeightWriter(client) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "load_weights", breaks_off)
            with pytest.raises(ServerRefused, match="out of memory"):
                writer.push(1, [whole])
        with pytest.raises(ServerRefused, match="start it again"):
            writer.push(2, [adapter], adapter=adapter_config(policy, SETTINGS))
        assert "out of memory" in str(client.info().broken)
        writer.push(3, [whole])
        assert client.info().broken is None
