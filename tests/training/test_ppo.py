"""PPO's optimizer steps: against a step written token by token, and however the round is cut, packed or spread."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments, parse_arguments
from swift_r1.models.loading import load_critic, load_model, load_tokenizer
from swift_r1.models.policy import Critic
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching
from swift_r1.training.micro_batches import Form
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.training.setup import check_tokens
from tests.training import backend_worker as worker

ALONE = Ranks(0, 1, torch.device("cpu"), None)
OPTIMIZER = OptimizerConfig(1e-3, 0.0, 0.9, 0.95, 1e-8, 1e9)
FLAGS = "--kl_coef 0.1 --gamma 0.9 --lam 0.8 --vf_coef 0.5 --cliprange_value 0.02 --num_ppo_epochs 2 --temperature 0.9"


class Kept:
    """Keeps gradients and takes no step, unless `moves`."""

    moves = False

    def step(self, learning_rate):
        self.gradients = {
            name: parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        if self.moves:
            return super().step(learning_rate)
        self.model.zero_grad()
        return torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm().item()


class KeptBackend(Kept, LocalBackend):
    pass


def with_opinions(model):
    """The critic's head says something."""
    torch.manual_seed(5)
    with torch.no_grad():
        model.score.weight.normal_(std=0.05)
    return model


def make(folder, flags=FLAGS, checkpointing=False):
    """A `Ppo` on the tiny model, its policy and critic no longer what they were at the start."""
    args = parse_arguments(
        RlhfArguments,
        f"--rlhf_type ppo --model {folder} --dataset a.jsonl --reward_funcs format --num_generations 4 --max_steps 8 "
        f"--per_device_train_batch_size {worker.COMPLETIONS} --lr_scheduler_type constant {flags}".split(),
    )
    policy = KeptBackend(load_model(folder, "float32", checkpointing), OPTIMIZER)
    critic = KeptBackend(
        with_opinions(load_critic(folder, "float32", checkpointing)), OPTIMIZER, wrap=Critic
    )
    reference = policy.reference() if args.wants_reference else None
    with torch.no_grad():
        for number, parameter in enumerate(policy.model.parameters()):
            parameter.mul_(1 + 0.01 * (-1) ** number)
    return worker.Ppo(args, policy, critic, reference, 1e-3, ALONE)


def a_round():
    """The ragged round, one of its rewards invalid."""
    batch = worker.ragged_round()
    batch.rewards[5] = torch.nan
    return batch


def gradients_of(ppo, batch, cut):
    """Metrics and gradients of the first step on a round whose old policy and values are not the current ones."""
    budget = int(cut.rstrip("ps"))
    form = worker.FORMS[cut.lstrip("0123456789")]
    steps = ppo.prepared(batch, Batching(form, 1, worker.GROUP, budget))
    targets, metrics = ppo.advantages(batch, steps)
    models = ppo.policy.model, ppo.critic.model
    before = [
        {name: value.clone() for name, value in model.state_dict().items()} for model in models
    ]
    with torch.no_grad():
        for model in models:
            for number, parameter in enumerate(model.parameters()):
                parameter.add_(0.01 * (-1) ** number)
    metrics |= ppo.step(steps[0], targets, 0)
    for model, state in zip(models, before, strict=True):
        model.load_state_dict(state)
    return metrics, targets, ppo.policy.gradients, ppo.critic.gradients


def slow_step(folder, ppo, batch):
    """The same in plain torch, one completion at a time and one token at a time: losses and gradients."""
    args, temperature = ppo.args, 0.9
    policy = AutoModelForCausalLM.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    critic = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    policy.load_state_dict(ppo.policy.model.state_dict())
    critic.load_state_dict(ppo.critic.model.state_dict())
    sequences = batch.token_ids.split((batch.prompt_lengths + batch.completion_lengths).tolist())
    prompts = batch.prompt_lengths.tolist()

    def logps(model, i):
        tokens = sequences[i]
        logits = model(tokens[None]).logits[0] / temperature
        return [logits[t - 1].log_softmax(-1)[tokens[t]] for t in range(prompts[i], len(tokens))]

    def values(i):
        hidden = critic.model(sequences[i][None]).last_hidden_state[0]
        return [critic.score(hidden[t - 1])[0] for t in range(prompts[i], len(sequences[i]))]

    with torch.no_grad():
        old = [[x.item() for x in logps(policy, i)] for i in range(len(batch))]
        ref = [[x.item() for x in logps(reference, i)] for i in range(len(batch))]
        was = [[x.item() for x in values(i)] for i in range(len(batch))]
    advantages, returns = {}, {}
    for i in range(len(batch)):
        if math.isnan(batch.rewards[i]):
            continue
        after, later = 0.0, 0.0
        for t in reversed(range(len(old[i]))):
            reward = -args.kl_coef * (old[i][t] - ref[i][t])
            reward += batch.rewards[i].item() if t == len(old[i]) - 1 else 0.0
            later = reward + args.gamma * after - was[i][t] + args.gamma * args.lam * later
            after = was[i][t]
            advantages[i, t], returns[i, t] = later, later + was[i][t]
    mean = sum(advantages.values()) / len(advantages)
    std = math.sqrt(sum((a - mean) ** 2 for a in advantages.values()) / (len(advantages) - 1))
    advantages = {key: (a - mean) / (std + 1e-4) for key, a in advantages.items()}

    with torch.no_grad():
        for model in (policy, critic):
            for number, parameter in enumerate(model.parameters()):
                parameter.add_(0.01 * (-1) ** number)
    loss = value = torch.zeros(())
    clipped = 0
    for i in range(len(batch)):
        now, worth = logps(policy, i), values(i)
        for t in range(len(now)):
            advantage = advantages.get((i, t), 0.0)
            ratio = (now[t] - old[i][t]).exp()
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if (i, t) in returns:
                error = (worth[t] - returns[i, t]) ** 2
                near = was[i][t] + (worth[t] - was[i][t]).clamp(
                    -args.cliprange_value, args.cliprange_value
                )
                other = (near - returns[i, t]) ** 2
                clipped += (other > error).item()
                value = value + 0.5 * torch.maximum(error, other)
    loss, value = loss / sum(map(len, old)), value / len(returns)
    loss.backward()
    (args.vf_coef * value).backward()
    found = [
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for model in (policy, critic)
    ]
    return {
        "loss": loss.item(),
        "value_loss": value.item(),
        "clip_ratio/value": clipped / len(returns),
    }, *found


