"""Fused log-probs against log_softmax + gather, values and gradients."""

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from swift_r1.errors import UsageError
from swift_r1.models import logprobs
from swift_r1.models.logprobs import PLAIN, LogitForm, selective_logprobs
from swift_r1.models.multimodal import probe_tokens
from swift_r1.models.shape import KEPT_CHUNKS
from swift_r1.serving.engines.checks import own_logprobs, tolerance
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.model_checks import check_logprobs
from swift_r1.training.optimizer import OptimizerConfig


def problem(dtype, rows=37, width=16, vocab=101):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(vocab, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    upstream = torch.randn(rows, generator=generator)
    return hidden, weight, bias, targets, upstream


def reference(hidden, weight, bias, targets, upstream, temperature, form=None):
    """The same in float64 with the whole logits in memory."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    logits = leaves[0] @ leaves[1].t() + leaves[2]
    if form:
        logits = form.soft_cap * torch.tanh(form.scale * logits / form.soft_cap)
    logits = logits / temperature
    logps = logits.log_softmax(-1)
    chosen = logps.gather(-1, targets[:, None]).squeeze(-1)
    chosen.backward(upstream.double())
    return chosen, -(logps.exp() * logps).sum(-1), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [None, 1, 8, 1000])
def test_values_and_gradients_equal_float64_log_softmax(temperature, chunk_size):
    hidden, weight, bias, targets, upstream = problem(torch.float32)
    expected, entropies, gradients = reference(hidden, weight, bias, targets, upstream, temperature)
    out = selective_logprobs(
        hidden, weight, targets, bias=bias, temperature=temperature, chunk_size=chunk_size
    )
    out.logps.backward(upstream)
    torch.testing.assert_close(out.logps.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.entropies.double(), entropies, rtol=1e-5, atol=1e-5)
    for leaf, gradient in zip((hidden, weight, bias), gradients, strict=True):
        torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [None, 1, 8])
@pytest.mark.parametrize(
    "form", [PLAIN, LogitForm(scale=0.4, soft_cap=3.0), LogitForm(never=(5, 90))]
)
def test_the_gradient_of_the_entropy_equals_float64(form, chunk_size):
    """Beside that of the log-probs; a row that is nearly certain has probabilities that are 0 in float32."""
    leaves = problem(torch.float32)[:3]
    targets = torch.arange(37)
    targets[5] = 6
    with torch.no_grad():
        leaves[0][3] *= 60
    generator = torch.Generator().manual_seed(2)
    upstream, rise = torch.randn(2, 37, generator=generator)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = form.scale * (exact[0] @ exact[1].t() + exact[2])
    if form.soft_cap:
        logits = form.soft_cap * torch.tanh(logits / form.soft_cap)
    kept = torch.tensor([token not in form.never for token in range(101)])
    logps = (logits / 0.7).masked_fill(~kept, -1e9).log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    chosen = logps.gather(-1, targets[:, None]).squeeze(-1)
    expected = torch.autograd.grad((upstream * chosen + rise * entropies).sum(), exact)
    out = selective_logprobs(
        *leaves[:2],
        targets,
        bias=leaves[2],
        form=form,
        temperature=0.7,
        chunk_size=chunk_size,
        entropy_gradient=True,
    )
    found = torch.autograd.grad((upstream * out.logps + rise * out.entropies).sum(), leaves)
    for own, one in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), one, rtol=1e-4, atol=2e-5)
    alone = torch.autograd.grad(
        selective_logprobs(*leaves[:2], targets, entropy_gradient=True).entropies.sum(), leaves[1]
    )
    assert alone[0].abs().sum() > 0
    assert not selective_logprobs(*leaves[:2], targets).entropies.requires_grad


def test_the_likeliest_tokens():
    hidden, weight, bias, targets, _ = problem(torch.float32)
    out = selective_logprobs(
        hidden, weight, targets, bias=bias, temperature=0.7, chunk_size=8, top=5
    )
    logps = ((hidden @ weight.t() + bias) / 0.7).log_softmax(-1)
    assert torch.equal(out.likeliest[:, 1:], logps.topk(5).indices)
    assert torch.equal(out.likeliest[:, 0], targets)
    torch.testing.assert_close(out.logps, logps.gather(-1, out.likeliest), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top", [0, 3])
def test_the_sums_of_squared_probabilities(top):
    hidden, weight, bias, targets, _ = problem(torch.float32)
    out = selective_logprobs(
        hidden, weight, targets, bias=bias, temperature=0.7, chunk_size=8, top=top, squares=True
    )
    p = ((hidden.double() @ weight.double().t() + bias.double()) / 0.7).softmax(-1)
    torch.testing.assert_close(out.squares.double(), p.square().sum(-1), rtol=1e-5, atol=1e-6)
    assert not out.squares.requires_grad
    assert selective_logprobs(hidden, weight, targets).squares is None


def architectures():
    """Tiny models that change their logits after the head."""
    small = dict(
        vocab_size=102,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.5,
    )
    return {
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(
                **small, head_dim=32, final_logit_softcapping=5.0, attn_logit_softcapping=None
            )
        ),
        "cohere": lambda: CohereForCausalLM(CohereConfig(**small, logit_scale=0.25)),
        "granite": lambda: GraniteForCausalLM(GraniteConfig(**small, logits_scaling=6.0)),
    }


@pytest.mark.parametrize("name", architectures())
def test_architectures_that_change_their_logits(name, monkeypatch):
    torch.manual_seed(0)
    model = architectures()[name]()
    backend = LocalBackend(model, OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0))
    # As many rows as the model's own head has: products of other sizes may round differently.
    rows, wide = [], []
    monkeypatch.setattr(logprobs, "WIDE_PRODUCTS", True)  # as on a GPU
    backend.module.logprob_head.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    backend.module.logprob_head.register_forward_pre_hook(
        lambda *_about: wide.append(logprobs.WIDE_PRODUCTS)
    )
    model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:-1].numel()))
    check_logprobs(backend)
    assert rows == [32] * 3
    assert wide == [False] and logprobs.WIDE_PRODUCTS
    backend.module.logprob_head.form = PLAIN
    with pytest.raises(UsageError, match="in a way we do not know"):
        check_logprobs(backend)


def test_a_model_that_hangs_on_the_last_bit_is_not_taken_for_another():
    """In bf16 its log-probs under two kinds of attention differ by more than those of other models, by rounding."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    token_ids = torch.tensor(probe_tokens(32, config)).view(2, 16)
    by_attention = own_logprobs(model, token_ids) - own_logprobs(model, token_ids, "eager")
    assert by_attention.abs().mean() > tolerance(model)
    backend = LocalBackend(model, OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0))
    check_logprobs(backend)
    backend.module.logprob_head.form = LogitForm(scale=0.8)
    with pytest.raises(UsageError, match="in a way we do not know"):
        check_logprobs(backend)


def test_bf16_inputs_give_float32_logps_near_float64():
    hidden, weight, bias, targets, upstream = problem(torch.bfloat16, width=8)
    expected, _, gradients = reference(hidden, weight, bias, targets, upstream, 1.0)
    logps = selective_logprobs(hidden, weight, targets, bias=bias, chunk_size=5).logps
    assert logps.dtype == torch.float32
    logps.backward(upstream)
    # One bf16 rounding of logits up to ~16 in size is 2**-5.
    torch.testing.assert_close(logps.double(), expected, rtol=0, atol=0.08)
    assert weight.grad.dtype == torch.bfloat16
    cosine = torch.nn.functional.cosine_similarity(
        weight.grad.double().flatten(), gradients[1].flatten(), dim=0
    )
    assert cosine > 0.999


def test_no_tensor_of_tokens_times_vocabulary_is_made():
    rows, width, vocab, chunk = 512, 8, 4096, 16
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(vocab, (rows,))
    with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
        selective_logprobs(hidden, weight, targets, chunk_size=chunk).logps.sum().backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= 4 * chunk * vocab * (KEPT_CHUNKS + 2) < 4 * rows * vocab
