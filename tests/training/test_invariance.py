"""One optimizer step has one loss and one gradient, however it is cut into micro-batches, packed or padded."""

import copy

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.methods import ESTIMATORS
from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments, parse_arguments
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.models.attention import use_packed_attention
from swift_r1.models.loading import load_model
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching
from swift_r1.training.grpo import (
    advantages_of_tokens,
    before_training,
    rewards_after_kl,
    split_round,
)
from swift_r1.training.micro_batches import SHARED, Form
from swift_r1.training.model_checks import (
    LEAST_SAVING,
    check_logprobs,
    choose_batching,
)
from swift_r1.training.optimizer import OptimizerConfig
from tests.training import backend_worker as worker

ALONE = Ranks(0, 1, torch.device("cpu"), None)
CUTS = ("1000", "24", "40p", "60s")
MORE_CUTS = ("120", "1000p", "1000s", "24s")
COUNTED = ("micro_batches", "tokens_computed")
LOSSES = {
    "grpo": LossConfig(beta=0.1),
    "dapo, high entropy": LossConfig(loss_type="dapo", top_entropy_quantile=0.3),
    "dr_grpo, corrected": LossConfig(
        loss_type="dr_grpo", rollout_importance_sampling_mode="token_truncate"
    ),
    "sapo, KL in the reward": LossConfig(loss_type="sapo", beta=0.1, kl_in_reward=True),
    "cispo, entropy bonus": LossConfig(loss_type="cispo", entropy_coef=0.5),
    "fipo": LossConfig(
        loss_type="fipo", beta=0.1, delta=1.3, fipo_decay_rate=4, fipo_clip_range=0.5
    ),
    "clip_cov": LossConfig(loss_type="clip_cov", clip_cov_ratio=0.2, clip_cov_lb=0.0),
    "kl_cov": LossConfig(loss_type="kl_cov", kl_cov_ratio=0.2),
    "gmpo": LossConfig(loss_type="gmpo", epsilon=0.1),
    "dppo_kl": LossConfig(loss_type="dppo_kl", epsilon=1e-4),
    "real": LossConfig(loss_type="real", beta=0.1, num_generations=worker.GROUP),
    "gspo": LossConfig(
        importance_sampling_level="sequence", rollout_importance_sampling_mode="sequence_mask"
    ),
}


class Frozen(LocalBackend):
    """Keeps its gradients and takes no step."""

    def step(self, learning_rate):
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}
        self.model.zero_grad()
        return torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm().item()


