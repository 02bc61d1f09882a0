"""The supervised phase of the demo: teaches a random model the format, some arithmetic, and a short search.

    python warm_start.py --output_dir model --seed 0

It never sees a held-out problem, and it is meant to be right only some of the time: the traces it learns from
are random searches that give up early (`task.write_trace`). Solving is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import task
import tiny_model
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

STEPS = 880
BATCH = 32
# batches cut from one sorted pool of traces, so that a batch holds traces of similar length
POOL = 16
WARMUP, DECAY = 50, 0.6  # steps of rise; share of the steps over which the rate falls to 0
# Muon for the matrices inside the layers: with AdamW alone the arithmetic stays too weak for RL to build on.
MUON_RATE, ADAMW_RATE = 0.01, 3e-3
# What a verdict counts in the loss, where other tokens count 1. It is one token in seventeen and all that RL has to
# steer by: with equal weights some seeds learn it too late.
VERDICT_WEIGHT = 2.5
TYPICAL_WEIGHT = 30.0  # of a trace: a constant that keeps the loss near one nat


class Batch(NamedTuple):
    """Right-padded traces: `tokens` int64 `[B, L]`, `weights` float32 `[B, L]`, 0 on prompts and padding."""

    tokens: Tensor
    weights: Tensor


def batches(tokenizer, seed: int) -> Iterator[Batch]:
    """Endless batches of `BATCH` traces of similar length."""
    rng, problems = random.Random(seed), task.split()[0]
    while True:
        chosen = [rng.choice(problems) for _ in range(BATCH * POOL)]
        questions = [
            task.prompt(rng.sample(problem.nums, 3), problem.target) + "\n" for problem in chosen
        ]
        traces = [task.write_trace(problem, rng) for problem in chosen]
        token_ids = tokenizer([q + t for q, t in zip(questions, traces, strict=True)])["input_ids"]
        weights = [
            [0.0] * len(q) + trace_weights(t) for q, t in zip(questions, traces, strict=True)
        ]
        yield from cut(token_ids, weights, tokenizer, rng)


def cut(
    token_ids: Sequence[list[int]], weights: Sequence[list[float]], tokenizer, rng: random.Random
) -> Iterator[Batch]:
    """`POOL` batches of `BATCH` traces of similar length, in random order; each trace gets the end token."""
    order = sorted(range(len(token_ids)), key=lambda i: len(token_ids[i]))
    for start in rng.sample(range(0, len(order), BATCH), POOL):
        part = order[start : start + BATCH]
        yield Batch(
            _padded(
                [[*token_ids[i], tokenizer.eos_token_id] for i in part], tokenizer.pad_token_id
            ),
            _padded([[*weights[i], 1.0] for i in part], 0.0),
        )


def trace_weights(trace: str) -> list[float]:
    """The loss weight of each token of a trace, that is of each tag and each other character."""
    return [VERDICT_WEIGHT if symbol in "yn" else 1.0 for symbol in re.findall(r"</?\w+>|.", trace)]


def _padded(rows: Sequence[Sequence[float]], value: float) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Weighted cross-entropy, each trace's sum over a constant: a token counts the same in short traces and long ones.

    Right padding needs no mask: no weighted token looks at it.
    """
    hidden = model.model(batch.tokens).last_hidden_state[:, :-1]
    weights = batch.weights[:, 1:]
    counted = weights > 0
    losses = cross_entropy(
        model.lm_head(hidden[counted]), batch.tokens[:, 1:][counted], reduction="none"
    )
    return (losses * weights[counted]).sum() / (TYPICAL_WEIGHT * len(batch.tokens))


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(step: int, steps: int) -> float:
    """Linear rise, plateau, linear fall to 0."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / (DECAY * steps))


def train(model: nn.Module, data: Iterator[Batch], steps: int) -> None:
    optimizers = make_optimizers(model)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, steps))
        for optimizer in optimizers
    ]
    columns = (
        "warm start",
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}  loss {task.fields[loss]}"),
    )
    model.train()
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), refresh_per_second=2
    ) as progress:
        bar = progress.add_task("", total=steps, loss="-")
        for step, batch in zip(range(steps), data, strict=False):
            loss = loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            progress.update(bar, advance=1)
            if step % 10 == 0:
                progress.update(bar, loss=f"{loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()

    started = time.perf_counter()
    tokenizer, model = tiny_model.make_tokenizer(), tiny_model.make_model(args.seed)
    train(model, batches(tokenizer, args.seed), args.steps)
    made = {"steps": args.steps, "seconds": time.perf_counter() - started}
    tiny_model.save(model, args.output_dir)
    (args.output_dir / "warm_start.json").write_text(json.dumps(made, indent=2) + "\n")
    print(f"warm start: {args.steps} steps in {made['seconds']:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
