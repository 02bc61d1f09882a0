"""What the token record costs a training step, and its bytes a token: the same step with and without it, alternating.

    python benchmarks/token_record.py --model models/smollm2-135m
    python benchmarks/token_record.py --model WARM_START_OF_THE_DEMO --prompts 32 --generations 16 --new_tokens 50

The step is the part after generation, as `swift rlhf` does it, so of a whole step the share is smaller. `seconds` are
medians; `ratio` is the median over pairs of neighbours of the step's seconds to those without a record, `CPU` the same
of the process's CPU seconds, files included (for a machine with other work); `own` is what the record's own code took,
in the training thread and, in CPU seconds, in that of the writer, of the step's seconds.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from step_work import Clock

from swift_r1.algorithms import LossConfig, group_advantages
from swift_r1.models.loading import load_model
from swift_r1.record.token_record import STEP, TokenWriter
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, round_batch
from swift_r1.training.grpo import before_training, split_round, train_step
from swift_r1.training.micro_batches import Form
from swift_r1.training.model_checks import LEAST_SAVING
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.training.token_values import StepTokens

GROUPS = {"none": 0, "sample": 2, "all": sys.maxsize}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--torch_dtype", help="[its config's]")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt_tokens", type=int, default=79)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--micro", type=int, default=8, help="completions a micro-batch")
    parser.add_argument(
        "--rounds", type=int, default=8, help="of a step of each kind; the first is a warm-up"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    ranks = Ranks(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"), None)
    model = load_model(args.model, args.torch_dtype, gradient_checkpointing=False).to(ranks.device)
    backend = LocalBackend(model, OptimizerConfig(1e-6, 0.0, 0.9, 0.999, 1e-8, 1.0))
    rng, size = random.Random(0), model.config.vocab_size

    def tokens(count: int) -> list[int]:
        return [rng.randrange(size) for _ in range(count)]

    count = args.prompts * args.generations
    prompts = [
        prompt
        for _ in range(args.prompts)
        for prompt in [tokens(args.prompt_tokens)] * args.generations
    ]
    completions = [tokens(rng.randint(args.new_tokens // 2, args.new_tokens)) for _ in range(count)]
    rows = [
        TokenSequence(prompt, ids, [-rng.expovariate(2) for _ in ids], [True] * len(ids))
        for prompt, ids in zip(prompts, completions, strict=True)
    ]
    batch = round_batch(rows, [float(i % 2) for i in range(count)])
    advantages = group_advantages(batch.rewards, args.generations)
    batching = Batching(Form(), args.micro, args.generations, None, LEAST_SAVING)
    (micro_batches,) = before_training(
        split_round(batch, 1, batching, ranks), backend, None, 1.0, old_policy=False
    )
    who = {"round_step": 1, "weight_versions": ((0, 7),)}
    recorded = [
        who
        | {
            "sample": i,
            "prompt_id": f"data:{group}",
            "request_id": f"0123456789ab/0/{group}",
            "number": place,
        }
        for i in range(count)
        for group, place in [divmod(i, args.generations)]
    ]
    recorded = [one | {"group": one["sample"] // args.generations} for one in recorded]
    clock = Clock()
    seconds: dict[str, list[float]] = {kind: [] for kind in GROUPS}
    cpu: dict[str, list[float]] = {kind: [] for kind in GROUPS}
    own: dict[str, list[float]] = {kind: [] for kind in GROUPS}
    for method in ("__init__", "add", "rows"):
        clock.wrap(StepTokens, method, "own")
    with tempfile.TemporaryDirectory() as folder:
        writers = {}
        for kind in GROUPS:
            writers[kind] = TokenWriter(Path(folder, kind), 2**40, lambda: [(b"", False)])
            clock.wrap(writers[kind], "write", "own")
            writers[kind]._write_rows = in_cpu_seconds(writers[kind]._write_rows, clock)  # type: ignore[method-assign]
        for number in range(args.rounds):
            for kind, groups in GROUPS.items():
                started, cpu_started, writer = (
                    time.perf_counter(),
                    time.process_time(),
                    writers[kind],
                )
                found = [one for one in recorded if one["group"] < groups]
                step_tokens = StepTokens(found, batch, False) if found else None
                train_step(
                    micro_batches,
                    advantages,
                    backend,
                    LossConfig(),
                    1.0,
                    1e-6,
                    ranks,
                    False,
                    step_tokens,
                )
                if step_tokens is not None:
                    writer.write(STEP, number, step_tokens.rows(advantages, ranks))
                seconds[kind].append(time.perf_counter() - started)
                writer.flush()
                cpu[kind].append(time.process_time() - cpu_started)
                own[kind].append(clock.take().get("own", 0.0))
        sizes = {
            kind: sum(path.stat().st_size for path in Path(folder).glob(f"{kind}/{STEP}-*"))
            for kind in GROUPS
        }
        for writer in writers.values():
            writer.close()
    shown = Table(
        title=f"{args.model}: {count} completions, {sum(map(len, completions))} tokens a step"
    )
    for column in ("record", "seconds", "ratio", "CPU", "own", "tokens", "bytes a token"):
        shown.add_column(column, justify="left" if column == "record" else "right")
    for kind, groups in GROUPS.items():
        kept = sum(len(one) for one in completions[: min(count, groups * args.generations)])
        median = statistics.median(seconds[kind][1:])
        shown.add_row(
            kind,
            f"{median:.3f}",
            *(f"{median_ratio(one[kind], one['none']):.4f}" for one in (seconds, cpu)),
            f"{statistics.median(own[kind][1:]) / median:.2%}",
            str(kept),
            f"{sizes[kind] / args.rounds / kept:.1f}" if kept else "",
        )
    Console(width=120).print(shown)
    return 0


def median_ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    """Of all but the first."""
    return statistics.median(one / other for one, other in list(zip(mine, others, strict=True))[1:])


def in_cpu_seconds(work: Callable[..., None], clock: Clock) -> Callable[..., None]:
    """Adds the CPU seconds of this thread to the clock's `own`."""

    def timed(*args: object) -> None:
        started = time.thread_time()
        work(*args)
        clock.seconds["own"] = clock.seconds.get("own", 0.0) + time.thread_time() - started

    return timed


if __name__ == "__main__":
    sys.exit(main())
