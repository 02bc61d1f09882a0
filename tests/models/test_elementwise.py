"""RMSNorm, SwiGLU and attention in blocks: transformers' numbers and gradients, and only where its formula is the same."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    LlamaConfig,
    Olmo2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from swift_r1.models import cpu_kernels as elementwise
from swift_r1.models.block_functions import use_block_functions
from swift_r1.models.cpu_kernels import attention, rms_norm, swiglu

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a few rows are several blocks, the last of them smaller."""
    monkeypatch.setattr(elementwise, "_BLOCK_ELEMENTS", 32 * 7)


def random_rows(dtype, *shape, seed=0):
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        .to(dtype)
        .requires_grad_()
    )


def gradients(function, *inputs):
    out = function(*inputs)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, slope)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention(dtype, tolerance):
    """In pieces of a few heads; as exact as torch's own."""
    states = [
        random_rows(dtype, 2, 3, *size, seed=seed)
        for seed, size in enumerate(((5, 8), (9, 8), (9, 4)))
    ]
    near = torch.ones(5, 9, dtype=torch.bool).tril(4)
    for scale in (None, 0.7):

        def own(*states, function, scale=scale):
            return function(*states, attn_mask=near, scale=scale)

        theirs = [one.detach().double().requires_grad_() for one in states]
        expected = gradients(partial(own, function=scaled_dot_product_attention), *theirs)
        found = gradients(partial(own, function=attention), *states)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == dtype
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rms_norm(dtype, tolerance):
    norm = LlamaRMSNorm(32, eps=1e-3).to(dtype)
    hidden, weight = random_rows(dtype, 3, 11, 32), random_rows(dtype, 32, seed=1)

    def own(hidden, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (hidden,))

    for ours, theirs in zip(
        gradients(lambda *x: rms_norm(*x, 1e-3), hidden, weight),
        gradients(own, hidden, weight),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype == dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    with torch.inference_mode():  # the engine's way
        torch.testing.assert_close(
            rms_norm(hidden, weight, 1e-3), own(hidden, weight), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_the_same_to_the_bit(dtype):
    gate, up = random_rows(dtype, 3, 11, 32), random_rows(dtype, 3, 11, 32, seed=1)
    for ours, theirs in zip(
        gradients(swiglu, gate, up),
        gradients(lambda g, u: nn.functional.silu(g) * u, gate, up),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    with torch.inference_mode():
        assert torch.equal(swiglu(gate, up), nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("config", "changed"),
    # norms, MLPs, attention
    [
        (LlamaConfig, 5 + 2 + 2),
        (Qwen3Config, 5 + 4 + 2 + 2),
        (Gemma2Config, 2),
        (Olmo2Config, 2 + 2),
        (CohereConfig, 2),
    ],
)
def test_models_are_changed_where_the_formula_is_the_same(config, changed):
    """Gemma's norm has `1 + weight` and its gate is a GELU; Olmo's norm rounds later, and Cohere turns
    neighbours together: these stay as they are."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES, initializer_range=0.3))
    ids = torch.arange(20).view(2, 10)
    before = gradients_of(model, ids)
    assert use_block_functions(model) == changed
    for was, now in zip(before, gradients_of(model, ids), strict=True):
        torch.testing.assert_close(now, was, rtol=1e-4, atol=1e-5)


def gradients_of(model, ids):
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters())]
