"""`python benchmarks/gpu_kernels.py`: the kernels of `swift_r1/models/` on a GPU against transformers' and torch's way.

For the shapes of Qwen2.5 it prints, each way: milliseconds of the GPU and microseconds of the host (medians of calls
that are queued one after another), what rate that is, the memory that a call takes, and the largest error against
float64 on a few rows, over the largest value. The last line is `RESULT` and all of it as JSON. About half a minute.

`--rehearse` runs everything in tiny on a CPU, by Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import triton
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from swift_r1.models import block_functions, gpu_kernels, logprobs

Call = Callable[[], object]

# the latter in `scripts/gpu --rehearse`
REHEARSES = "--rehearse" in sys.argv or "GPU_REHEARSAL" in os.environ

SHAPES = {"0.5b": (896, 4864), "1.5b": (1536, 8960), "7b": (3584, 18944)}  # hidden, feed-forward
HEAD = {896: 64}  # width of an attention head, else 128
TOKENS, WORDS = (33_000, 151_936) if not REHEARSES else (24, 300)
FEW = 256 if not REHEARSES else 8
DTYPE = torch.bfloat16
DEVICE = torch.device("cpu" if REHEARSES else "cuda")
EPSILON = 1e-6
CALLS, REPEATS = (10, 3) if not REHEARSES else (1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes on a CPU, by Triton's interpreter"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    if REHEARSES and os.environ.get("TRITON_INTERPRET") != "1":  # read when Triton is imported
        os.execve(
            sys.executable, [sys.executable, *sys.argv], os.environ | {"TRITON_INTERPRET": "1"}
        )
    if REHEARSES:
        for module in (block_functions, logprobs):
            module.gpu_kernels = lambda name, _states: (
                gpu_kernels if name in block_functions.FUSED else None
            )
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, Triton {triton.__version__}, {TOKENS:,} tokens, {WORDS:,} words"
    )
    started, lines = time.perf_counter(), []
    for shape in args.shapes:
        hidden, feed_forward = SHAPES[shape] if not REHEARSES else (48, 80)
        for measure, width in (
            (norm, hidden),
            (mlp, feed_forward),
            (rotary, hidden),
            (head, hidden),
            (products, hidden),
        ):
            for line in measure(width):
                lines.append({"shape": shape, **line})
                show(lines[-1])
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
    for line in softmax():
        lines.append(line)
        show(line)
    seconds = time.perf_counter() - started
    versions = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    print(
        "RESULT "
        + json.dumps(
            {**versions, "tokens": TOKENS, "words": WORDS, "seconds": seconds, "lines": lines}
        )
    )


def norm(width: int) -> Iterator[dict]:
    module = LlamaRMSNorm(width, EPSILON).to(DEVICE, DTYPE)
    hidden, weight, slope = random(TOKENS, width), random(width), random(TOKENS, width).detach()
    ways = {
        "transformers": lambda x, w: torch.func.functional_call(module, {"weight": w}, (x,)),
        "ours": lambda x, w: gpu_kernels.rms_norm(x, w, EPSILON),
    }
    few = [hidden[:FEW], weight]
    exact = gradients(
        lambda x, w: w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON),
        few,
        slope[:FEW],
        torch.float64,
    )
    size = hidden.numel() * DTYPE.itemsize
    for way, function in ways.items():
        error = largest_error(gradients(function, few, slope[:FEW]), exact)
        yield {
            "what": "norm forward",
            "way": way,
            **measured(quietly(function, hidden, weight), moved=2 * size),
        }
        call = both_ways(function, [hidden, weight], slope)
        yield {
            "what": "norm both ways",
            "way": way,
            **measured(call, moved=5 * size),
            "error": error,
        }


def mlp(width: int) -> Iterator[dict]:
    gate, up, slope = random(TOKENS, width), random(TOKENS, width), random(TOKENS, width).detach()
    silu = torch.nn.functional.silu
    ways = {"transformers": lambda g, u: silu(g) * u, "ours": gpu_kernels.swiglu}
    few = [gate[:FEW], up[:FEW]]
    exact = gradients(ways["transformers"], few, slope[:FEW], torch.float64)
    size = gate.numel() * DTYPE.itemsize
    for way, function in ways.items():
        error = largest_error(gradients(function, few, slope[:FEW]), exact)
        yield {
            "what": "mlp forward",
            "way": way,
            **measured(quietly(function, gate, up), moved=3 * size),
        }
        call = both_ways(function, [gate, up], slope)
        yield {
            "what": "mlp both ways",
            "way": way,
            **measured(call, moved=8 * size),
            "error": error,
        }


def rotary(width: int) -> Iterator[dict]:
    """Of the queries alone; their heads are 64 wide in the smallest model and 128 in the others."""
    head_width = 64 if width == 896 else min(128, width // 3)
    states, slope = (random(1, TOKENS, width // head_width, head_width) for _ in range(2))
    cos, sin = (random(1, TOKENS, head_width).detach() for _ in range(2))

    def eager(x: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
        left, right = x.transpose(1, 2).chunk(2, -1)
        return x.transpose(1, 2) * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]

    ways = {
        "transformers": eager,
        "ours": lambda x: gpu_kernels.rotated(x.transpose(1, 2), cos, sin),
    }
    few = [states[:, :FEW]]
    slope = slope.detach().transpose(1, 2)
    wide = partial(eager, cos=cos[:, :FEW].double(), sin=sin[:, :FEW].double())
    exact = gradients(wide, few, slope[:, :, :FEW], torch.float64)
    narrow = {
        "transformers": partial(eager, cos=cos[:, :FEW], sin=sin[:, :FEW]),
        "ours": lambda x: gpu_kernels.rotated(x.transpose(1, 2), cos[:, :FEW], sin[:, :FEW]),
    }
    moved = 4 * states.numel() * DTYPE.itemsize
    for way, function in ways.items():
        error = largest_error(gradients(narrow[way], few, slope[:, :, :FEW]), exact)
        call = both_ways(function, [states], slope)
        yield {
            "what": "rotary both ways",
            "way": way,
            **measured(call, moved=moved),
            "error": error,
        }


# Chunks of 128 MiB (otherwise by the card), products in float32, the softmax in kernels.
HEADS = {
    "as on a CPU": (True, False, False),
    "large chunks": (False, False, False),
    "float32 products": (False, True, False),
    "float32 products and kernels": (False, True, True),
    "kernels": (False, False, True),
}


def head(width: int) -> Iterator[dict]:
    hidden, weight = random(TOKENS, width), random(WORDS, width, scale=width**-0.5)
    targets = torch.randint(WORDS, (TOKENS,), device=DEVICE)
    slope = torch.randn(TOKENS, device=DEVICE)
    few = [hidden[:FEW], weight]

    def exact_logps(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.t()).log_softmax(-1).gather(-1, targets[: len(x), None]).squeeze(-1)

    def logps(x: Tensor, w: Tensor) -> Tensor:
        return logprobs.selective_logprobs(x, w, targets[: len(x)]).logps

    exact = gradients(exact_logps, few, slope[:FEW], torch.float64)
    for way, switches in HEADS.items():
        with switched(*switches):
            error = largest_error(gradients(logps, few, slope[:FEW]), exact)
            call = both_ways(logps, [hidden, weight], slope)
            found = measured(call, flops=6 * TOKENS * WORDS * width, calls=1, repeats=2)
            yield {"what": "head both ways", "way": way, **found, "error": error}


def softmax() -> Iterator[dict]:
    """The two kernels of the head alone, on one chunk."""
    rows = rows_of_a_chunk()
    logits = torch.randn(rows, WORDS, device=DEVICE)
    lse, targets, slopes = (
        logits.logsumexp(-1),
        torch.zeros(rows, 1, dtype=torch.long, device=DEVICE),
        logits[:, :1],
    )
    calls = {
        "softmax": (1, partial(gpu_kernels.softmax_statistics, logits)),
        "softmax gradient": (
            1.5,
            partial(gpu_kernels.softmax_gradient, logits, lse, targets, slopes, None, DTYPE),
        ),
    }
    for what, (reads, call) in calls.items():
        yield {"what": what, "way": "ours", **measured(call, moved=4 * reads * logits.numel())}


def products(width: int) -> Iterator[dict]:
    """Those of the head, of one chunk."""
    rows, wide = rows_of_a_chunk(), torch.float32
    states, weight = random(rows, width).detach(), random(WORDS, width).detach()
    low, total = random(rows, WORDS).detach(), torch.zeros(WORDS, width, device=DEVICE)
    calls: dict[str, Call] = {
        "logits in bf16": lambda: states @ weight.t(),
        "logits in float32": lambda: torch.mm(states, weight.t(), out_dtype=wide),
        "weight's gradient in bf16": lambda: low.t() @ states,
        "weight's gradient added in float32": lambda: torch.addmm(
            total, low.t(), states, out_dtype=wide, out=total
        ),
        "states' gradient": lambda: low @ weight,
    }
    for way, call in calls.items() if DEVICE.type == "cuda" else ():
        yield {
            "what": "product",
            "way": way,
            **measured(call, flops=2 * rows * WORDS * width, calls=3),
        }


def rows_of_a_chunk() -> int:
    return max(1, min(TOKENS, logprobs.logits_bytes(DEVICE) // (4 * WORDS)))


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(scale).to(DTYPE).requires_grad_()


def gradients(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    slope: Tensor,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The output and the gradients, of copies in `dtype`."""
    leaves = [one.detach().to(dtype or one.dtype).requires_grad_() for one in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope.to(out.dtype))]


