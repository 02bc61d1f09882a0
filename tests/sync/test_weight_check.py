"""The probe: an engine that does not use what it was sent is found, repaired once, and refused the second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_r1.data.vision import VisionProcessor
from swift_r1.errors import RunFailed
from swift_r1.models.expected import expected_weights
from swift_r1.models.loading import load_model
from swift_r1.models.multimodal import part_of_model
from swift_r1.models.vision import Vision
from swift_r1.rollout.image_probe import ImageProbe
from swift_r1.rollout.pool.session import Expected
from swift_r1.rollout.remote import (
    TOLERANCE,
    ServerRollouts,
)
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.client import RolloutClient
from tests.live_servers import pool_of
from tests.tiny_server import TinyEngine
from tests.vision import write_tiny

ONE_RANK = Ranks(0, 1, torch.device("cpu"), None)


def forgetful(model: Path, max_images: int = 0, forgotten: str = "model.norm.weight") -> Any:
    """The tiny engine, which leaves out a weight in as many coming loads as `forgets` says."""

    class Forgetful(TinyEngine):
        forgets, rounds_by = 0, 0.0

        async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
            return tuple(one + self.rounds_by for one in await super().score(sequence))

        async def load_weights(self, files: Sequence[Path], version: int) -> None:
            weight = self.model.get_parameter(forgotten)
            kept = weight.clone()
            await super().load_weights(files, version)
            if self.forgets:
                self.forgets -= 1
                weight.copy_(kept)

    return Forgetful(str(model), max_images=max_images)


@pytest.fixture
def engine(tiny_model: Path) -> Any:
    return forgetful(tiny_model)


@pytest.fixture
def rollouts(
    engine: Any, tiny_model: Path, serve_engine: Callable[..., str]
) -> Iterator[ServerRollouts]:
    """Checks its first update and every second one."""
    backend = LocalBackend(
        load_model(tiny_model, "float32", False), OptimizerConfig(0.1, 0.0, 0.9, 0.99, 1e-8, 1.0)
    )
    with RolloutClient(serve_engine(engine, expected_weights(str(tiny_model)))) as client:
        expected = Expected(
            str(tiny_model), engine.info.tokenizer_hash, engine.info.vocab_size, None
        )
        pool = pool_of([client], expected, 60)
        yield ServerRollouts(pool, backend, ONE_RANK, check_steps=2)
        pool.close()


@torch.no_grad()
def learn(rollouts: ServerRollouts) -> None:
    for name, weight in rollouts.backend.model.named_parameters():
        weight.mul_(1.5 if "norm" in name else 1.0)


def test_the_first_and_every_nth_update_are_checked(rollouts: ServerRollouts) -> None:
    checked = []
    for _ in range(5):
        learn(rollouts)
        rollouts.publish_weights()
        metrics = rollouts.take_metrics()
        checked.append("rollout/weight_check" in metrics)
        assert metrics.get("rollout/weight_check", 0.0) < TOLERANCE / 10
    assert checked == [True, True, False, True, False]
    assert rollouts.weight_version == 5
    assert rollouts.take_metrics() == {
        "rollout/refused": 0,
        "rollout/servers": 1,
        "rollout/bytes": 0,
    }


def test_an_engine_that_kept_an_old_weight_is_repaired_by_one_full_push(
    rollouts: ServerRollouts, engine: Any
) -> None:
    learn(rollouts)
    engine.forgets = 1
    rollouts.publish_weights()
    assert rollouts.take_metrics()["rollout/weight_check"] > 10 * TOLERANCE
    assert rollouts.weight_version == 2  # the repair is a version of its own
    torch.testing.assert_close(
        engine.model.model.norm.weight, rollouts.backend.model.model.norm.weight.detach()
    )


def test_an_engine_that_never_takes_it_is_refused(rollouts: ServerRollouts, engine: Any) -> None:
    learn(rollouts)
    engine.forgets = 9
    with pytest.raises(
        RunFailed, match=r"after a full push .*does not use the weights that it was sent"
    ):
        rollouts.publish_weights()


@pytest.mark.parametrize(("rounds_by", "resumed"), [(0.3, False), (0.3, True), (0.6, False)])
def test_a_model_that_rounds_far_in_16_bits_is_measured_before_the_first_update(
    rollouts: ServerRollouts, engine: Any, rounds_by: float, resumed: bool
) -> None:
    engine.info, engine.rounds_by = replace(engine.info, dtype="bfloat16"), rounds_by
    assert rollouts.pool is not None
    rollouts.pool.first = rollouts.pool.first.model_copy(update={"dtype": "bfloat16"})
    if resumed:
        rollouts.resume(3)  # what the engine has loaded tells nothing then
    if resumed or rounds_by > 0.5:
        with pytest.raises(RunFailed, match=r"rounding explains 0\.2"):
            rollouts.publish_weights()
        return
    rollouts.publish_weights()
    assert rollouts.take_metrics()["rollout/weight_check"] == pytest.approx(rounds_by, abs=1e-3)
    engine.rounds_by = 0.7
    with pytest.raises(RunFailed, match=r"rounding explains 0\.6"):
        rollouts.publish_weights()


@pytest.mark.parametrize("family", [pytest.param("qwen2_5_vl", marks=pytest.mark.long), "idefics3"])
def test_a_tower_that_stays_is_found_by_an_image(
    serve_engine: Callable[..., str], tmp_path: Path, family: str
) -> None:
    folder = write_tiny(family, tmp_path)
    policy = load_model(folder, "float32", False, towers=True)
    tower = next(
        name
        for name, weight in policy.named_parameters()
        if part_of_model(name) == "vit" and weight.dim() > 1
    )
    engine = forgetful(folder, 1, tower)
    processor = VisionProcessor.load(str(folder), engine.tokenizer)
    backend = LocalBackend(policy, OptimizerConfig(0.1, 0.0, 0.9, 0.99, 1e-8, 1.0))
    expected = Expected(str(folder), engine.info.tokenizer_hash, engine.info.vocab_size, None)
    limits = {"vllm_limit_mm_per_prompt": {"image": 1}}
    url = serve_engine(engine, expected_weights(str(folder), towers=True), **limits)
    with RolloutClient(url) as client:
        pool = pool_of([client], expected, 60)
        probe = ImageProbe(Vision(processor, policy))
        rollouts = ServerRollouts(pool, backend, ONE_RANK, check_steps=1, probe=probe)
        with torch.no_grad():
            policy.get_parameter(tower).mul_(2)
        rollouts.publish_weights()
        assert rollouts.take_metrics()["rollout/weight_check"] < 1e-5
        with torch.no_grad():
            policy.get_parameter(tower).mul_(2)
        engine.forgets = 1
        rollouts.publish_weights()
        assert rollouts.take_metrics()["rollout/weight_check"] > TOLERANCE
        assert rollouts.weight_version == 3  # repaired
        pool.close()
