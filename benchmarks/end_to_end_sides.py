"""The sides of `end_to_end.py`: their work, their commands and their environments."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from swift_r1.flags.world import World
from swift_r1.launch.environment import has_gpu, trainer_environment, usable_cpus

HERE = Path(__file__).resolve().parent
SIDES = ("ours-embedded", "ours-colocated", "trl", "trl-tuned", "ms-swift", "ms-swift-tuned")
GENERATIONS, MICRO = 8, 8
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

SHARED = {
    "num_generations": GENERATIONS,
    "per_device_train_batch_size": MICRO,
    "learning_rate": 1e-6,
    "temperature": 1.0,
    "logging_steps": 1,
    "report_to": "none",
}
OURS = {
    "rlhf_type": "grpo",
    "external_plugins": HERE / "end_to_end_plugin.py",
    "reward_funcs": "digits",
    "dataset_shuffle": "false",
    "gradient_checkpointing": "false",
    "save_steps": 10**6,
    "save_only_model": "true",
    "add_version": "false",
    "max_length": 128,
}
COLOCATED = {"use_vllm": "true", "vllm_mode": "colocate", "vllm_enforce_eager": "false"}
"""Compiled, as a run of 75 such steps or more has it."""
TRL = {
    "save_strategy": "no",
    "disable_tqdm": True,
    "shuffle_dataset": False,
}
MS_SWIFT = {
    "rlhf_type": "grpo",
    "external_plugins": HERE / "end_to_end_peer.py",
    "reward_funcs": "digits",
    "callbacks": "step_clock",
    "model_type": "llama",
    "template": "chatml",
    "tuner_type": "full",
    "use_vllm": "false",
    "top_p": 1.0,
    "top_k": 0,
    "beta": 0.0,
    "dataset_shuffle": "false",
    "train_dataloader_shuffle": "false",
    "split_dataset_ratio": 0,
    "save_strategy": "no",
    "add_version": "false",
    "max_length": 128,
}


def write_rows(path: Path, count: int) -> None:
    """A conversation a line, each about other numbers; as in `async_plugin.py`."""
    with path.open("w") as rows:
        for number in random.Random(0).sample(range(2000), count):
            asked = f"Count from {number} to {number + 40}."
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
            rows.write(json.dumps({"messages": messages}) + "\n")


def words_of(flags: dict[str, object]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def command(side: str, dtype: str, args: argparse.Namespace, folder: Path) -> list[str]:
    gpu = has_gpu(os.environ)
    flags: dict[str, Any] = SHARED | {
        "model": args.model,
        "dataset": folder / "rows.jsonl",
        "output_dir": folder / "run",
        "max_steps": args.steps,
        "max_completion_length": args.new_tokens,
        "gradient_accumulation_steps": args.prompts * GENERATIONS // MICRO,
    }
    if side.startswith("ours"):
        flags["gradient_accumulation_steps"] //= World.from_environment(os.environ)[0].size
        engine = COLOCATED if side == "ours-colocated" else {"use_vllm": "false"}
        return [
            sys.executable,
            "-m",
            "swift_r1",
            "rlhf",
            *words_of(flags | OURS | engine),
            *args.ours.split(),
        ]
    kept = side.endswith("-tuned")
    if side.startswith("trl"):
        flags |= TRL | {
            "dataset": str(folder / "rows.jsonl"),
            "output_dir": str(folder / "run"),
            "use_cpu": not gpu,
        }
        flags |= {"bf16": dtype == "bfloat16", "model_init_kwargs": {"dtype": dtype}}
        if kept:
            flags["gradient_checkpointing"] = False
        (folder / "flags.json").write_text(json.dumps(flags))
        return [
            str(args.trl_venv / "bin/python"),
            str(HERE / "end_to_end_peer.py"),
            str(folder / "flags.json"),
        ]
    flags |= MS_SWIFT | {"torch_dtype": dtype, "use_cpu": str(not gpu).lower()}
    if kept:
        flags["gradient_checkpointing"] = "false"
    return [
        str(args.ms_swift_venv / "bin/python"),
        "-m",
        "swift.cli.main",
        "rlhf",
        *words_of(flags),
    ]


def environment(side: str, folder: Path, profiled: bool) -> dict[str, str]:
    """Ours sets what it needs itself."""
    environ = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "END_TO_END_STEPS": str(folder / "steps.jsonl"),
        "STEP_PROFILE": str(folder / "profile.json") if profiled else "",
    }
    if side.startswith("ours"):
        return environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}"}
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "LD_PRELOAD"):
        environ.pop(name, None)
    environ["PYTHONPATH"] = str(HERE)
    if side.endswith("-tuned"):
        environ |= trainer_environment(
            environ, World(), offline=True, cpus=usable_cpus(), gpu=has_gpu(os.environ)
        )
    return environ