def both_ways(function: Callable[..., Tensor], inputs: Sequence[Tensor], slope: Tensor) -> Call:
    def call() -> object:
        out = function(*inputs)
        return torch.autograd.grad(out, inputs, slope.to(out.dtype))

    return call


def quietly(function: Callable[..., Tensor], *inputs: Tensor) -> Call:
    def call() -> object:
        with torch.no_grad():
            return function(*inputs)

    return call


def largest_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = zip(found, exact, strict=True)
    return max(
        float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs
    )


@contextmanager
def switched(small: bool, wide: bool, fused: bool) -> Iterator[None]:
    before = logprobs.logits_bytes, logprobs.WIDE_PRODUCTS, set(block_functions.FUSED)
    if small:
        logprobs.logits_bytes = lambda _device: logprobs.LOGITS_BYTES
    logprobs.WIDE_PRODUCTS = logprobs.WIDE_PRODUCTS and wide
    if not fused:
        block_functions.FUSED.discard("head")
    yield
    logprobs.logits_bytes, logprobs.WIDE_PRODUCTS, fused_before = before
    block_functions.FUSED.update(fused_before)


def measured(
    call: Call, *, moved: float = 0, flops: float = 0, calls: int = CALLS, repeats: int = REPEATS
) -> dict:
    """Milliseconds on the GPU and microseconds of the host, rate and peak memory of a call."""
    if DEVICE.type != "cuda":
        started = time.perf_counter()
        call()
        return {"ms": 1e3 * (time.perf_counter() - started)}
    call()  # compiles, and fills the allocator's cache
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    on_gpu, on_host = [], []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The GPU waits until the calls are queued: the host's time is not in its own.
        torch.cuda._sleep(1_000_000 * calls if calls > 1 else 0)
        start.record()
        queued = time.perf_counter()
        for _ in range(calls):
            call()
        on_host.append(1e6 * (time.perf_counter() - queued) / calls)
        end.record()
        torch.cuda.synchronize()
        on_gpu.append(start.elapsed_time(end) / calls)
    ms = statistics.median(on_gpu)
    rates = {"GB/s": moved / ms / 1e6} if moved else {"TFLOP/s": flops / ms / 1e9}
    return {"ms": ms, "host us": statistics.median(on_host), **rates, "GiB": peak / 2**30}


def show(line: dict) -> None:
    numbers = [f"{value:.3g} {name}" for name, value in line.items() if isinstance(value, float)]
    print(
        f"{line.get('shape', ''):5} {line['what']:17} {line['way']:36}" + "  ".join(numbers),
        flush=True,
    )


if __name__ == "__main__":
    main()
