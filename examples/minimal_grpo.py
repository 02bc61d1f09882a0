"""A whole GRPO run on one page: the demo's model learns Countdown with the parts of swift_r1, without its trainer.

    examples/mini/make_model.sh countdown models/mini/countdown
    python examples/minimal_grpo.py models/mini/countdown

Each round is sample -> score -> advantages -> loss -> update, as in `swift_r1/training/loop.py`, which adds what a long
run on many processes needs: data, servers, checkpoints, evaluation, PPO.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swift_r1.algorithms.advantages import group_advantages
from swift_r1.algorithms.aggregation import loss_normalizer, mean_metrics, sum_metrics
from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.losses import policy_loss
from swift_r1.models.loading import end_tokens, load_model, load_tokenizer
from swift_r1.models.policy import ModelInputs, Policy
from swift_r1.rewards.graders import grade_countdown
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.wire.protocol import Completion, RolloutRequest, SamplingParams

sys.path.append(str(Path(__file__).parent / "countdown_demo"))
import task  # three numbers, + - *, one target

# a round is PROMPTS * GROUP completions and one optimizer step
PROMPTS, GROUP, MICRO_BATCH = 32, 16, 64
MAX_TOKENS = 160
LEARNING_RATE, WARMUP_STEPS = 3e-4, 3
LOSS = LossConfig(loss_type="grpo", epsilon=0.2, beta=0.0)


@dataclass(frozen=True)
class Sample:
    """A completion of a problem, with its prompt's tokens and its reward: 1 for a right answer, else 0."""

    prompt: tuple[int, ...]
    completion: Completion
    reward: float


class Sampler:
    """Completions of Countdown problems by the policy as it is now, scored."""

    def __init__(self, model, tokenizer, seed: int) -> None:
        ends = end_tokens(model, tokenizer)
        self.engine = TransformersEngine(model, tokenizer, ends, tokenizer.pad_token_id)
        self.tokenizer, self.rng = tokenizer, random.Random(seed)

    def sample(self, problems: Sequence[task.Problem], n: int) -> list[Sample]:
        """`n` completions of each problem, one group after another."""
        requests = [
            RolloutRequest(
                request_id=str(number),
                prompt_token_ids=tuple(
                    self.tokenizer(task.prompt(problem.nums, problem.target) + "\n")["input_ids"]
                ),
                n=n,
                seeds=tuple(self.rng.getrandbits(62) for _ in range(n)),
                sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0),
            )
            for number, problem in enumerate(problems)
        ]
        outputs = self.engine.generate(requests, weight_version=0)
        return [
            Sample(request.prompt_token_ids, completion, self.reward(completion, problem))
            for problem, request, output in zip(problems, requests, outputs, strict=True)
            for completion in output.completions
        ]

    def reward(self, completion: Completion, problem: task.Problem) -> float:
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return grade_countdown(text, problem.nums, problem.target).score


def collate(samples: Sequence[Sample]) -> tuple[ModelInputs, Tensor]:
    """What the policy reads, a row each padded on the right, and the mask `[B, T]` of the completions' tokens."""
    rows = [(*one.prompt, *one.completion.token_ids) for one in samples]
    width = max(map(len, rows))
    token_ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    lengths = torch.tensor([len(one.completion.token_ids) for one in samples])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    # The logits at one position predict the token at the next.
    spots = [
        (row, len(one.prompt) + t) for row, one in enumerate(samples) for t in range(lengths[row])
    ]
    positions = torch.tensor([row * width + place - 1 for row, place in spots])
    return ModelInputs(token_ids, positions, token_ids.flatten()[positions + 1]), mask


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, samples: list[Sample], advantages: Tensor
) -> dict:
    """One optimizer step on all samples; returns the mean metrics. Micro-batches add up to the loss of the whole."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].completion.token_ids))
    parts = [order[start : start + MICRO_BATCH] for start in range(0, len(order), MICRO_BATCH)]
    batches = [collate([samples[i] for i in part]) for part in parts]
    normalizer = torch.stack([loss_normalizer(mask, LOSS) for _, mask in batches]).sum()
    metrics = []
    for part, (inputs, mask) in zip(parts, batches, strict=True):
        found = policy(1.0, *inputs)
        logps, entropies = (
            torch.zeros(mask.shape).masked_scatter(mask, x) for x in (found.logps, found.entropies)
        )
        rollout = torch.tensor([value for i in part for value in samples[i].completion.logprobs])
        output = policy_loss(
            logps,
            logps.detach(),  # one update per round: the policy that sampled is the policy as it is
            advantages[part],
            mask,
            LOSS,
            rollout_logps=torch.zeros(mask.shape).masked_scatter(mask, rollout),
            entropies=entropies,
            normalizer=normalizer,
        )
        output.loss.backward()
        metrics.append(output.metrics)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return mean_metrics(sum_metrics(metrics))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the warm-started model")
    parser.add_argument("--steps", type=int, default=48, help="[48]")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and completions [0]")
    args = parser.parse_args()

    model = load_model(args.model, "float32", gradient_checkpointing=False)
    policy, sampler = Policy(model), Sampler(model, load_tokenizer(str(args.model)), args.seed)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.0
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
    )
    training, held_out = task.split()

    def accuracy() -> float:
        return sum(one.reward for one in sampler.sample(held_out, 4)) / (4 * len(held_out))

    print(f"held-out accuracy before: {accuracy():.3f}", flush=True)
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        samples = sampler.sample(sampler.rng.sample(training, PROMPTS), GROUP)
        rewards = torch.tensor([one.reward for one in samples])
        metrics = update(policy, optimizer, samples, group_advantages(rewards, GROUP))
        warmup.step()
        print(
            f"step {step:2d}  reward {rewards.mean():.3f}  entropy {metrics['entropy']:.3f}  "
            f"logp_diff {metrics['rollout/logp_diff']:.1e}  {time.perf_counter() - started:.1f} s",
            flush=True,
        )
    print(f"held-out accuracy after: {accuracy():.3f}")


if __name__ == "__main__":
    main()
