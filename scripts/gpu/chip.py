"""`python scripts/gpu/chip.py machine|rates|train SHAPE|generate SHAPE`: what there is, and how near we are to it."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shapes import DTYPE, REHEARSES, model_folder

ROOT = Path(__file__).resolve().parents[2]
PROMPT, NEW, GENERATIONS = (16, 16, 4) if REHEARSES else (128, 512, 8)


def main() -> None:
    parts: dict[str, Callable[..., dict[str, Any]]] = {
        "machine": machine,
        "rates": rates,
        "train": train,
        "generate": generate,
    }
    print("RESULT " + json.dumps(parts[sys.argv[1]](*sys.argv[2:])), flush=True)


def device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> dict[str, Any]:
    """Versions and devices; each library does a little on the device. SystemExit at the end where one fails."""
    if not REHEARSES:
        subprocess.run(["nvidia-smi"], timeout=60, check=False)
    import torch

    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        about = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        found["gpus"] = [f"{one.name}, {one.total_memory / 2**30:.0f} GiB, sm_{one.major}{one.minor}" for one in about]
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    faults = [] if REHEARSES or torch.cuda.is_available() else ["torch sees no GPU: is the driver new enough for it?"]
    for name, check in (("matrix product", _product), ("4-bit linear", _four_bits), ("compile", _compiled)):
        try:
            found[name] = check()
        except Exception as error:  # noqa: BLE001  each is tried whatever the others do; all are reported
            faults.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    for package in ("transformers", "vllm", "deepspeed", "bitsandbytes", "flash_attn", "peft", "flashinfer"):
        if find_spec(package) is None:
            found[package] = "not installed"
            continue
        try:
            found[package] = getattr(import_module(package), "__version__", "imported")
        except Exception as error:  # noqa: BLE001  as above
            faults.append(f"import {package}: {type(error).__name__}: {str(error)[:200]}")
    print(json.dumps(found, indent=1))
    if faults:
        print("RESULT " + json.dumps(found))
        raise SystemExit("; ".join(faults))
    return found


def _product() -> float:
    """The largest error of a bf16 product on the device against float64 on the host."""
    import torch

    a, b = (torch.randn(512, 512, generator=torch.Generator().manual_seed(one)).bfloat16() for one in (0, 1))
    error = ((a.to(device()) @ b.to(device())).double().cpu() - a.double() @ b.double()).abs().max().item()
    if error > 1.0:
        raise ArithmeticError(f"off by {error}")
    return error


def _four_bits() -> str:
    import torch

    if find_spec("bitsandbytes") is None:
        return "not installed"
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to(device())
    return f"mean {layer(torch.ones(2, 64, device=device())).abs().mean().item():.3f}"


def _compiled() -> str:
    """torch.compile needs Triton, and Triton a C compiler and Python's headers: vLLM's graphs do too."""
    import torch

    if REHEARSES:
        return "not tried"
    function: Any = torch.compile(lambda x: torch.sin(x) * 2 + 1)
    x = torch.ones(1024, device=device())
    torch.testing.assert_close(function(x), torch.sin(x) * 2 + 1)
    return "works"


def rates() -> dict[str, float]:
    """Best of several: matrix products on random data in TFLOP/s, and copies in GB/s (on the device read + written)."""
    import torch

    where, size, nbytes = device(), 512 if REHEARSES else 8192, (1 << 22) if REHEARSES else (1 << 29)
    found = {}
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for name, dtype in kinds.items():
        a = torch.randn(size, size, device=where).to(dtype)
        found[f"{name} TFLOP/s"] = 2 * size**3 / best(lambda a=a: a @ a) / 1e12
    found["device copy GB/s"] = copied() / 1e9
    here = torch.ones(nbytes, dtype=torch.uint8, device=where)
    for name, pinned in (("pinned", where.type == "cuda"), ("pageable", False)):
        host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)
        found[f"to device, {name} GB/s"] = nbytes / best(lambda host=host: here.copy_(host)) / 1e9
        found[f"to host, {name} GB/s"] = nbytes / best(lambda host=host: host.copy_(here)) / 1e9
    return found


def copied() -> float:
    """Bytes a second, read and written, of a copy on the device."""
    import torch

    here = torch.ones((1 << 22) if REHEARSES else (2 << 30), dtype=torch.uint8, device=device())
    other = torch.empty_like(here)
    return 2 * here.numel() / best(lambda: other.copy_(here))


def best(work: Callable[[], Any], times: int = 8) -> float:
    """Seconds of the fastest of `times`, after two to warm up."""
    import torch

    found = []
    for _ in range(times + 2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found[2:])


def train(shape: str) -> dict[str, float]:
    """`benchmarks/step_ours.py`: the training part of steps of 8 prompts x 8 completions."""
    sys.path.append(str(ROOT / "benchmarks"))
    from step_work import Work

    rng, prompts = random.Random(0), 1 if REHEARSES else 8

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, 500) for _ in range(count)]

    completions = prompts * GENERATIONS
    work = Work(
        model=str(model_folder(shape)),
        dtype=DTYPE,
        prompt_ids=[tokens(PROMPT) for _ in range(prompts)],
        completion_ids=[tokens(NEW) for _ in range(completions)],
        generations=GENERATIONS,
        new_tokens=NEW,
        micro=2 * GENERATIONS,
        max_tokens=None,
        steps=2 if REHEARSES else 5,
        generate=False,
        checkpointing=False,
    )
    file = Path(os.environ["GPU_WORK"]) / f"work-{shape}.json"
    work.write(file)
    words = [sys.executable, str(ROOT / "benchmarks" / "step_ours.py"), "ours", str(file)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"benchmarks/step_ours.py ended with {done.returncode}")
    result = json.loads(lines[-1].removeprefix("RESULT "))
    step = {part: statistics.median(one[part] for one in result["steps"][1:]) for part in result["steps"][0]}
    needed = prompts * PROMPT + completions * NEW
    return step | {
        "tokens/s": needed / step["train"],
        "MFU": 6 * result["parameters"] * needed / step["train"] / result["matmul_rate"],
        "matrix TFLOP/s": result["matmul_rate"] / 1e12,
        "peak GiB": result["peak"] / 2**30,
    }


def generate(shape: str) -> dict[str, float]:
    """Rounds of 64 and 256 completions through `swift rollout` with CUDA graphs; `of bandwidth`: what reading the
    weights once a token would take at the rate of a copy on the device, over what it took."""
    from swift_r1.wire.client import RolloutClient
    from swift_r1.wire.protocol import RolloutRequest, SamplingParams

    model = model_folder(shape)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    bandwidth = copied()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["rollout", "--model", str(model), "--port", str(port)]
    words += ["--vllm_engine_kwargs", json.dumps({"kv_cache_memory_bytes": (64 << 20) if REHEARSES else (16 << 30)})]
    server = subprocess.Popen([sys.executable, "-m", "swift_r1", *words])
    found: dict[str, float] = {}

    def going_on(line: str) -> None:
        print(line, file=sys.stderr)
        if server.poll() is not None:
            raise SystemExit(f"swift rollout ended with {server.returncode}")

    try:
        with RolloutClient(f"http://127.0.0.1:{port}") as client:
            client.wait_until_ready(300, report=going_on)
            for count in (8,) if REHEARSES else (64, 256):
                for warm in (False, True):
                    requests = [
                        RolloutRequest(
                            request_id=f"{count}/{warm}/{number}",
                            prompt_token_ids=tuple(range(100 + number, 100 + number + PROMPT)),
                            n=8,
                            seeds=tuple(range(8 * number, 8 * number + 8)),
                            sampling=SamplingParams(max_tokens=NEW, ignore_eos=True),
                        )
                        for number in range(count // 8)
                    ]
                    started = time.perf_counter()
                    client.generate(requests)
                    seconds = time.perf_counter() - started
                found[f"{count} at once: tokens/s"] = count * NEW / seconds
                found[f"{count} at once: of bandwidth"] = NEW * size / bandwidth / seconds
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
    return found


if __name__ == "__main__":
    main()
