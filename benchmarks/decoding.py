"""Where the time of a generated token goes on a CPU: the embedded engine beside transformers' own `generate`, which TRL
and ms-swift call without vLLM.

    python benchmarks/decoding.py --model models/smollm2-135m                      # 4 prompts x 8, 64 tokens each
    python benchmarks/decoding.py --model models/smollm2-135m --torch_dtype bfloat16

Both decode the same prompts in one process, in turns; `plain` is the engine without weights laid out for few rows
(`packed_weights`). The parts are of one more round under torch's profiler, scaled to the median of the others; `python`
is what no operation took. Start it in the environment of `swift` (docs/performance.md).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import torch
from operations import COLUMNS, seconds_by_part
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from swift_r1.models.attention import use_packed_attention
from swift_r1.models.block_functions import use_block_functions
from swift_r1.serving.engines import transformers as engines
from swift_r1.wire.protocol import RolloutRequest, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--torch_dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt_tokens", type=int, default=80)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    dtype = getattr(torch, args.torch_dtype)
    theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    use_block_functions(model)
    use_packed_attention(model)
    engine = engines.TransformersEngine(model, None, [], 0)
    words = random.Random(0)
    prompts = [
        [words.randrange(model.config.vocab_size) for _ in range(args.prompt_tokens)]
        for _ in range(args.prompts)
    ]
    requests = [
        RolloutRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            n=args.completions,
            seeds=tuple(range(number * args.completions, (number + 1) * args.completions)),
            sampling=SamplingParams(max_tokens=args.tokens, ignore_eos=True),
        )
        for number, prompt in enumerate(prompts)
    ]
    token_ids = torch.tensor(prompts).repeat_interleave(args.completions, 0)

    def plain() -> None:
        with patch.object(engines, "packed_weights", lambda *_: nullcontext()):
            engine.generate(requests, 0)

    def generate() -> None:
        with torch.inference_mode():
            theirs.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                do_sample=True,
                min_new_tokens=args.tokens,
                max_new_tokens=args.tokens,
                pad_token_id=0,
            )

    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: engine.generate(requests, 0),
        "ours, plain": plain,
        "transformers": generate,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(args.repeats + 1):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            if repeat:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - started)

    table = Table("side", "ms per token", "tokens per second", *COLUMNS)
    for name, side in sides.items():
        median = statistics.median(seconds[name])
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            started = time.perf_counter()
            side()
            wall = time.perf_counter() - started
        parts = seconds_by_part(profiled, wall)
        table.add_row(
            name,
            f"{1000 * median / args.tokens:.1f}",
            f"{len(token_ids) * args.tokens / median:.0f}",
            *(f"{1000 * median / wall * parts[part] / args.tokens:.1f}" for part in COLUMNS),
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
