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
    return Part(name, what, ("scripts/gpu/layouts.py", name), seconds, 3 * seconds + 60, ("torch", *packages), gpus)


def _chip(name: str, what: str, seconds: float, *packages: str) -> Part:
    return Part(
        name, what, ("scripts/gpu/chip.py", *name.split("-", 1)), seconds, 2 * seconds + 60, ("torch", *packages)
    )


PARTS = (
    Part("install", "the lock into .venv", ("scripts/install.sh",), 60, 420, (), 0),
    _chip("machine", "driver, torch, NCCL, 4-bit kernels and each library on the device", 20),
    _layout("embedded", "training, the trainer generates", 25),
    _layout("packing", "rows packed to one length", 25),
    _layout("colocate", "vLLM beside the trainer, eager", 45, "vllm"),
    _layout("runner-1", "the same with vLLM's model runner V1, the one that CPUs have", 45, "vllm"),
    _layout("sleep-2", "they take turns; the engine drops its weights", 45, "vllm"),
    _layout("qlora", "4-bit weights under adapters", 25, "bitsandbytes"),
    _layout("zero3", "DeepSpeed ZeRO-3, a rank for each of at most two GPUs", 35, "deepspeed"),
    _chip("rates", "matrix products, memory, and the bus: the chip's limits", 10),
    _chip("train-0.5b", "the training part of a step, Qwen2.5-0.5B", 20),
    _layout("server", "swift rollout with CUDA graphs; a run by shared memory, an async one", 90, "vllm"),
    _layout("adapters", "LoRA, the engine takes adapters alone", 45, "vllm", "peft"),
    _layout("fp8", "fp8 weights in the engine", 45, "vllm"),
    _layout("sleep-1", "they take turns; the engine's weights go to the host", 45, "vllm"),
    _layout("nccl", "weights from GPU to GPU", 60, "vllm", gpus=2),
    _layout("flash", "FlashAttention 2, packed rows", 25, "flash_attn"),
    _layout("flex", "flex attention, packed rows", 40),
    _chip("train-1.5b", "the same, Qwen2.5-1.5B", 20),
    _chip("generate-0.5b", "swift rollout, 64 and 256 at once, Qwen2.5-0.5B", 70, "vllm"),
    Part("tests", "the tests marked gpu", ("scripts/gpu/marked.py",), 120, 420, ("torch", "vllm", "pytest")),
    _chip("train-3b", "the same, Qwen2.5-3B", 30),
    _layout("push-1.5b", "a push of Qwen2.5-1.5B to an engine beside it", 70, "vllm"),
    _chip("generate-1.5b", "the same, Qwen2.5-1.5B", 80, "vllm"),
    _chip("generate-7b", "the same, Qwen2.5-7B", 120, "vllm"),
)
