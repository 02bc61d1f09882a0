"""Our side of `train_step.py`: the backend, batching and step that `swift rlhf` uses."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from step_work import Clock, Work, peak_bytes, report

from swift_r1.algorithms.advantages import group_advantages
from swift_r1.algorithms.config import LossConfig
from swift_r1.models import attention, loading, logprobs
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, round_batch
from swift_r1.training.grpo import before_training, split_round, train_step
from swift_r1.training.micro_batches import Form
from swift_r1.training.model_checks import LEAST_SAVING
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.protocol import RolloutRequest, SamplingParams


def main() -> None:
    side, work = sys.argv[1], Work.read(sys.argv[2])
    if "unblocked" in side:
        loading.use_block_functions = lambda _model: 0
    if "flash" in side:
        attention._in_pieces = lambda _query: False
    if "whole-logits" in side:
        logprobs.logits_bytes = lambda _device: 2**60
    step, backend = stepper(side, work)
    clock = Clock()
    clock.wrap(backend, "logprobs", "forward")
    clock.wrap(backend, "backward", "backward")
    clock.wrap(backend, "step", "optimizer")
    steps = []
    for _ in range(work.steps):
        started = time.perf_counter()
        step()
        steps.append(clock.take() | {"train": time.perf_counter() - started})
    peak, generate = peak_bytes(), None
    if work.generate:
        generate = time_generation(backend.model, work)
    report(steps, peak, generate, backend.model, work.dtype)


def stepper(
    side: str, work: Work, backend: LocalBackend | None = None
) -> tuple[Callable[[], object], LocalBackend]:
    """Returns what trains one step of this work, and the backend it does so with, which is made where none is given."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if backend is None:
        model = loading.load_model(work.model, work.dtype, work.checkpointing).to(device)
        backend = LocalBackend(model, OptimizerConfig(1e-6, 0.0, 0.9, 0.999, 1e-8, 1.0))
    ranks = Ranks(0, 1, device, None)
    share = None if "padded" in side or "packed" in side else LEAST_SAVING
    cut = Batching(
        Form(packed="packed" in side), work.micro, work.generations, work.max_tokens, share
    )
    rewards = [float(number % 2) for number in range(len(work.completion_ids))]
    prompts = [prompt for prompt in work.prompt_ids for _ in range(work.generations)]
    rows = [
        TokenSequence(prompt, ids, [-1.0] * len(ids), [True] * len(ids))
        for prompt, ids in zip(prompts, work.completion_ids, strict=True)
    ]
    batch = round_batch(rows, rewards)
    advantages = group_advantages(batch.rewards, work.generations)

    def step() -> object:
        split = split_round(batch, 1, cut, ranks)
        (micro_batches,) = before_training(
            split, backend, None, 1.0, old_policy="old-forward" in side
        )
        return train_step(micro_batches, advantages, backend, LossConfig(), 1.0, 1e-6, ranks)

    return step, backend


def time_generation(model: torch.nn.Module, work: Work) -> float:
    # no end token: every completion has its full length
    engine = TransformersEngine(model, None, (), 0)
    requests = [
        RolloutRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            n=work.generations,
            seeds=tuple(range(work.generations)),
            sampling=SamplingParams(max_tokens=work.new_tokens),
        )
        for number, prompt in enumerate(work.prompt_ids)
    ]
    clock = Clock()
    with clock.part("generate"):
        engine.generate(requests, weight_version=0)
    return clock.take()["generate"]


if __name__ == "__main__":
    main()
