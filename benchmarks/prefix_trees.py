"""The training part of a step whose rows begin alike: tokens, floating-point operations, seconds and memory of each row
computed by itself, of equal prompts computed once, and of everything that rows begin with computed once.

    python benchmarks/prefix_trees.py [--layers 8] [--times 3] [--run OUTPUT_DIR]

A random Llama in float32. Rows are made up: `groups` have a prompt and its completions; `turns` are episodes whose chat
template leaves thoughts out of earlier turns, so that each turn is a row of its own; `branches` are agents that go on
twice from each call. With `--run` they are those of the last step of which a run has recorded the tokens
(`--log_tokens all` for all episodes). Each form runs in a process of its own; the last line of each kind compares the
gradients' norms.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swift_r1.record.token_reader import TokenRecord

VOCABULARY = 8192
KINDS = ("groups", "turns", "branches")
FORMS = ("apart", "prompts", "tree")
RECORDED = "recorded"
GROUP = 2  # episodes of a prompt


@dataclass(frozen=True)
class Row:
    """A row's tokens, whose completion it is, and which of its tokens the policy wrote (None: all)."""

    prompt: list[int]
    answer: list[int]
    owner: int
    written: list[bool] | None = None


def recorded(run: Path) -> tuple[list[Row], int]:
    """Returns the rows of a run's last recorded step, and how many episodes a prompt has."""
    record = TokenRecord(run)
    steps = record.steps()
    if not steps:
        raise SystemExit(f"{run} has no record of tokens")
    names = ("request_id", "number", "prompt_token_ids", "token_ids", "written")
    found = record.columns(steps[-1], names)
    if not found:
        raise SystemExit("; ".join(record.problems))
    episodes = list(dict.fromkeys((one["request_id"], one["number"]) for one in found))
    rows = [
        Row(
            one["prompt_token_ids"],
            one["token_ids"],
            episodes.index((one["request_id"], one["number"])),
            one["written"],
        )
        for one in found
    ]
    rows.sort(key=lambda row: row.owner)
    return rows, len(episodes) // len({request for request, _ in episodes})


def made_up(kind: str) -> list[Row]:
    """Two groups of episodes."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    made: dict[str, Callable[[list[int], int], list[Row]]] = {
        "groups": lambda prompt, owner: [Row(prompt, tokens(draw.randint(64, 512)), owner)],
        "turns": lambda prompt, owner: _turns(prompt, owner, tokens),
        "branches": lambda prompt, owner: _branches(prompt, owner, tokens, 4),
    }
    rows: list[Row] = []
    for group in range(2):
        prompt = tokens(256)
        for episode in range(GROUP):
            rows += made[kind](prompt, group * GROUP + episode)
    return rows


def _turns(prompt: list[int], owner: int, tokens: Callable[[int], list[int]]) -> list[Row]:
    rows = []
    history = prompt
    for _ in range(6):
        said = tokens(32)
        rows.append(Row(history, tokens(96) + said, owner))
        history = history + said + tokens(64)
    return rows


def _branches(
    prompt: list[int], owner: int, tokens: Callable[[int], list[int]], depth: int
) -> list[Row]:
    """Each call is continued by two; the first of them is in its row."""
    answer = tokens(96)
    if not depth:
        return [Row(prompt, answer, owner)]
    first, *others = _branches(prompt + answer + tokens(32), owner, tokens, depth - 1)
    whole = Row(prompt, first.prompt[len(prompt) :] + first.answer, owner)
    second = _branches(prompt + answer + tokens(32), owner, tokens, depth - 1)
    return [whole, *others, *second]


def measure(kind: str, form: str, layers: int, times: int, run: Path | None) -> None:
    """Prints what a process of its own finds out, as JSON."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    from swift_r1.algorithms.config import LossConfig
    from swift_r1.models.attention import use_packed_attention
    from swift_r1.models.policy import Policy
    from swift_r1.rollout.trajectory import TokenSequence
    from swift_r1.runtime.ranks import Ranks
    from swift_r1.training import prefixes
    from swift_r1.training.backends.local import LocalBackend
    from swift_r1.training.batching import Batching, round_batch, split_step
    from swift_r1.training.grpo import train_step
    from swift_r1.training.micro_batches import Form
    from swift_r1.training.optimizer import OptimizerConfig

    if form == "prompts":
        prefixes.LEAST = 1 << 30
    torch.manual_seed(0)
    rows, group = (made_up(kind), GROUP) if run is None else recorded(run)
    vocabulary = max(VOCABULARY, *(1 + max(row.prompt + row.answer) for row in rows))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=8192,
        )
    )
    use_packed_attention(model)
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    settings = OptimizerConfig(0.0, 0.0, 0.9, 0.95, 1e-8, 1.0)
    backend = LocalBackend(model, settings, ranks.device, Policy)
    batch = round_batch(
        [
            TokenSequence(
                one.prompt,
                one.answer,
                [-9.0] * len(one.answer),
                one.written or [True] * len(one.answer),
            )
            for one in rows
        ],
        [float(number % 2) for number in range(1 + rows[-1].owner)],
        owners=[one.owner for one in rows],
    )
    advantages = batch.rewards - 0.5
    batching = Batching(Form(packed=True, shared=form != "apart"), 1, group, 8192)

    def step() -> dict[str, float]:
        micros = split_step(batch, range(len(batch)), batching, ranks)
        return train_step(
            micros,
            advantages[batch.owners],
            backend,
            LossConfig(),
            1.0,
            0.0,
            ranks,
            owners=batch.owners,
        )

    with FlopCounterMode(display=False) as flops:
        found = step()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    print(
        json.dumps(
            {
                "tokens": found["tokens_computed"],
                "flops": flops.get_total_flops(),
                "seconds": statistics.median(seconds),
                "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "gradient": found["grad_norm"],
            }
        )
    )


def ask(kind: str, form: str, more: Sequence[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", kind, form, *more]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    answer: dict[str, float] = json.loads(found.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--run", type=Path, help="folder of a run whose rows are measured")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(*args.one, args.layers, args.times, args.run)
        return
    more = ["--layers", str(args.layers), "--times", str(args.times)]
    kinds: Sequence[str] = KINDS
    if args.run is not None:
        recorded(args.run)  # says here what is wrong with it
        kinds = [RECORDED]
        more += ["--run", str(args.run)]
    table = Table("rows", "computed once", "tokens", "TFLOP", "seconds", "peak memory")
    for kind in kinds:
        found = {form: ask(kind, form, more) for form in FORMS}
        for form, one in found.items():
            table.add_row(
                kind if form == "apart" else "",
                {"apart": "nothing", "prompts": "equal prompts", "tree": "all beginnings"}[form],
                f"{one['tokens']:,.0f}",
                f"{one['flops'] / 1e12:.2f}",
                f"{one['seconds']:.2f}",
                f"{one['memory'] / 1e9:.2f} GB",
            )
        exact = found["apart"]["gradient"]
        off = max(abs(one["gradient"] / exact - 1) for one in found.values())
        table.add_row("", f"gradient norms differ by {off:.1e}", end_section=True)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
