"""The Triton kernels against float64 and against the functions of a CPU: compiled where a GPU is, else interpreted."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from swift_r1.models import logprobs
from swift_r1.models.logprobs import PLAIN, LogitForm, selective_logprobs

gpu_kernels = pytest.importorskip("swift_r1.models.gpu_kernels", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
CUTS = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter cuts what bf16 cannot hold")
INTERPRETER_CUTS_BF16 = pytest.param(torch.bfloat16, marks=CUTS)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def in_use(monkeypatch):
    """So that tensors on a CPU go through the kernels too."""
    if DEVICE == "cpu":
        monkeypatch.setattr(logprobs, "gpu_kernels", lambda *_about: gpu_kernels)


def random(dtype, *shape, seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype).requires_grad_()


def with_gradients(function, *inputs, slope):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, slope.to(out.dtype))]


def near(ours, exact, tolerance):
    assert ours.shape == exact.shape
    if exact.numel():
        assert (ours.double() - exact).abs().max() <= tolerance * exact.abs().max().clamp(min=1e-3)


def exact_norm(hidden, weight):
    return weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-3)


def exact_product(gate, up):
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 5, 32), (37, 128), (2, 9, 896), (5, 1536), (2, 3584), (0, 64)]
)
def test_rms_norm(shape, dtype):
    hidden, weight = random(dtype, *shape), random(dtype, shape[-1], seed=1)
    slope = random(dtype, *shape, seed=2).detach()
    ours = with_gradients(lambda *x: gpu_kernels.rms_norm(*x, 1e-3), hidden, weight, slope=slope)
    exact = with_gradients(
        exact_norm, *(x.detach().double().requires_grad_() for x in (hidden, weight)), slope=slope
    )
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == dtype
        near(one, other, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (3, 11, 32), (3, 4864), (0, 8)])
def test_swiglu(shape, dtype):
    gate, up, slope = (random(dtype, *shape, seed=seed) for seed in range(3))
    ours = with_gradients(gpu_kernels.swiglu, gate, up, slope=slope)
    exact = with_gradients(
        exact_product, *(x.detach().double().requires_grad_() for x in (gate, up)), slope=slope
    )
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == dtype
        near(one, other, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, INTERPRETER_CUTS_BF16])
def test_rounding_is_that_of_transformers(dtype):
    """Nearly all numbers are the same to the bit."""
    hidden, weight = random(dtype, 50, 96), random(dtype, 96, seed=1)
    wide = hidden.float()
    norm = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-3)).to(dtype)
    assert (gpu_kernels.rms_norm(hidden, weight, 1e-3) != norm).float().mean() < 0.01
    gate, up, slope = (random(dtype, 50, 96, seed=seed) for seed in range(3))
    ours = with_gradients(gpu_kernels.swiglu, gate, up, slope=slope)
    theirs = with_gradients(exact_product, gate, up, slope=slope)
    for one, other in zip(ours, theirs, strict=True):
        assert (one != other).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, INTERPRETER_CUTS_BF16])
@pytest.mark.parametrize(("batch", "heads", "width"), [(1, 1, 2), (2, 3, 24), (3, 14, 64)])
def test_rotary_positions_are_the_same_to_the_bit(dtype, batch, heads, width):
    """With an angle for each half, and for all rows or for each."""
    states, slope = (random(dtype, batch, 5, heads, width, seed=seed) for seed in range(2))
    for rows in (1, batch):
        cos, sin = (random(dtype, rows, 5, width, seed=seed).detach() for seed in (2, 3))
        found = []
        for function in (gpu_kernels.rotated, eager_rotation):
            out = function(states.transpose(1, 2), cos, sin)
            found.append((out, torch.autograd.grad(out, states, slope.detach().transpose(1, 2))[0]))
        assert found[0][0].transpose(1, 2).is_contiguous()
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def eager_rotation(states, cos, sin):
    return apply_rotary_pos_emb(states, states, cos, sin)[0]


def test_views_and_expanded_gradients():
    """What attention gives: heads in the middle of a tensor; and what a sum gives."""
    states, weight = random(torch.float32, 4, 6, 3, 16), random(torch.float32, 16, seed=1)
    part = states.transpose(1, 2)[:, 1:]
    ours = torch.autograd.grad(gpu_kernels.rms_norm(part, weight, 1e-3).sum(), (states, weight))
    exact = torch.autograd.grad(exact_norm(part, weight).sum(), (states, weight))
    for one, other in zip(ours, exact, strict=True):
        near(one, other.double(), 1e-5)
    part = states[:, 1:, 1:]
    ours, exact = (f(part, part + 1).sum() for f in (gpu_kernels.swiglu, exact_product))
    near(*(torch.autograd.grad(one, states)[0].double() for one in (ours, exact)), 1e-5)


def head(dtype, rows=13, width=16, words=101, wide=None):
    hidden, weight, bias = (
        random(dtype, *shape, seed=seed)
        for seed, shape in enumerate([(rows, width), (words, width), (words,)])
    )
    generator = torch.Generator().manual_seed(3)
    shape = (rows,) if wide is None else (rows, wide)
    targets = torch.randint(words, shape, generator=generator).to(DEVICE)
    return hidden, weight, bias, targets, torch.randn(shape, generator=generator).to(DEVICE)


def exact_head(hidden, weight, bias, targets, slopes, temperature, form=PLAIN):
    leaves = [
        None if one is None else one.detach().double().requires_grad_()
        for one in (hidden, weight, bias)
    ]
    logits = leaves[0] @ leaves[1].t()
    if bias is not None:
        logits = logits + leaves[2]
    logits = logits * form.scale
    if form.soft_cap:
        logits = form.soft_cap * torch.tanh(logits / form.soft_cap)
    every = (logits / temperature).log_softmax(-1)
    chosen = every.gather(-1, targets.view(len(targets), -1)).view_as(targets)
    gradients = torch.autograd.grad(
        chosen, [one for one in leaves if one is not None], slopes.double()
    )
    return chosen, -(every.exp() * every).sum(-1), gradients


@pytest.mark.parametrize("form", [PLAIN, LogitForm(scale=0.4, soft_cap=3.0)])
@pytest.mark.parametrize("chunk", [None, 4])
def test_the_gradient_of_the_entropy(chunk, form):
    """Beside that of the log-probs; of chunks that are kept and of those that are computed again."""
    *leaves, targets, slopes = head(torch.float32, words=2100)
    rise = slopes.flip(0)
    exact = [one.detach().double().requires_grad_() for one in leaves]
    logits = form.scale * (exact[0] @ exact[1].t() + exact[2])
    if form.soft_cap:
        logits = form.soft_cap * torch.tanh(logits / form.soft_cap)
    every = (logits / 0.7).log_softmax(-1)
    total = (slopes * every.gather(-1, targets[:, None])[:, 0]).sum()
    total = total - (rise * (every.exp() * every).sum(-1)).sum()
    hidden, weight, bias = leaves
    out = selective_logprobs(
        hidden,
        weight,
        targets,
        bias=bias,
        form=form,
        temperature=0.7,
        chunk_size=chunk,
        entropy_gradient=True,
    )
    found = torch.autograd.grad((slopes * out.logps + rise * out.entropies).sum(), leaves)
    for one, other in zip(found, torch.autograd.grad(total, exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("form", [PLAIN, LogitForm(scale=0.4), LogitForm(scale=0.4, soft_cap=3.0)])
@pytest.mark.parametrize("wide", [None, 3])
def test_the_head_of_every_form(wide, form):
    hidden, weight, bias, targets, slopes = head(torch.float32, wide=wide)
    if wide:
        targets[:, 2] = targets[:, 0]  # twice the same
    chosen, entropies, gradients = exact_head(hidden, weight, bias, targets, slopes, 0.7, form)
    out = selective_logprobs(
        hidden, weight, targets, bias=bias, form=form, temperature=0.7, chunk_size=8
    )
    near(out.logps, chosen, 1e-5)
    near(out.entropies, entropies, 1e-5)
    for one, other in zip(
        torch.autograd.grad(out.logps, (hidden, weight, bias), slopes), gradients, strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=5e-5)


def test_the_head_in_bf16():
    hidden, weight, _, targets, slopes = head(torch.bfloat16, rows=20, width=64, words=3000)
    chosen, entropies, gradients = exact_head(hidden, weight, None, targets, slopes, 1.0)
    out = selective_logprobs(hidden, weight, targets, chunk_size=6)
    tolerance = 3e-2 if DEVICE == "cpu" else 1e-4  # a GPU's products are not rounded
    near(out.logps, chosen, tolerance)
    near(out.entropies, entropies, tolerance)
    for one, other in zip(
        torch.autograd.grad(out.logps, (hidden, weight), slopes), gradients, strict=True
    ):
        assert one.dtype == torch.bfloat16
        near(one, other, 2e-2)


def test_no_rows_and_large_logits():
    weight = random(torch.float32, 9, 4)
    out = selective_logprobs(
        random(torch.float32, 0, 4), weight, torch.zeros(0, dtype=torch.long, device=DEVICE)
    )
    assert out.logps.shape == out.entropies.shape == (0,)
    logits = torch.tensor(
        [[3e4, -3e4, 3e4], [-3e4, -3e4, -3e4], [float("nan"), 0.0, 0.0]], device=DEVICE
    )
    largest, log_total, entropy = gpu_kernels.softmax_statistics(logits)
    near((largest + log_total)[:2], logits[:2].double().logsumexp(-1), 1e-6)
    near(entropy[:2], torch.tensor([2.0, 3.0], device=DEVICE).double().log(), 1e-6)
    assert log_total[2].isnan() and entropy[2].isnan()
