"""One optimizer step has one loss and one gradient, however it is cut into micro-batches, packed or padded."""

import importlib.util
from pathlib import Path

import pytest
import torch

from swift_r1.algorithms import LossConfig
from swift_r1.errors import UsageError
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import collate
from swift_r1.training.distributed import Ranks
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.training.policy import check_packing, load_model
from swift_r1.training.step import before_training, deal_round, needs_old_policy, rewards_after_kl

_spec = importlib.util.spec_from_file_location("backend_worker", Path(__file__).with_name("backend_worker.py"))
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)

ALONE = Ranks(0, 1, torch.device("cpu"), None)
CUTS = ("1", "2", "8", "1p", "2p", "8p")
LOSSES = {
    "grpo": LossConfig(beta=0.1),
    "dapo, high entropy": LossConfig(loss_type="dapo", top_entropy_quantile=0.3),
    "dr_grpo, corrected": LossConfig(loss_type="dr_grpo", rollout_importance_sampling_mode="token_truncate"),
    "sapo, KL in the reward": LossConfig(loss_type="sapo", beta=0.1, kl_in_reward=True),
    "cispo": LossConfig(loss_type="cispo"),
    "gspo": LossConfig(importance_sampling_level="sequence", rollout_importance_sampling_mode="sequence_mask"),
}


class Frozen(LocalBackend):
    """Keeps its gradients and takes no step."""

    def step(self, learning_rate):
        self.gradients = {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}
        self.model.zero_grad()
        return torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm().item()


@pytest.fixture(scope="module")
def backends(tiny_model, tiny_model_untied):
    """Llama and Qwen2 (with gradient checkpointing), each with a reference policy that differs from it."""
    pairs = {}
    for name, folder in (("llama", tiny_model), ("qwen2", tiny_model_untied)):
        backend = Frozen(
            load_model(folder, "float32", name == "qwen2"), OptimizerConfig(1e-3, 0.1, 0.9, 0.95, 1e-8, 1.0)
        )
        reference = backend.reference()
        with torch.no_grad():
            for number, parameter in enumerate(reference.policy.parameters()):
                parameter.mul_(1 + 0.01 * (-1) ** number)
        pairs[name] = backend, reference
    return pairs


@pytest.mark.parametrize("overlong_filter", [False, True], ids=["all", "overlong filter"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_cuts_and_packing_change_neither_loss_nor_gradient(backends, model, loss, overlong_filter):
    backend, reference = backends[model]
    config = LOSSES[loss]
    results = []
    for cut in CUTS:
        metrics = worker.step_on(
            worker.ragged_round(), backend, reference if config.beta else None, config, cut, ALONE, overlong_filter
        )
        results.append((metrics, backend.gradients))
    expected, gradients = results[0]
    assert expected["grad_norm"] > 1e-3
    for metrics, found in results[1:]:
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        for name, gradient in gradients.items():
            difference = (found[name] - gradient).norm() / expected["grad_norm"]
            assert difference < 1e-5, (name, difference)


def test_the_entropy_filter_keeps_its_share_of_the_whole_step(backends):
    """Tokens with a policy loss are those above the quantile of all micro-batches, not of each."""
    backend, _ = backends["llama"]
    config = LossConfig(loss_type="dapo", top_entropy_quantile=0.25)
    threshold = worker.step_on(worker.ragged_round(), backend, None, config, "8", ALONE)["entropy/threshold"]
    micro = collate(worker.ragged_round(), range(worker.COMPLETIONS), torch.device("cpu"))
    with torch.no_grad():
        entropies = backend.logprobs(micro.token_ids, micro.positions, micro.targets, 0.9).entropies
    assert threshold == pytest.approx(entropies.quantile(0.75).item(), rel=1e-5)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_filtered_completion_has_no_gradient(backends, loss_type):
    """The gradient is that of zero advantages for the truncated completions; `dapo` divides by the tokens left."""
    backend, _ = backends["llama"]
    batch, config = worker.ragged_round(), LossConfig(loss_type=loss_type)
    worker.step_on(batch, backend, None, config, "4", ALONE, overlong_filter=True)
    filtered = backend.gradients
    cut = batch.truncated.bool()
    batch.rewards[cut] = 0.0
    worker.step_on(batch, backend, None, config, "4", ALONE)
    scale = 1.0
    if loss_type == "dapo":
        scale = batch.completion_lengths.sum() / batch.completion_lengths[~cut].sum()
    for name, gradient in backend.gradients.items():
        torch.testing.assert_close(filtered[name], gradient * scale, rtol=1e-4, atol=1e-6)


def test_the_kl_in_the_reward_is_the_sum_over_each_completion(backends):
    """Against the plain formula, also for completions that the overlong filter leaves out of the loss."""
    backend, reference = backends["llama"]
    batch = worker.ragged_round()
    dealt = deal_round(batch, 1, 4, ALONE, packing=True)
    steps = before_training(dealt, backend, reference, 0.9, old_policy=True, overlong_filter=True)
    found = rewards_after_kl(batch.rewards, steps, 0.1, ALONE)
    tokens = batch.token_ids.split((batch.prompt_lengths + batch.completion_lengths).tolist())
    for number, (ids, prompt) in enumerate(zip(tokens, batch.prompt_lengths.tolist(), strict=True)):
        sums = []
        for model in (backend.model, reference.policy.model):
            with torch.no_grad():
                logps = (model(ids[None]).logits[0, prompt - 1 : -1] / 0.9).log_softmax(-1)
            sums.append(logps.gather(-1, ids[prompt:, None]).sum())
        expected = batch.rewards[number] - 0.1 * (sums[0] - sums[1])
        torch.testing.assert_close(found[number], expected, rtol=1e-4, atol=1e-4)


def test_an_extra_forward_pass_only_where_something_needs_it():
    assert not needs_old_policy(LossConfig(beta=0.1, rollout_importance_sampling_mode="token_mask"), 1)
    assert needs_old_policy(LossConfig(), 2)
    assert needs_old_policy(LossConfig(beta=0.1, kl_in_reward=True), 1)
    assert needs_old_policy(LossConfig(top_entropy_quantile=0.9), 1)


def test_the_reference_moves_by_its_share(backends, tiny_model):
    backend = LocalBackend(load_model(tiny_model, "bfloat16", False), OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0))
    reference = backend.reference()
    before = {name: value.clone() for name, value in reference.policy.model.named_parameters()}
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.add_(1)
    reference.mix_in_policy(0.25)
    for name, value in reference.policy.model.named_parameters():
        torch.testing.assert_close(value.float(), before[name].float() + 0.25, rtol=0.01, atol=0.01)


def test_packing_is_refused_where_samples_would_see_each_other(tiny_model):
    optimizer = OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0)
    backend = LocalBackend(load_model(tiny_model, "float32", False), optimizer)
    check_packing(backend, 102, ALONE.device)
    backend.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UsageError, match="linear_attention"):
        check_packing(backend, 102, ALONE.device)
    backend.model.config.layer_types = None

    def forget_positions(module, args, kwargs):
        return args, {name: value for name, value in kwargs.items() if name != "position_ids"}

    backend.model.base_model.register_forward_pre_hook(forget_positions, with_kwargs=True)
    with pytest.raises(UsageError, match="see the one before"):
        check_packing(backend, 102, ALONE.device)
