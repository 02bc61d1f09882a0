"""Whether drafts would make generation faster: an upper bound, without an engine that uses them.

    python benchmarks/drafting.py --model models/smollm2-135m

The engine draws a token where a uniform number of its seed meets the cumulative distribution, so a draft is accepted
exactly where it is the token drawn, and completions do not change. So what would be accepted is counted on completions
that were made without drafts: at each step the last tokens are looked up in the prompt and the completion so far
(`prompt`), and in the completions of the same prompt from an earlier epoch too (`epochs`); what followed there is the
draft. The cost of a step is measured as a forward pass over 1 + drafted tokens a row. `speedup` is tokens a step over
that cost; looking up, and rows of a batch that go on at different places, would only make it smaller.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from swift_r1.models.loading import load_model, load_tokenizer
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.wire.protocol import RolloutRequest, SamplingParams

LONGEST, SHORTEST = 4, 2  # tokens that must be the same before a draft


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2-135m", help="`make smollm2` builds it")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3], help="tokens of a draft")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    model, tokenizer = (
        load_model(args.model, args.dtype, gradient_checkpointing=False),
        load_tokenizer(args.model),
    )
    prompts = countdown(tokenizer, args.prompts)
    engine = TransformersEngine(
        model, tokenizer, (tokenizer.eos_token_id,), tokenizer.pad_token_id or 0
    )
    epochs = []
    for epoch in range(2):
        requests = [
            RolloutRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                n=args.generations,
                seeds=tuple(
                    range(
                        10**6 * epoch + 1000 * number,
                        10**6 * epoch + 1000 * number + args.generations,
                    )
                ),
                sampling=SamplingParams(max_tokens=args.new_tokens),
            )
            for number, prompt in enumerate(prompts)
        ]
        outputs = engine.generate(requests, 0)
        epochs.append([[one.token_ids for one in output.completions] for output in outputs])
    costs = {
        batch: step_seconds(
            model, prompts[0], batch, [1, *(1 + draft for draft in args.drafts)], args.repeats
        )
        for batch in args.batches
    }
    table = Table(title="speedup by drafts, at most")
    for column in (
        "looked up in",
        "draft",
        "tokens a step",
        *(f"batch {batch}" for batch in args.batches),
    ):
        table.add_column(column, justify="right")
    for name in ("prompt", "epochs"):
        for draft in args.drafts:
            tokens = steps = 0
            for prompt, earlier, completions in zip(prompts, *epochs, strict=True):
                for completion in completions:
                    steps += count_steps(
                        prompt, completion, earlier if name == "epochs" else (), draft
                    )
                    tokens += len(completion)
            ratios = [
                tokens / steps * costs[batch][1] / costs[batch][1 + draft] for batch in args.batches
            ]
            table.add_row(
                name, str(draft), f"{tokens / steps:.2f}", *(f"{ratio:.2f}" for ratio in ratios)
            )
    Console(width=120).print(table)


def countdown(tokenizer, count: int) -> list[tuple[int, ...]]:
    """Token ids of Countdown problems in the model's chat template."""
    rng, prompts = random.Random(0), []
    for _ in range(count):
        numbers = [rng.randint(1, 99) for _ in range(4)]
        text = f"Using the numbers {numbers}, write an equation that equals {sum(numbers)}. Think step by step."
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )
        prompts.append(tuple(ids["input_ids"] if not isinstance(ids, list) else ids))
    return prompts


def count_steps(
    prompt: Sequence[int], completion: Sequence[int], earlier: Sequence[Sequence[int]], draft: int
) -> int:
    """Forward passes that a completion takes where each may check a draft of `draft` tokens."""
    steps = done = 0
    while done < len(completion):
        guess = look_up([*prompt, *completion[:done]], [[*prompt, *one] for one in earlier], draft)
        accepted = 0
        for guessed, drawn in zip(guess, completion[done:], strict=False):
            if guessed != drawn:
                break
            accepted += 1
        done += accepted + 1
        steps += 1
    return steps


def look_up(text: list[int], earlier: list[list[int]], draft: int) -> list[int]:
    """What followed the last tokens of `text` where they stood before, the longest match and the latest place first;
    `[]` where they are new."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        last = text[-length:]
        for source in (text[:-1], *earlier):
            for start in range(len(source) - length, -1, -1):
                if source[start : start + length] == last and start + length < len(source):
                    return source[start + length : start + length + draft]
    return []


@torch.inference_mode()
def step_seconds(
    model: PreTrainedModel, prompt: Sequence[int], batch: int, lengths: Sequence[int], repeats: int
) -> dict[int, float]:
    """Median seconds of a forward pass over each number of new tokens a row, alternating."""
    model.eval()
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    cache = DynamicCache(config=model.config)
    model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(batch)
    for _ in range(repeats + 1):
        for length in lengths:
            tokens = torch.full((batch, length), prompt[-1])
            started = time.perf_counter()
            model(tokens, past_key_values=cache)
            seconds[length].append(time.perf_counter() - started)
            cache.crop(-length)
    return {length: statistics.median(values[1:]) for length, values in seconds.items()}


if __name__ == "__main__":
    main()
