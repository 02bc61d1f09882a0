"""`python scripts/gpu/layouts.py NAME`: a short run of `swift rlhf` in one layout, looked at afterwards.

It fails where a step is missing or not finite, or where the engine's log-probs are not the trainer's.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shapes import DTYPE, REHEARSES, model_folder

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
LOGP_DIFF = {"fp8": 0.5}  # nats on average; else:
ROUNDING = 0.1
ENGINE_KWARGS: dict[str, Any] = {"kv_cache_memory_bytes": (64 << 20) if REHEARSES else (4 << 30)}
COLOCATE = {
    "use_vllm": "true",
    "vllm_mode": "colocate",
    "vllm_enforce_eager": "true",
    "vllm_server_timeout": 240,
}
TURNS = COLOCATE | {"offload_model": "true", "offload_optimizer": "true"}
OWN = {"use_vllm": "false"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "embedded": OWN,
    "packing": OWN | {"packing": "true", "share_prompt": "false"},
    "flash": OWN | {"packing": "true", "share_prompt": "false", "attn_impl": "flash_attention_2"},
    "flex": OWN | {"packing": "true", "share_prompt": "false", "attn_impl": "flex_attention"},
    "qlora": OWN | {"train_type": "qlora"},
    "zero3": OWN | {"deepspeed": "zero3"},
    "colocate": COLOCATE,
    "runner-1": COLOCATE,
    "sleep-1": TURNS | {"sleep_level": 1},
    "sleep-2": TURNS | {"sleep_level": 2},
    "adapters": COLOCATE | {"train_type": "lora", "vllm_enable_lora": "true"},
    "fp8": COLOCATE,
}
# With a server: the runs that use it, one after another.
SERVED: dict[str, dict[str, dict[str, Any]]] = {
    "server": {"server": {}, "async": {"async_generate": "true", "max_staleness": 1}},
    "nccl": {"nccl": {"weight_transport": "http" if REHEARSES else "nccl"}},
}


def main() -> None:
    name = sys.argv[1]
    model = model_folder("0.5b")
    if name in SERVED:
        served(name, model)
        return
    processes = min(2, gpus()) if name == "zero3" else 1
    environ = {"NPROC_PER_NODE": str(processes)} | (
        {"VLLM_USE_V2_MODEL_RUNNER": "0"} if name == "runner-1" else {}
    )
    run = swift(training_words(name, model, flags_of(name)), environ)
    print("RESULT " + json.dumps(finished(name, run)), flush=True)


def flags_of(name: str) -> dict[str, Any]:
    flags = dict(LAYOUTS[name])
    kwargs = ENGINE_KWARGS | (
        {"quantization": "fp8_per_tensor"} if name == "fp8" and not REHEARSES else {}
    )
    if flags["use_vllm"] == "true":
        flags["vllm_engine_kwargs"] = json.dumps(kwargs)
    return flags


def gpus() -> int:
    import torch

    return torch.cuda.device_count() or 1


def served(name: str, model: Path) -> None:
    """A server, on a GPU of its own where there are two, and runs that use it one after another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus())))).split(
        ","
    )
    own: list[dict[str, str]] = [
        {} if REHEARSES else {"CUDA_VISIBLE_DEVICES": one} for one in (visible[0], visible[-1])
    ]
    server = swift(server_words(model, port), own[1])
    found = {}
    for run, more in SERVED[name].items():
        process = swift(training_words(run, model, asking(port) | more), own[0])
        while process.poll() is None:
            if server.poll() is not None:
                process.kill()
                raise SystemExit(f"swift rollout ended with {server.returncode}")
            time.sleep(0.2)
        found |= {f"{run}: {figure}": value for figure, value in finished(run, process).items()}
    server.terminate()
    server.wait(60)
    print("RESULT " + json.dumps(found), flush=True)


def server_words(model: Path, port: int) -> list[Any]:
    words = ["rollout", "--model", model, "--port", port, "--torch_dtype", DTYPE]
    return [*words, "--vllm_engine_kwargs", json.dumps(ENGINE_KWARGS)]


def asking(port: int) -> dict[str, Any]:
    where = {"vllm_server_host": "127.0.0.1", "vllm_server_port": port, "vllm_server_timeout": 240}
    return {"use_vllm": "true"} | where


def training_words(name: str, model: Path, flags: dict[str, Any]) -> list[Any]:
    """`swift rlhf` of the digits task: 2 prompts x 8 completions a step."""
    values = {
        "rlhf_type": "grpo",
        "model": model,
        "torch_dtype": DTYPE,
        "external_plugins": ROOT / "benchmarks" / "async_plugin.py",
        "dataset": "counting",
        "reward_funcs": "digits",
        "num_generations": 8,
        "per_device_train_batch_size": 16,
        "max_length": 128,
        "max_completion_length": 16 if REHEARSES else 64,
        "max_steps": STEPS,
        "learning_rate": 1e-4,
        "gradient_checkpointing": "false",
        "save_steps": 10**6,
        "save_only_model": "true",
        "logging_steps": 1,
        "report_to": "none",
        "output_dir": folder_of(name),
        "add_version": "false",
    } | ({"weight_check_steps": 1} if flags["use_vllm"] == "true" else {})
    words = [word for flag, value in (values | flags).items() for word in (f"--{flag}", value)]
    return ["rlhf", *words]


def swift(words: list[Any], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "swift_r1", *map(str, words)]
    print("+", *command[3:], flush=True)
    return subprocess.Popen(command, env=os.environ | environ)


def folder_of(name: str) -> Path:
    return Path(os.environ["GPU_WORK"]) / "runs" / name


def finished(name: str, run: subprocess.Popen[bytes]) -> dict[str, float]:
    """What the run logged: medians of all steps but the first. SystemExit where it is not what it should be."""
    if code := run.wait():
        raise SystemExit(f"swift rlhf ended with {code}")
    lines = [
        json.loads(line) for line in (folder_of(name) / "logging.jsonl").read_bytes().splitlines()
    ]
    steps = [line for line in lines if "loss" in line]
    if len(steps) != STEPS:
        raise SystemExit(f"{len(steps)} of {STEPS} steps were logged")
    finite = ("loss", "grad_norm", "reward", "rollout/logp_diff")
    wrong = [key for step in steps for key in finite if not math.isfinite(step[key])]
    if wrong:
        raise SystemExit(f"not finite: {', '.join(sorted(set(wrong)))}")
    difference = max(step["rollout/logp_diff"] for step in steps)
    if difference > LOGP_DIFF.get(name, ROUNDING):
        raise SystemExit(
            f"the engine's log-probs differ from the trainer's by {difference:.3g} nats"
        )
    shown = [key for key in steps[-1] if key.startswith("time/")] + [
        "tokens_per_second",
        "memory/peak_gib",
    ]
    return {key: statistics.median(step[key] for step in steps[1:]) for key in shown} | {
        "logp_diff": difference
    }


if __name__ == "__main__":
    main()
