"""Whole runs whose engine sleeps between rounds, with the trainer's tensors in host memory meanwhile.

The engine is a small one behind the real server, which can sleep without a GPU; the flags are put in behind the place
where a run on a CPU leaves them out. With vLLM on a GPU: `tests/serving/test_sleep.py` and `test_colocate.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import RlhfArguments
from tests import forks
from tests.e2e.live_run import PLUGIN, words_of

LOGP_NOISE = 2e-3


@pytest.fixture
def train(
    tmp_path: Path, save_model: Callable[..., Path], start_tiny: Callable[..., Any]
) -> Callable[..., Any]:
    """`train(name, processes, resumed_from, sleep_level=..., ...) -> (steps, folder, the server's log)`."""
    model = save_model(tmp_path / "model", dtype="bfloat16")  # computed with in float32

    def run(name: str, processes: int = 1, resumed_from: Path | None = None, **flags: Any) -> Any:
        server = start_tiny(
            model, vllm_engine_kwargs={"enable_sleep_mode": flags.pop("can_sleep", True)}
        )
        folder = tmp_path / name
        values = {
            "torch_dtype": "float32",
            "use_vllm": "true",
            "vllm_server_base_url": server.url,
            "per_device_train_batch_size": 8 // processes,
            "steps_per_generation": 2,
            "max_steps": 6,
            "beta": 0.01,
            "eval_steps": 3,
            "val_dataset": "counting#4",
            "save_steps": 3,
            "weight_check_steps": 2,
            "learning_rate": 1e-2,
        }
        words = words_of(model, folder, **values | flags)
        environ = {"NPROC_PER_NODE": str(processes), "OMP_NUM_THREADS": "1"}
        args = parse_arguments(RlhfArguments, words, environ)
        folder.mkdir(exist_ok=True)
        (folder / "args.json").write_text(
            json.dumps(
                {
                    "args": args.to_dict(),
                    "run_dir": str(folder),
                    "command": ["swift", "rlhf", *words],
                    "versions": {},
                    "world_size": processes,
                    "resumed_from": resumed_from and str(resumed_from),
                    "dataset_hash": "the same",
                    "prepared_data": {},
                    "own_dtype": False,
                    "started": time.time(),
                }
            )
        )
        worker = [str(PLUGIN.with_name("copying_worker.py")), str(folder / "args.json")]
        if processes > 1:
            worker = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={processes}",
                *worker,
            ]
        done = forks.run(worker, environ=environ, timeout=280)
        print(done.stdout, done.stderr)
        assert done.returncode == 0
        lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
        server.stop()
        return lines, folder, server.log.read_text()

    return run


def learned(line: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock and on where tensors were."""
    return {
        name: value
        for name, value in line.items()
        if not name.startswith(("time/", "memory/", "tokens_per_second", "rollout/bytes"))
        and not name.endswith("/seconds")
    }


@pytest.mark.parametrize(
    ("level", "more"),
    [
        pytest.param(2, {}, marks=pytest.mark.long),
        pytest.param(1, {"rlhf_type": "ppo", "beta": [], "kl_coef": 0.05}, marks=pytest.mark.long),
        pytest.param(2, {"processes": 2, "deepspeed": "zero3"}, marks=pytest.mark.long),
        pytest.param(1, {"processes": 2, "deepspeed": "zero2"}, marks=pytest.mark.long),
    ],
)
def test_a_run_with_an_engine_that_sleeps_learns_the_same(
    train: Callable[..., Any], level: int, more: Any
) -> None:
    """Evaluations and saves in the middle of a round too, and from such a save it goes on."""
    awake, folder, _ = train("awake", **more)
    flags = more | {"sleep_level": level, "offload_model": "true", "offload_optimizer": "true"}
    lines, slept, log = train("asleep", **flags)
    assert [learned(line) for line in lines] == [learned(line) for line in awake]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 6 and all(line["rollout/logp_diff"] < LOGP_NOISE for line in steps)
    assert any("rollout/weight_check" in line for line in steps) and "time/sleep" not in awake[0]
    assert all(line["time/sleep"] > 0 and line["time/offload"] > 0 for line in steps)
    # Before the model is loaded and in three rounds; for the two saves after evaluations its weights are kept.
    assert log.count(f"the engine sleeps at level {level}") == (4 if level == 2 else 6)
    assert log.count("the engine sleeps at level") == 6
    checkpoints = [slept / "checkpoint-3", slept / "checkpoint-6"]
    for one in checkpoints:
        own, other = (load_file(root / one.name / "model.safetensors") for root in (slept, folder))
        assert all(torch.equal(own[key], value) for key, value in other.items())
    if more:
        again = [
            line
            for line in train("asleep", resumed_from=checkpoints[0], **flags)[0]
            if "loss" in line
        ]
        kept = ("step", "loss", "reward", "grad_norm")
        assert [[line[name] for name in kept] for line in again] == [
            [line[name] for name in kept] for line in steps
        ]
