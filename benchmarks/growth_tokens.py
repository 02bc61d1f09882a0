"""What a completion costs by its number of tokens: generation, training, token record, completions.jsonl, the page.

    python benchmarks/growth_tokens.py [--tokens 128 512 2048 8192] [--size 5M] [--parts generate train record]
                                       [--plot]

A random model of Qwen2's architecture in float32; one prompt of 64 tokens with `--completions` of exactly that many
tokens each. `generate` is the embedded engine; `train` one optimizer step with gradient checkpointing, a completion a
micro-batch; `shared` the same where the completions of a micro-batch share their prompt; `record` what is written of
them, and how `swift view` reads it back. Each part of each length runs in a process of its own. CPU seconds (one
thread), and the most memory (MB) in addition to what the process held before.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from growth_plot import growth
from growth_tools import MB, SIZES, measured, run_ranks, write_model

from swift_r1.models.loading import load_model
from swift_r1.runtime.ranks import Ranks

PROMPT = 64
PARTS = ("generate", "train", "shared", "record")
SERIES = {
    "generate_s": "generate, s",
    "generate_MB": "MB",
    "train_s": "train, s",
    "train_MB": "MB",
    "shared_s": "train, shared prompt, s",
    "shared_MB": "MB",
    "rewards_s": "rewards, s",
    "jsonl_s": "completions.jsonl, s",
    "record_s": "token record, s",
    "record_bytes_a_token": "bytes a token",
    "group_page_s": "page of a group, s",
    "token_page_s": "page of tokens, s",
    "token_page_MB": "MB",
    "view_MB": "memory of both, MB",
}
PLOTTED = ("generate_s", "train_s", "rewards_s", "record_s", "group_page_s", "token_page_s")
WORDS = ["so", "the", "98", "19", "=", "minus", "wait", "let", "me", "check"]


def generate(model: Path, tokens: int, completions: int) -> dict[str, float]:
    from swift_r1.serving.engines.transformers import TransformersEngine
    from swift_r1.wire.protocol import RolloutRequest, SamplingParams

    engine = TransformersEngine(
        load_model(model, "float32", False).requires_grad_(False), None, (0,), 0
    )

    def ask(count: int, length: int) -> None:
        sampling = SamplingParams(max_tokens=length, ignore_eos=True)
        prompt = tuple(range(PROMPT))
        engine.generate(
            [
                RolloutRequest(
                    request_id="-",
                    prompt_token_ids=prompt,
                    n=count,
                    seeds=tuple(range(count)),
                    sampling=sampling,
                )
            ],
            0,
        )

    ask(1, 8)
    with measured() as found:
        ask(completions, tokens)
    return found.as_row("generate")


def train(model: Path, tokens: int, completions: int, shared: bool) -> dict[str, float]:
    from swift_r1.algorithms import LossConfig
    from swift_r1.rollout.trajectory import TokenSequence
    from swift_r1.training.backends.local import LocalBackend
    from swift_r1.training.batching import Batching, round_batch
    from swift_r1.training.grpo import split_round, train_step
    from swift_r1.training.micro_batches import Form
    from swift_r1.training.optimizer import OptimizerConfig

    backend = LocalBackend(
        load_model(model, "float32", True), OptimizerConfig(1e-6, 0.0, 0.9, 0.95, 1e-8, 1.0)
    )
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    form = Form(packed=True, shared=shared)

    def step(length: int) -> None:
        ids = [number * 7919 % backend.vocab_size for number in range(PROMPT + length)]
        row = TokenSequence(ids[:PROMPT], ids[PROMPT:], [-8.0] * length, [True] * length)
        batch = round_batch([row] * completions, [0.0] * completions)
        batching = Batching(form, completions if shared else 1, completions)
        (micro_batches,) = split_round(batch, 1, batching, ranks)
        advantages = torch.linspace(-1, 1, completions)
        train_step(micro_batches, advantages, backend, LossConfig(), 1.0, 1e-6, ranks)

    step(64)  # the optimizer's state, and what libraries set up
    with measured() as found:
        step(tokens)
    return found.as_row("shared" if shared else "train")


def record(tokens: int, completions: int, folder: Path) -> dict[str, float]:
    import numpy

    from swift_r1.lab.runs.completions import CompletionTable
    from swift_r1.lab.runs.query import CompletionQuery
    from swift_r1.lab.view.coloured import classes, numbers_json, scale_of, tokens_html, values_of
    from swift_r1.lab.view.completion_html import card
    from swift_r1.record.metrics import JsonLines
    from swift_r1.record.token_reader import TokenRecord
    from swift_r1.record.token_record import STEP, TOKENS, TokenRows, TokenWriter
    from swift_r1.rewards.builtin import is_formatted
    from swift_r1.rewards.graders import grade_countdown, grade_math

    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=tokens)) for _ in range(completions)]
    texts = [f"<think>{text}</think> <answer>98 - 19</answer> \\boxed{{79}}" for text in texts]
    rows = [
        {
            **{
                "step": 1,
                "prompt_id": "data:0",
                "request_id": "0/0",
                "group": 0,
                "number": number,
                "prompt": "98, 19",
            },
            **{
                "completion": text,
                "rewards/countdown": 1.0,
                "reward": 1.0,
                "advantage": 0.5,
                "tokens": tokens,
            },
            **{"finish_reason": "stop", "weight_version": 0},
        }
        for number, text in enumerate(texts)
    ]
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        found[f"{name}_s"] = time.process_time() - started
        return result

    def written() -> None:
        lines = JsonLines(folder / "completions.jsonl")
        for row in rows:
            lines.write(row)
        lines.close()

    timed(
        "rewards",
        lambda: [
            (is_formatted(one), grade_countdown(one, [98, 19], 79), grade_math(one, "79"))
            for one in texts
        ],
    )
    timed("jsonl", written)
    values = {
        name: numpy.random.default_rng(0).random(tokens * completions, numpy.float32)
        for name in ("logps", "rollout_logps", "ratios", "entropies", "advantages")
    }
    ids = {
        "token_ids": numpy.arange(tokens * completions) % 2048,
        "mask": numpy.ones(tokens * completions),
    }
    who = [
        {
            "round_step": 1,
            **{key: row[key] for key in ("prompt_id", "request_id", "number", "group")},
        }
        for row in rows
    ]
    shape = (
        numpy.full(completions, PROMPT),
        numpy.arange(PROMPT * completions) % 2048,
        numpy.full(completions, tokens),
    )
    token_rows = TokenRows(who, *shape, ids | values)

    def recorded() -> None:
        writer = TokenWriter(folder / TOKENS, 2**40, lambda: [(b"so ", False)] * 2048)
        writer.write(STEP, 1, token_rows)
        writer.close()

    timed("record", recorded)
    found["record_bytes_a_token"] = (
        next((folder / TOKENS).glob(f"{STEP}-*")).stat().st_size / tokens / completions
    )

    with measured() as viewed:

        def opened() -> Any:
            with CompletionTable(folder / "completions.jsonl") as of:
                of.refresh()
                of.page(CompletionQuery(), 0, 50, longest=2_000)
                of.failure_classes()
                return [
                    card(row, [], {}, whole) for row in of.group(1, 0) for whole in (False, True)
                ]

        def coloured() -> Any:
            kept = TokenRecord(folder)
            (one,) = kept.completion(1, "0/0", 0)
            own = values_of(vars(one), "entropy")
            marks = classes(own, scale_of("entropy", own), one.mask or [])
            pieces = kept.pieces(one.token_ids or [])
            return tokens_html(pieces, [False] * len(pieces), marks), numbers_json(
                vars(one), pieces
            )

        timed("group_page", opened)
        shown = timed("token_page", coloured)
    found["token_page_MB"] = sum(map(len, shown)) / MB
    return found | {"view_MB": viewed.more / MB}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 2048, 8192])
    parser.add_argument("--size", choices=SIZES, default="5M")
    parser.add_argument("--completions", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--plot", action="store_true", help="draw docs/images/growth-tokens.svg")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    if args.folder is not None:
        (part,), (tokens,) = args.parts, args.tokens
        if part == "record":
            found = record(tokens, args.completions, Path(tempfile.mkdtemp(dir=args.folder)))
        elif part == "generate":
            found = generate(args.folder / "model", tokens, args.completions)
        else:
            found = train(args.folder / "model", tokens, args.completions, part == "shared")
        print("\n" + json.dumps(found))
        return
    folder, rows = Path(tempfile.mkdtemp(prefix="growth-")), []
    try:
        write_model(folder / "model", args.size)
        for tokens in args.tokens:
            row: dict[str, Any] = {"tokens": tokens}
            for part in args.parts:
                words = [
                    "--tokens",
                    str(tokens),
                    "--completions",
                    str(args.completions),
                    "--folder",
                    str(folder),
                ]
                row |= run_ranks([*words, "--parts", part], 1)[0]
            print(json.dumps(row), flush=True)
            rows.append(row)
    finally:
        shutil.rmtree(folder)
    series = {name: label for name, label in SERIES.items() if name in rows[0]}
    growth(
        "tokens",
        "tokens",
        rows,
        {name: one for name, one in series.items() if name in PLOTTED},
        y_label="CPU seconds",
        plot=args.plot,
    )
    growth(
        "tokens",
        "tokens",
        rows,
        {name: one for name, one in series.items() if name not in PLOTTED},
        plot=False,
    )


if __name__ == "__main__":
    main()
