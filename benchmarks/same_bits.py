"""What `--batch_invariant true` costs on a CPU: processor seconds of a round's completions, of its log-probs and of a
training step without the optimizer, with the flag and without, in turns.

    OMP_NUM_THREADS=1 python benchmarks/same_bits.py [--layers 6] [--times 3]

A random Llama in float32 as wide as SmolLM2-135M; 8 prompts of 100 tokens with 4 completions of 64 each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import nullcontext

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from swift_r1.models.invariant import invariant_forward
from swift_r1.models.loading import prepare
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.serving.engines.invariant import InvariantEngine
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import collate, round_batch
from swift_r1.training.micro_batches import SHARED
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.protocol import RolloutRequest, SamplingParams

VOCABULARY = 16384
PROMPTS = 8
GROUP = 4
PARTS = ("completions", "log-probs", "forward and backward")


def model_of(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    prepare(model, gradient_checkpointing=False)
    return model


def round_of(backend: LocalBackend, same_bits: bool) -> list[float]:
    """Returns the seconds of each of `PARTS`."""
    kind = InvariantEngine if same_bits else TransformersEngine
    engine = kind(backend.model, None, (2,), 0)
    draw = random.Random(0)
    requests = [
        RolloutRequest(
            request_id=str(number),
            prompt_token_ids=tuple(draw.randrange(3, VOCABULARY) for _ in range(100)),
            n=GROUP,
            seeds=tuple(range(GROUP)),
            sampling=SamplingParams(max_tokens=64, ignore_eos=True),
        )
        for number in range(PROMPTS)
    ]
    with invariant_forward() if same_bits else nullcontext():
        start = time.process_time()
        outputs = engine.generate(requests, 0)
        seconds = [time.process_time() - start]

        rows = [
            TokenSequence.of_answer(request.prompt_token_ids, one.token_ids)
            for request, output in zip(requests, outputs, strict=True)
            for one in output.completions
        ]
        batch = round_batch(rows, [0.0] * len(rows))
        groups = [tuple(range(first, first + GROUP)) for first in range(0, len(rows), GROUP)]
        for grad in (False, True):
            start = time.process_time()
            for group in groups:
                inputs = collate(batch, [group], SHARED, backend.device, True).inputs
                with torch.set_grad_enabled(grad):
                    logps = backend.logprobs(inputs, 1.0).logps
                if grad:
                    logps.sum().backward()
            seconds.append(time.process_time() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    backend = LocalBackend(model_of(args.layers), OptimizerConfig(0.0, 0.0, 0.9, 0.95, 1e-8, 1.0))
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(args.times + 1):
        for same_bits, rounds in found.items():
            rounds.append(round_of(backend, same_bits))
    table = Table("", "without", "with --batch_invariant", "ratio")
    for number, part in enumerate(PARTS):
        # the first of each is not counted
        plain, same = (statistics.median(one[number] for one in found[k][1:]) for k in found)
        table.add_row(part, f"{plain:.2f} s", f"{same:.2f} s", f"{same / plain:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
