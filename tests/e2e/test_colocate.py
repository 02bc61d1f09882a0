"""`swift rlhf --vllm_mode colocate` with real vLLM beside each rank: the trainer's weights, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.live_run import LiveRun, check_every_prompt_once, steps_of, words_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LOGP_NOISE = 2e-3


class Run(LiveRun):
    """A run with engines beside its ranks."""

    def __init__(self, model: Path, folder: Path, processes: int, **more: Any) -> None:
        flags = {
            "per_device_train_batch_size": 16 // processes,
            "torch_dtype": "float32",
            "reward_isolation": "process",
            "use_vllm": "true",
            "vllm_mode": "colocate",
            "vllm_engine_kwargs": json.dumps({"kv_cache_memory_bytes": 64 << 20}),
            "vllm_server_timeout": 300,
            "learning_rate": 1e-2,
            **({"deepspeed": "zero3"} if processes > 1 else {}),
        }
        super().__init__(words_of(model, folder, **flags | more), processes, cold=True)

    def engines(self) -> list[psutil.Process]:
        """The servers beside the ranks that run now."""
        return [
            one
            for one in self.traces.look()
            if "swift_r1.serving.server" in " ".join(one.cmdline())
        ]

    def all_gone(self) -> None:
        print(self.said)
        assert self.traces.left(60) == []


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def begin(processes: int, **flags: Any) -> Run:
        made.append(Run(tiny_model, tmp_path / "run", processes, **flags))
        return made[-1]

    yield begin
    for run in made:
        run.close()


def follow_while_an_engine_dies(run: Run, folder: Path) -> list[dict[str, Any]]:
    """All six steps of a run with the trainer's weights in its engines, one of which is killed after the third."""

    def kill(step: int) -> None:
        if step == 3:
            run.engines()[0].kill()

    assert run.follow(kill) == 0
    steps = steps_of(folder)
    assert len(steps) == 6 and all(step["rollout/logp_diff"] < LOGP_NOISE for step in steps)
    return steps


@pytest.mark.parametrize(
    ("processes", "more"),
    [
        (1, {}),
        (2, {}),
        (2, {"vllm_tensor_parallel_size": 2}),
        (1, {"train_type": "lora", "vllm_enable_lora": "true", "vllm_max_num_seqs": 8}),
    ],
)
def test_engines_hold_the_trainers_weights_and_come_back(
    start: Callable[..., Run], tmp_path: Path, processes: int, more: dict[str, Any]
) -> None:
    run = start(processes, max_steps=6, weight_check_steps=2, **more)
    steps = follow_while_an_engine_dies(run, tmp_path / "run")
    assert all(step.get("rollout/weight_check", 0) < LOGP_NOISE for step in steps)
    check_every_prompt_once(tmp_path / "run", 6)
    assert "restarted" in run.said
    engines = list((tmp_path / "run").glob("engine-*.log"))
    assert len(engines) == processes // more.get("vllm_tensor_parallel_size", 1)
    if "train_type" in more:
        assert "adapters alone go to the rollout server" in run.said
        assert "'max_num_seqs': 8" in engines[0].read_text()
    run.all_gone()


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_engine_and_trainer_take_turns_on_a_gpu(
    start: Callable[..., Run], tmp_path: Path, level: int
) -> None:
    """An engine that is killed between rounds is brought back too."""
    more = {
        "offload_model": "true",
        "offload_optimizer": "true",
        "vllm_gpu_memory_utilization": 0.3,
    }
    run = start(
        1,
        max_steps=6,
        weight_check_steps=2,
        sleep_level=level,
        vllm_engine_kwargs="{}",
        save_steps=3,
        **more,
    )
    steps = follow_while_an_engine_dies(run, tmp_path / "run")
    assert all(step["time/sleep"] > 0 and step["time/offload"] > 0 for step in steps)
    assert (tmp_path / "run" / "engine-0.log").read_text().count(
        f"the engine sleeps at level {level}"
    ) >= 6
    run.all_gone()
