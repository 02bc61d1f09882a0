"""Which functions a model's RMSNorms, gated MLPs and, on a GPU, rotary positions run: ours on a CPU and on a GPU with
Triton, else transformers'.

transformers writes each as half a dozen operations over the whole activation, and keeps float32 copies for the backward
pass. `cpu_kernels.py` and `gpu_kernels.py` have the same formulas, rounded in the same places, in one pass.
"""

from __future__ import annotations

import inspect
import logging
import os
import sysconfig
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from swift_r1.models import cpu_kernels

logger = logging.getLogger("swift_r1.training")

FUSED = {"norm", "mlp", "rotary", "head"}
"""What runs in kernels of our own on a GPU; benchmarks take some out."""
_ROTARY = "apply_rotary_pos_emb"  # transformers' name of the function in each model's file
_LINEAR = ("gate_proj", "up_proj", "down_proj")


def use_block_functions(model: nn.Module) -> int:
    """Gives the model's RMSNorms, SiLU-gated MLPs and attention these functions, and returns how many modules got one.

    Whether a module's own function is the same is found out once for its class, on numbers. A module with another
    formula (`1 + weight`, another gate, neighbours turned together) is left alone.
    """
    alike: dict[type, bool] = {}
    rotating: dict[type, Callable[..., Any] | None] = {}
    changed = 0
    for module in model.modules():
        kind = type(module)
        if _ROTARY in getattr(getattr(kind.forward, "__code__", None), "co_names", ()):
            if kind not in rotating:
                rotating[kind] = _rotating(kind)
            own = rotating[kind]
            if own is not None:
                module.forward = MethodType(own, module)
                changed += 1
            continue

        if hasattr(module, "variance_epsilon") and isinstance(
            getattr(module, "weight", None), nn.Parameter
        ):
            forward = _norm_forward
        elif all(hasattr(module, name) for name in (*_LINEAR, "act_fn")):
            forward = _mlp_forward
        else:
            continue
        if kind not in alike:
            alike[kind] = _alike(module, forward)
        if alike[kind]:
            module.forward = MethodType(forward, module)
            changed += 1

    return changed


def gpu_kernels(name: str, states: Tensor) -> Any:
    """Returns the module `gpu_kernels`, where it has kernels for the device and dtype of `states`; else None.

    Args:
        name: which kernels are wanted, one of `FUSED`.
        states: what they would be given.
    """
    if name not in FUSED or not states.is_cuda:
        return None
    if states.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    # Triton starts kernels on the thread's own device, wherever their tensors are.
    return _triton_kernels() if states.device.index == torch.cuda.current_device() else None


@cache
def _triton_kernels() -> Any:
    # Triton builds a small launcher in C for each kernel.
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    compiles = headers and (os.environ.get("CC") or which("gcc") or which("clang"))
    if find_spec("triton") is None or not compiles:
        lacks = "C compiler with Python's headers" if find_spec("triton") else "Triton"
        logger.info(
            "norms, MLPs and the output head run without our kernels, which is slower: no %s", lacks
        )
        return None
    from swift_r1.models import gpu_kernels

    return gpu_kernels


def _norm_forward(self: Any, hidden: Tensor) -> Any:
    """Norms in the place of a module's own forward, which is run where there are no kernels."""
    kernels = cpu_kernels if hidden.device.type == "cpu" else gpu_kernels("norm", hidden)
    if kernels is None or hidden.dtype != self.weight.dtype:
        return type(self).forward(self, hidden)
    return kernels.rms_norm(hidden, self.weight, self.variance_epsilon)


def _mlp_forward(self: Any, hidden: Tensor) -> Any:
    """Runs a gated MLP in the place of a module's own forward, which is run where there are no kernels."""
    kernels = cpu_kernels if hidden.device.type == "cpu" else gpu_kernels("mlp", hidden)
    if kernels is None:
        return type(self).forward(self, hidden)
    return self.down_proj(kernels.swiglu(self.gate_proj(hidden), self.up_proj(hidden)))


def _rotating(kind: Any) -> Callable[..., Any] | None:
    """Returns the forward of an attention class with our rotary function in the place of its own.

    None where its own is another function than the usual one, which it is compared with on numbers.
    """
    forward = kind.forward
    own = forward.__globals__.get(_ROTARY)
    if own is None or list(inspect.signature(own).parameters) != [
        "q",
        "k",
        "cos",
        "sin",
        "unsqueeze_dim",
    ]:
        return None

    states, cos, sin = (torch.linspace(start, 2, 64).view(1, 4, 16) for start in (-3, -1, -2))
    for dtype in (torch.float32, torch.bfloat16):
        query = states[None].to(dtype)
        angles = (cos.to(dtype), sin.to(dtype))
        left, right = query.chunk(2, -1)
        expected = query * angles[0] + torch.cat([-right, left], -1) * angles[1]
        try:
            rotated = own(query, query, *angles)
        except RuntimeError:  # its angles have another width (gpt-oss: half)
            return None
        if not all(torch.equal(ours, expected) for ours in rotated):
            return None

    names = {**forward.__globals__, _ROTARY: partial(_rotary, own)}
    ours = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def _rotary(
    own: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Turns queries and keys `[B, heads, S, D]` by our kernels where they fit, else by the class's `own` function."""
    kernels = gpu_kernels("rotary", q)
    same = (
        q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.shape[-1] == cos.shape[-1]
        and unsqueeze_dim == 1
    )
    if kernels is None or not same:
        return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    return kernels.rotated(q, cos, sin), kernels.rotated(k, cos, sin)


def _alike(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Says whether the own forward of a module's class rounds like `forward`.

    Nearly all bf16 values must be the same to the bit, and all to rounding. It is tried on a stand-in, since real
    weights may be partitioned (ZeRO-3).
    """
    kind: Any = type(module)
    # a gate, a residual: not only the states
    if len(inspect.signature(kind.forward).parameters) != 2:
        return False

    states = torch.linspace(-3, 2, 1024).view(64, 16)
    weight = torch.linspace(0.5, 1.5, 16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = {name: nn.Linear(16, 16, bias=False) for name in _LINEAR}

    for dtype, share in ((torch.float32, 1.0), (torch.bfloat16, 0.02)):
        if forward is _norm_forward:
            stand_in = SimpleNamespace(weight=weight.to(dtype), variance_epsilon=1e-3)
        else:
            linear = {name: layer.to(dtype) for name, layer in layers.items()}
            stand_in = SimpleNamespace(act_fn=module.act_fn, **linear)

        hidden = states.to(dtype)
        try:
            with torch.no_grad():
                own = kind.forward(stand_in, hidden)
                ours = forward(stand_in, hidden)
        except AttributeError:  # it uses more than the stand-in has
            return False

        close = torch.allclose(own, ours, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
        if not close or not (own != ours).float().mean().item() < share:
            return False

    return True