def qwen3():
    """Four query heads to a key head, heads wider than the model has room for, normalised queries and keys."""
    config = Qwen3Config(
        vocab_size=102,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(config)
    use_packed_attention(model)
    return model


def with_adapters(folder):
    """Llama with adapters that are no longer the identity they start as."""
    torch.manual_seed(4)
    model = load_model(
        folder,
        "float32",
        gradient_checkpointing=False,
        trained=AdapterArguments(
            train_type="lora", lora_rank=4, lora_alpha=8, target_modules=["all-linear"]
        ),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    return model


@pytest.fixture(scope="module")
def backends(tiny_model, tiny_model_untied):
    """Llama, Qwen2 (with gradient checkpointing), Qwen3 and Llama with LoRA, each with a reference that differs."""
    models = {
        "llama": load_model(tiny_model, "float32", gradient_checkpointing=False),
        "qwen2": load_model(tiny_model_untied, "float32", gradient_checkpointing=True),
        "qwen3": qwen3(),
        "lora": with_adapters(tiny_model),
    }
    pairs = {}
    for name, model in models.items():
        backend = Frozen(model, OptimizerConfig(1e-3, 0.1, 0.9, 0.95, 1e-8, 1.0))
        reference = backend.reference()
        if name != "lora":
            with torch.no_grad():
                for number, parameter in enumerate(reference.policy.parameters()):
                    parameter.mul_(1 + 0.01 * (-1) ** number)
        pairs[name] = backend, reference
    return pairs


@pytest.mark.parametrize(
    "cut", [*CUTS[1:], *(pytest.param(cut, marks=pytest.mark.long) for cut in MORE_CUTS)]
)
def test_experts_answers_change_neither_by_how_they_are_cut(backends, cut):
    """And mu is between the two losses."""
    backend, _ = backends["llama"]
    found = {}
    for mu, own in ((0.0, "1000"), (0.25, "1000"), (0.25, cut), (1.0, "1000")):
        metrics = worker.step_on(
            worker.ragged_round(), backend, None, LossConfig(), own, ALONE, mu=mu
        )
        found[mu, own] = metrics, backend.gradients
    (policy, own), (both, mixed), (expected, cut_up), (experts, theirs) = found.values()
    assert both["loss"] == pytest.approx(0.75 * policy["loss"] + 0.25 * experts["loss"], rel=1e-5)
    assert both["chord/mu"] == 0.25 and both["chord/nll"] == pytest.approx(
        expected["chord/nll"], rel=1e-5
    )
    for name, gradient in mixed.items():
        assert (gradient - 0.75 * own[name] - 0.25 * theirs[name]).norm() / both["grad_norm"] < 1e-5
        assert (gradient - cut_up[name]).norm() / both["grad_norm"] < 1e-5


def models_and_losses():
    """Every loss on one model and one on the others; all of them, filtered or not, in the long tests."""
    for model in ("llama", "qwen2", "qwen3", "lora"):
        for loss in LOSSES:
            for overlong_filter in (False, True):
                short = not overlong_filter and (model == "llama" or loss == "grpo")
                short |= (model, loss) == ("llama", "dapo, high entropy")
                name = f"{model}-{loss}-{'overlong filter' if overlong_filter else 'all'}"
                marks = () if short else pytest.mark.long
                yield pytest.param(model, loss, overlong_filter, id=name, marks=marks)


@pytest.mark.parametrize(("model", "loss", "overlong_filter"), [*models_and_losses()])
def test_cuts_packing_and_shared_prompts_change_neither_loss_nor_gradient(
    backends, model, loss, overlong_filter
):
    backend, reference = backends[model]
    config = LOSSES[loss]
    batch = worker.ragged_round()
    results = []
    for cut in (*CUTS, *MORE_CUTS) if loss == "grpo" else CUTS:
        metrics = worker.step_on(
            batch,
            backend,
            reference if config.beta else None,
            config,
            cut,
            ALONE,
            overlong_filter,
        )
        results.append((metrics, backend.gradients))
    for metrics, _ in results:
        counted = [metrics.pop(name) for name in COUNTED]
        assert min(counted) > 0
    expected, gradients = results[0]
    assert expected["grad_norm"] > 1e-3
    for metrics, found in results[1:]:
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        for name, gradient in gradients.items():
            difference = (found[name] - gradient).norm() / expected["grad_norm"]
            assert difference < 1e-5, (name, difference)


@pytest.mark.parametrize("cut", ["40", pytest.param("70p", marks=pytest.mark.long), "100s"])
def test_what_teaches_nothing_has_no_backward_pass(backends, monkeypatch, cut):
    """Two of four groups; gradient and metrics are those of a backward pass over all."""
    backend, reference = backends["llama"]
    batch = worker.ragged_round()
    batch.rewards[worker.GROUP : 3 * worker.GROUP] = 0.0
    expected = worker.step_on(batch, backend, None, LossConfig(), "1000", ALONE, apart=False)
    gradients, passes, backward = backend.gradients, [], backend.backward
    monkeypatch.setattr(
        backend, "backward", lambda loss, last: (passes.append(last), backward(loss, last))
    )
    found = worker.step_on(batch, backend, None, LossConfig(), cut, ALONE)
    assert 0 < len(passes) < found["micro_batches"] and passes == [False] * (len(passes) - 1) + [
        True
    ]
    for name in expected.keys() - set(COUNTED):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    for name, gradient in gradients.items():
        assert (backend.gradients[name] - gradient).norm() / expected["grad_norm"] < 1e-5, name
    passes.clear()
    with_kl = worker.step_on(batch, backend, reference, LossConfig(beta=0.1), cut, ALONE)
    assert len(passes) == with_kl["micro_batches"]
    batch.rewards[:] = 0.0
    passes.clear()
    assert worker.step_on(batch, backend, None, LossConfig(), cut, ALONE)["grad_norm"] == 0
    assert passes == [True]


def test_the_kl_in_the_reward_is_the_sum_over_each_completion(backends):
    """Against the plain formula, also for completions that the overlong filter leaves out of the loss."""
    backend, reference = backends["llama"]
    batch = worker.ragged_round()
    split = split_round(
        batch, 1, Batching(Form(packed=True, shared=True), 1, worker.GROUP, 70), ALONE
    )
    steps = before_training(split, backend, reference, 0.9, old_policy=True)
    found = rewards_after_kl(batch, steps, 0.1, ALONE)
    tokens = batch.token_ids.split((batch.prompt_lengths + batch.completion_lengths).tolist())
    for number, (ids, prompt) in enumerate(zip(tokens, batch.prompt_lengths.tolist(), strict=True)):
        sums = []
        for model in (backend.model, reference.policy.model):
            with torch.no_grad():
                logps = (model(ids[None]).logits[0, prompt - 1 : -1] / 0.9).log_softmax(-1)
            sums.append(logps.gather(-1, ids[prompt:, None]).sum())
        expected = batch.rewards[number] - 0.1 * (sums[0] - sums[1])
        torch.testing.assert_close(found[number], expected, rtol=1e-4, atol=1e-4)


def test_advantages_of_tokens_do_not_depend_on_the_cut(backends):
    """Of the optimal token baseline, corrected for an engine that is off."""
    backend, _ = backends["llama"]
    batch = worker.ragged_round()
    config = LossConfig(
        num_generations=worker.GROUP, rollout_importance_sampling_mode="token_truncate"
    )
    estimator = ESTIMATORS["optimal_token_baseline"]
    found = []
    for form, budget in ((Form(), 1000), (SHARED, 60)):
        split = split_round(batch, 1, Batching(form, 1, worker.GROUP, budget), ALONE)
        steps = before_training(split, backend, None, 0.9, old_policy=True, squares=True)
        found.append(advantages_of_tokens(batch.rewards, batch, steps, estimator, config, ALONE))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    plain = batch.rewards - batch.rewards.view(-1, worker.GROUP).mean(1).repeat_interleave(4)
    difference = (found[0] - plain[:, None])[batch.token_mask()].abs()
    assert 1e-4 < difference.median() < 1


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.long), "lora"])
def test_beginnings_in_common_change_neither_loss_nor_gradient(backends, name):
    """A tree of several levels, in float64: of float32 Adam and a large KL would make more than the tolerance."""
    backend, reference = copy.deepcopy(backends[name])
    backend.module.double()
    if name != "lora":  # whose reference is the model itself
        reference.policy.double()
    batch = worker.ragged_round(alike=True)
    found = {}
    for cut in ("1000", "1000s", "60s", "24s"):
        metrics = worker.step_on(
            batch, backend, reference, LossConfig(beta=0.1), cut, ALONE, apart=False
        )
        found[cut] = metrics, backend.gradients
    metrics, gradients = found["1000"]
    shared = found["1000s"][0]["tokens_computed"]
    assert shared < batch.completion_lengths.sum() + batch.prompt_lengths[:: worker.GROUP].sum()
    for other, own in found.values():
        assert other["kl"] == pytest.approx(metrics["kl"], rel=1e-6)
        assert other["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-6)
        for weight, gradient in gradients.items():
            assert (own[weight] - gradient).norm() / metrics["grad_norm"] < 1e-6


def test_packing_is_off_where_samples_would_see_each_other(tiny_model, caplog):
    def forgetting(*names):
        def hook(module, args, kwargs):
            return args, {name: value for name, value in kwargs.items() if name not in names}

        return backend.model.base_model.register_forward_pre_hook(hook, with_kwargs=True)

    def found(**flags):
        args = parse_arguments(
            RlhfArguments,
            f"--rlhf_type grpo --model {tiny_model} --dataset a.jsonl --reward_funcs format --num_generations 4 "
            "--per_device_train_batch_size 4".split()
            + [word for name, value in flags.items() for word in (f"--{name}", value)],
        )
        return choose_batching(args, backend)

    backend = LocalBackend(
        load_model(tiny_model, "float32", False), OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0)
    )
    check_logprobs(backend)
    assert (found().form, found().share_from) == (Form(), LEAST_SAVING)
    assert found(share_prompt="true").share_from == 0
    assert found(share_prompt="false").share_from is None
    assert found(share_prompt="false", packing="true").form == Form(packed=True)
    backend.model.config.layer_types = ["full_attention", "linear_attention"]
    assert found().share_from is None
    with pytest.raises(UsageError, match=r"--packing true: .*linear_attention"):
        found(packing="true")
    backend.model.config.layer_types = None
    hook = forgetting("position_ids")
    with caplog.at_level("INFO"):
        assert found().share_from is None
    assert "see its neighbours" in caplog.text
    with pytest.raises(UsageError, match=r"--share_prompt true: .* see its neighbours"):
        found(share_prompt="true")
    hook.remove()
    forgetting("packed_row", "attention_mask", "position_ids")
    with pytest.raises(UsageError, match=r"--packing true: .* see its neighbours"):
        found(packing="true", share_prompt="false")
