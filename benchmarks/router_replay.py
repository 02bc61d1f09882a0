"""Mismatch and learning of a tiny mixture of experts whose engine chooses other experts than its trainer.

    python benchmarks/router_replay.py

Routers of the embedded engine get noise: so much, times a normal number, is added to their logits when they choose; the
gates' weights are of the logits as they are. The model (Qwen3-MoE, random, 2 layers, 2 of 16 experts) is to answer a
number with the next one, again and again; the reward is the share of right tokens. A round is 16 prompts x 8 completions
and 4 updates (`--updates`) on all of them, by GRPO with clipping. Columns: `logp_diff` is the mean difference of a
token's log-probs between engine and trainer before a round's first update, over all rounds; `differing` the share of the
replayed choices that would be others in the trainer; `clipped` of tokens in the last update; the reward is the mean of
the last ten rounds, over the seeds, and for each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.table import Table
from torch.overrides import TorchFunctionMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from swift_r1.algorithms import LossConfig, group_advantages
from swift_r1.models.routing import routing_of
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.training import grpo
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, round_batch
from swift_r1.training.micro_batches import Form
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.protocol import RolloutRequest, RoutesAsked, SamplingParams
from swift_r1.wire.routes import routes_of

PROMPTS, GROUP, TOKENS, NUMBERS = 16, 8, 8, 20
FIRST = 3  # token of the number 0; before it padding, an end and a beginning
ALONE = Ranks(0, 1, torch.device("cpu"), None)
MODES = ("disabled", "R2", "R3")


class NoisyChoice(TorchFunctionMode):
    """Adds noise to the logits of routers when they choose."""

    def __init__(self, spread: float, generator: torch.Generator) -> None:
        super().__init__()
        self.spread, self.generator = spread, generator

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.topk:
            return func(*args, **(kwargs or {}))
        scores, k = args[:2]
        noise = torch.randn(scores.shape, generator=self.generator)
        chosen = (scores.log() + self.spread * noise).topk(k, dim=-1).indices
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def model(seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=FIRST + NUMBERS,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    return Qwen3MoeForCausalLM(config)


@contextmanager
def noise(spread: float, generator: torch.Generator) -> Iterator[None]:
    if not spread:
        yield
        return
    with NoisyChoice(spread, generator):
        yield


def run(mode: str, spread: float, seed: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Trains a model; returns what is known of each round."""
    rate = args.rate
    backend = LocalBackend(model(seed), OptimizerConfig(rate, 0.0, 0.9, 0.95, 1e-8, 1.0))
    engine = TransformersEngine(backend.model, None, [1], 0)
    asked = RoutesAsked(**routing_of(backend.model).shape._asdict()) if mode == "R3" else None
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    found = []
    for number in range(args.rounds):
        numbers = [rng.randrange(NUMBERS) for _ in range(PROMPTS)]
        requests = [
            RolloutRequest(
                request_id=f"{number}/{place}",
                prompt_token_ids=(2, FIRST + one),
                n=GROUP,
                seeds=tuple(rng.getrandbits(60) for _ in range(GROUP)),
                sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
                routes=asked,
            )
            for place, one in enumerate(numbers)
        ]
        with noise(spread, generator):
            outputs = engine.generate(requests, number)
        rows, rewards = [], []
        for one, request, output in zip(numbers, requests, outputs, strict=True):
            right = FIRST + (one + 1) % NUMBERS
            for done in output.completions:
                ids = done.token_ids
                trained = (True,) * len(ids)
                routes = routes_of(done, request)
                prompt = request.prompt_token_ids
                rows.append(TokenSequence(prompt, ids, done.logprobs, trained, routes=routes))
                rewards.append(ids.count(right) / TOKENS)
        batch = round_batch(rows, rewards)
        steps = grpo.split_round(batch, 1, Batching(Form(), PROMPTS * GROUP, GROUP), ALONE)
        steps = grpo.before_training(
            steps, backend, None, 1.0, old_policy=True, notes_routes=mode == "R2"
        )
        (micros,) = steps
        gaps = torch.cat([(one.old_logps - one.rollout_logps)[one.mask].abs() for one in micros])
        advantages = group_advantages(batch.rewards, GROUP)
        for _ in range(args.updates):
            metrics = grpo.train_step(micros, advantages, backend, LossConfig(), 1.0, rate, ALONE)
        differing = grpo.end_replay(backend, ALONE).get("router_replay/differing", 0.0)
        clipped = metrics["clip_ratio/low"] + metrics["clip_ratio/high"]
        reward = statistics.fmean(rewards)
        found.append(
            {
                "reward": reward,
                "logp_diff": gaps.mean().item(),
                "differing": differing,
                "clipped": clipped,
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--noise", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3)
    args = parser.parse_args()
    table = Table(title=f"{args.rounds} rounds, {len(args.seeds)} seeds")
    for column in ("noise", "mode", "logp_diff", "differing", "clipped", "reward", "each seed"):
        table.add_column(column, justify="right")
    for spread in args.noise:
        for mode in MODES if args.updates > 1 else ("disabled", "R3"):
            runs = [run(mode, spread, seed, args) for seed in args.seeds]
            means = {
                name: statistics.fmean(line[name] for lines in runs for line in lines)
                for name in ("logp_diff", "differing", "clipped")
            }
            last = [statistics.fmean(line["reward"] for line in lines[-10:]) for lines in runs]
            figures = (
                f"{means['logp_diff']:.1e}",
                *(f"{means[name]:.3f}" for name in ("differing", "clipped")),
                f"{statistics.fmean(last):.3f}",
                ", ".join(f"{one:.3f}" for one in last),
            )
            table.add_row(f"{spread:g}", mode, *figures)
            print(spread, mode, *figures, file=sys.stderr, flush=True)
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
