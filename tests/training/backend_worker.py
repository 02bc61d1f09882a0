"""Trains a tiny model for a few optimizer steps on one backend and writes what came out (run by test_backends.py)."""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from swift_r1.algorithms import LossConfig
from swift_r1.training.batching import Cut, round_batch
from swift_r1.training.distributed import join_ranks
from swift_r1.training.lora import LoraSettings, policy_weights
from swift_r1.training.micro_batches import Form
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.training.policy import load_model
from swift_r1.training.probes import check_fused_head
from swift_r1.training.step import (
    before_training,
    deal_round,
    needs_old_policy,
    rewards_after_kl,
    train_step,
)

COMPLETIONS, GROUP = 16, 4
FORMS = {"": Form(), "p": Form(packed=True), "s": Form(packed=True, shared=True)}


def ragged_round():
    """16 completions of 2 to 16 tokens; a quarter of them truncated, engine log-probs that are off."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count):
        return torch.randint(3, 100, (count,), generator=generator).tolist()

    prompts = [prompt for i in range(COMPLETIONS // GROUP) for prompt in [tokens(4 + i % 3)] * GROUP]
    completions = [tokens(2 + 3 * i % 17) for i in range(COMPLETIONS)]
    logprobs = [[-8.0] * len(completion) for completion in completions]
    truncated = [i % 4 == 3 for i in range(COMPLETIONS)]
    return round_batch(prompts, completions, logprobs, torch.linspace(-0.5, 1.5, COMPLETIONS).tolist(), truncated)


def step_on(batch, backend, reference, config, cut, ranks, overlong_filter=False, rate=1e-3):
    """One optimizer step on a round, its rewards taken as advantages unless the KL goes into them.

    `cut` is the token budget of a micro-batch, with a `p` behind it where they are packed, an `s` where completions
    share their prompt too.
    """
    budget = int(cut.rstrip("ps"))
    dealt = deal_round(batch, 1, Cut(FORMS[cut.lstrip("0123456789")], 1, GROUP, budget), ranks)
    old = needs_old_policy(config, 1)
    steps = before_training(dealt, backend, reference, 0.9, old_policy=old, overlong_filter=overlong_filter)
    advantages = rewards_after_kl(batch.rewards, steps, config.beta, ranks) if config.kl_in_reward else batch.rewards
    return train_step(steps[0], advantages, backend, config, 0.9, rate, ranks)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--cuts", nargs="+", required=True, help="of each step, see `step_on`")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--loss", type=json.loads, default={}, help="fields of LossConfig, and overlong_filter")
    parser.add_argument("--mix_after", type=int, help="the step after which the reference moves to the policy")
    parser.add_argument("--lora_rank", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    ranks = join_ranks(60, distributed=args.backend != "local")
    optimizer = OptimizerConfig(args.rate, 0.1, 0.9, 0.95, 1e-8, 1.0)

    def load():
        torch.manual_seed(0)
        lora = LoraSettings(args.lora_rank, 16, ("all-linear",)) if args.lora_rank else None
        return load_model(args.model, args.dtype, gradient_checkpointing=False, lora=lora)

    if args.backend == "local":
        from swift_r1.training.backends.local import LocalBackend

        backend = LocalBackend(load(), optimizer)
    else:
        from swift_r1.training.backends.deepspeed import DeepSpeedBackend, read_config

        backend = DeepSpeedBackend(load, getattr(torch, args.dtype), optimizer, read_config(args.backend), ranks)
    check_fused_head(backend, 100, ranks.device)
    reference = backend.reference()
    overlong_filter = args.loss.pop("overlong_filter", False)
    config = LossConfig(**{"beta": 0.1} | args.loss)
    steps = []
    for cut in args.cuts:
        steps.append(step_on(ragged_round(), backend, reference, config, cut, ranks, overlong_filter, args.rate))
        if len(steps) == args.mix_after:
            reference.mix_in_policy(0.6)
    weights = {
        name: tensor for bucket in backend.weight_buckets(policy_weights(backend.model)) for name, tensor in bucket
    }
    generation = backend.generation_model()
    if ranks.is_main:
        same = all(torch.equal(weights[w.name], w.value()) for w in policy_weights(generation))
        save_file({name: tensor.float() for name, tensor in weights.items()}, args.out.with_suffix(".safetensors"))
        args.out.write_text(json.dumps({"steps": steps, "generation_equals_weights": same}))
    ranks.close()


if __name__ == "__main__":
    main()
