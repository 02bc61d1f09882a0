"""Trains a tiny model for a few optimizer steps on one backend and writes what came out (run by test_backends.py)."""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from swift_r1.algorithms import LossConfig
from swift_r1.training.batching import round_batch
from swift_r1.training.distributed import join_ranks
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.training.policy import check_fused_head, load_model
from swift_r1.training.step import before_training, deal_round, train_step

COMPLETIONS = 16


def ragged_round():
    generator = torch.Generator().manual_seed(0)

    def tokens(count):
        return torch.randint(3, 100, (count,), generator=generator).tolist()

    prompts = [tokens(4 + i % 3) for i in range(COMPLETIONS)]
    completions = [tokens(2 + 3 * i % 17) for i in range(COMPLETIONS)]
    logprobs = [[-4.0] * len(completion) for completion in completions]
    return round_batch(prompts, completions, logprobs, torch.linspace(-1, 1, COMPLETIONS))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--micro_batches", type=int, required=True, help="of all ranks together")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--loss_type", default="grpo")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    ranks = join_ranks(60, distributed=args.backend != "local")
    optimizer = OptimizerConfig(args.rate, 0.1, 0.9, 0.95, 1e-8, 1.0)

    def load():
        return load_model(args.model, args.dtype, gradient_checkpointing=False)

    if args.backend == "local":
        from swift_r1.training.backends.local import LocalBackend

        backend = LocalBackend(load(), optimizer)
    else:
        from swift_r1.training.backends.deepspeed import DeepSpeedBackend, read_config

        backend = DeepSpeedBackend(load, getattr(torch, args.dtype), optimizer, read_config(args.backend), ranks)
    check_fused_head(backend, 100, ranks.device)
    reference = backend.reference()
    config = LossConfig(beta=0.1, loss_type=args.loss_type)
    steps = []
    for _ in range(args.steps):
        dealt = deal_round(ragged_round(), 1, args.micro_batches // ranks.world_size, ranks)
        (batches,) = before_training(dealt, backend, reference, 0.9, updates=1)
        steps.append(train_step(batches, backend, config, 0.9, args.rate, ranks))
    weights = {name: tensor for bucket in backend.weight_buckets() for name, tensor in bucket}
    generation = backend.generation_model()
    if ranks.is_main:
        same = all(torch.equal(weights[name], value) for name, value in generation.named_parameters())
        save_file({name: tensor.float() for name, tensor in weights.items()}, args.out.with_suffix(".safetensors"))
        args.out.write_text(json.dumps({"steps": steps, "generation_equals_weights": same}))
    ranks.close()


if __name__ == "__main__":
    main()