def assert_gradients(found, expected, tolerance):
    assert found.keys() == expected.keys()
    size = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert size > 1e-3
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() < tolerance * size, name


def test_a_step_equals_the_loops_over_tokens(tiny_model):
    ppo, batch = make(tiny_model), a_round()
    expected, policy, critic = slow_step(tiny_model, ppo, batch)
    metrics, _, *found = gradients_of(ppo, batch, "60s")
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert 0.05 < metrics["clip_ratio/value"] < 0.95 and metrics["clip_ratio/high"] > 0.01
    assert_gradients(found[0], policy, 1e-4)
    assert_gradients(found[1], critic, 1e-4)
    assert metrics["critic/grad_norm"] > 1e-3 and metrics["kl_penalty"] != 0


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.long)])
def test_cuts_and_packing_change_neither_losses_nor_gradients(tiny_model_untied, checkpointing):
    flags = FLAGS + " --whiten_rewards true --overlong_filter true --critic_warmup_steps 0"
    ppo, batch = make(tiny_model_untied, flags, checkpointing), a_round()
    expected, targets, policy, critic = gradients_of(ppo, batch, "1000")
    for cut in ("40", "1000p", "60s", "24s"):
        metrics, other, *found = gradients_of(ppo, batch, cut)
        torch.testing.assert_close(other.values, targets.values, rtol=1e-4, atol=1e-5)
        for name in expected.keys() - {"micro_batches", "tokens_computed"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert_gradients(found[0], policy, 2e-5)
        assert_gradients(found[1], critic, 2e-5)


def test_only_the_critic_learns_while_it_warms_up(tiny_model):
    ppo, batch = make(tiny_model, FLAGS + " --critic_warmup_steps 1"), a_round()
    ppo.policy.moves = ppo.critic.moves = True
    steps = ppo.prepared(batch, Batching(Form(), 1, worker.GROUP, 100))
    targets, _ = ppo.advantages(batch, steps)
    states = []
    for number in range(2):
        metrics = ppo.step(steps[0], targets, number)
        assert metrics["critic/grad_norm"] > 0 and metrics["critic/learning_rate"] == 1e-3
        assert (metrics["grad_norm"] > 0) == (metrics["learning_rate"] > 0) == (number == 1)
        assert math.isfinite(metrics["loss"]) and metrics["entropy"] > 0
        models = ppo.policy.model, ppo.critic.model
        states.append([model.get_input_embeddings().weight.clone() for model in models])
    start = load_critic(tiny_model, "float32", False).get_input_embeddings().weight
    assert torch.equal(states[0][1], start) is False
    assert not torch.equal(states[0][0], states[1][0])


def test_a_new_critic_says_0_and_a_saved_one_what_it_said(tiny_model, tmp_path):
    inputs = worker_inputs()
    fresh = LocalBackend(load_critic(tiny_model, None, False), OPTIMIZER, wrap=Critic)
    assert fresh.values(inputs).count_nonzero() == 0 and fresh.values(inputs).dtype == torch.float32
    model = with_opinions(load_critic(tiny_model, None, False))
    model.save_pretrained(tmp_path / "critic")
    saved, again = (
        LocalBackend(m, OPTIMIZER, wrap=Critic)
        for m in (model, load_critic(tmp_path / "critic", None, False))
    )
    assert saved.values(inputs).abs().mean() > 0.01
    torch.testing.assert_close(saved.values(inputs), again.values(inputs))
    model.score = torch.nn.Linear(64, 3, bias=False)
    model.config.num_labels = 3
    model.save_pretrained(tmp_path / "three")
    with pytest.raises(UsageError, match="gives 3 numbers per token: a critic gives one"):
        load_critic(tmp_path / "three", None, False)


def worker_inputs():
    return worker.collate_all(worker.ragged_round())


def test_a_critic_of_other_tokens_is_refused(tiny_model, tmp_path):
    tokenizer = load_tokenizer(str(tiny_model))
    check_tokens(str(tiny_model), "--critic_model", tokenizer)
    other = load_tokenizer(str(tiny_model))
    other.add_tokens(["<more>"])
    other.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    with pytest.raises(UsageError, match="has another tokenizer than --model"):
        check_tokens(str(tmp_path), "--critic_model", tokenizer)
