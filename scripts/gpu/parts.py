"""What `scripts/gpu` runs, in its order: what everything needs, then what is likeliest to break, cheap before dear."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One process of the kit.

    Attributes:
        command: a file of the repository and its arguments.
        seconds: what it takes, guessed: no GPU has run it. It is not begun with less left of the budget.
        limit_s: it is killed then.
        packages: that it is skipped without.
        gpus: that it is skipped without.
    """

    name: str
    what: str
    command: tuple[str, ...]
    seconds: float
    limit_s: float
    packages: tuple[str, ...] = ()
    gpus: int = 1


def _layout(name: str, what: str, seconds: float, *packages: str, gpus: int = 1) -> Part:
    command = ("scripts/gpu/layouts.py", name)
    return Part(name, what, command, seconds, 3 * seconds + 60, (*_OURS, *packages), gpus)


def _measured(name: str, what: str, seconds: float, *packages: str) -> Part:
    kind, *shape = name.split("-", 1)
    file, words = (f"{kind}.py", shape) if shape else ("chip.py", [kind])
    return Part(
        name,
        what,
        (f"scripts/gpu/{file}", *words),
        seconds,
        1.5 * seconds + 10,
        packages or ("torch",),
    )


# What `swift_r1` itself imports for a run: where the first is missing the others are too.
_OURS = ("torch", "transformers", "pydantic", "fastapi")
_SERVER = (*_OURS, "vllm")
PARTS = (
    Part("install", "uv.lock into .venv", ("scripts/install.sh",), 60, 420, (), 0),
    _measured("machine", "driver, torch, NCCL, 4-bit kernels and each library on the device", 15),
    Part(
        "tests",
        "the tests marked gpu that need no vLLM",
        ("scripts/gpu/marked.py",),
        40,
        180,
        (*_OURS, "pytest"),
    ),
    _measured("rates", "matrix products, memory, the bus: the chip's limits", 15),
    _measured("train-0.5b", "the training part of a step, Qwen2.5-0.5B", 40, *_OURS),
    _layout("embedded", "training, the trainer generates", 25),
    _measured(
        "engine-0.5b",
        "one swift rollout with CUDA graphs: loads, updates, sleep; Qwen2.5-0.5B",
        120,
        *_SERVER,
    ),
    _layout("colocate", "vLLM beside the trainer, eager", 45, "vllm"),
    _measured("train-1.5b", "the same, Qwen2.5-1.5B", 40, *_OURS),
    Part(
        "kernels",
        "our Triton kernels against torch's way",
        ("benchmarks/gpu_kernels.py",),
        40,
        140,
        (*_OURS, "triton"),
    ),
    _layout("packing", "rows packed to one length", 25),
    _layout("sleep-2", "engine and trainer take turns; the engine drops its weights", 45, "vllm"),
    _measured("engine-7b", "the same, Qwen2.5-7B", 150, *_SERVER),
    _measured("train-7b", "the same, Qwen2.5-7B", 60, *_OURS),
    _layout(
        "server",
        "a run with a swift rollout of its own by shared memory, then an async one",
        90,
        "vllm",
    ),
    _layout("zero3", "DeepSpeed ZeRO-3, a rank for each of at most two GPUs", 35, "deepspeed"),
    _layout("adapters", "LoRA, the engine takes adapters alone", 45, "vllm", "peft"),
    _layout("fp8", "fp8 weights in the engine", 45, "vllm"),
    _layout("qlora", "4-bit weights under adapters", 25, "bitsandbytes"),
    _layout("runner-1", "colocate with vLLM's model runner V1, the one that CPUs have", 45, "vllm"),
    _layout("sleep-1", "they take turns; the engine's weights go to the host", 45, "vllm"),
    _layout("nccl", "weights from GPU to GPU", 60, "vllm", gpus=2),
    _layout("flash", "FlashAttention 2, packed rows", 25, "flash_attn"),
    _layout("flex", "flex attention, packed rows", 40),
    Part(
        "tests-vllm",
        "the other tests marked gpu",
        ("scripts/gpu/marked.py", "vllm"),
        120,
        420,
        (*_SERVER, "pytest"),
    ),
)
