"""What ranks tell each other in a step, by their number: collectives and bytes, which do not depend on the machine.

    python benchmarks/growth_ranks.py [--ranks 1 2 4] [--backends ddp zero0 zero2 zero3 fsdp2] [--size 5M]
                                      [--tokens 64]

Phases: `embedded`, requests to the ranks' own engines and their completions back (no model: the engines answer with
random tokens); `round`, its batch to every rank; `step`, forward pass, backward pass and update; `push`, all weights to
rank 0; `save`, a checkpoint; `resume`, its state back. Of each the collectives, the MB that rank 0 and the last rank
receive, where every collective sends what it must and no more (an all-reduce of S bytes on n ranks: 2 (n - 1) / n S
each), and the seconds of rank 0. There are 16 completions a rank.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from growth_parameters import NoTokenizer, open_backend
from growth_tools import MB, SIZES, run_ranks, table, write_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swift_r1.algorithms import LossConfig
from swift_r1.models.weights import policy_weights
from swift_r1.rollout.base import EmbeddedRollouts, ignore_output
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks, join_ranks
from swift_r1.training.batching import Batching
from swift_r1.training.checkpoint.saving import OPTIMIZER, Saver
from swift_r1.training.checkpoint.state import STATE, Fingerprint, RunState
from swift_r1.training.checkpoint.tensors import SavedTensors
from swift_r1.training.grpo import batch_of_round, split_round, train_step
from swift_r1.training.micro_batches import Form
from swift_r1.wire.protocol import Completion, RolloutOutput, RolloutRequest, SamplingParams

GROUP, PROMPT = 8, 64
PHASES = ("embedded", "round", "step", "push", "save", "resume")


class Collectives(TorchDispatchMode):
    """Counts what this rank receives in the collectives that it calls."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.count, self.received, self.kinds = ranks, 0, 0.0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._saw(func._schema.name.partition("::")[2].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _saw(self, name: str, args: Any) -> None:
        if name.startswith(("wait", "wrap", "barrier")):
            self.count += name.startswith("barrier")
            return
        sizes = [
            sum(
                one.numel() * one.itemsize
                for one in tree_leaves(part)
                if isinstance(one, torch.Tensor)
            )
            for part in args
        ]
        size, others = max(sizes), self.ranks.world_size - 1
        share = size * others / self.ranks.world_size
        if name.startswith("allreduce") or name.startswith("all_reduce"):
            got = 2 * share
        elif name.startswith("broadcast"):
            got = 0.0 if self.ranks.is_rank0 else size
        elif name.startswith("gather"):
            got = share if self.ranks.is_rank0 else 0.0
        elif name.startswith(("_allgather", "allgather", "all_gather")):
            # Of the functional form the input alone is there, a part.
            got = size * others if name == "all_gather_into_tensor" else share
        else:  # reduce-scatter
            got = share
        self.count += 1
        self.received += got
        self.kinds[name] += 1


class Answering:
    """An engine that writes random tokens at once."""

    config = None

    def __init__(self, tokens: int, vocabulary: int) -> None:
        self.ids = tuple(number * 7919 % vocabulary for number in range(tokens))
        self.logprobs = tuple(
            (-torch.rand(tokens, generator=torch.Generator().manual_seed(0))).tolist()
        )

    def generate(
        self, requests: Sequence[RolloutRequest], version: int, *_: Any
    ) -> list[RolloutOutput]:
        one = Completion(
            token_ids=self.ids,
            logprobs=self.logprobs,
            finish_reason="length",
            weight_version=version,
        )
        return [
            RolloutOutput(request_id=asked.request_id, completions=(one,) * asked.n)
            for asked in requests
        ]


def part(args: argparse.Namespace) -> dict[str, Any]:
    ranks = join_ranks(600, distributed=True)
    backend = open_backend(args.backend, args.folder / "model", "full", ranks)
    size = backend.vocab_size
    prompts = [
        tuple(number * 31 % size for number in range(group, group + PROMPT))
        for group in range(2 * ranks.world_size)
    ]
    row: dict[str, Any] = {}

    @contextmanager
    def counted(name: str) -> Iterator[None]:
        ranks.barrier()
        started, found = time.perf_counter(), Collectives(ranks)
        with found:
            yield
        row[f"{name}_collectives"], row[f"{name}_MB"] = found.count, found.received / MB
        row[f"{name}_s"], row[f"{name}_kinds"] = time.perf_counter() - started, dict(found.kinds)

    requests = None
    if ranks.is_rank0:
        sampling = SamplingParams(max_tokens=args.tokens)
        requests = [
            RolloutRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                n=GROUP,
                seeds=tuple(range(GROUP)),
                sampling=sampling,
            )
            for number, prompt in enumerate(prompts)
        ]
    rollouts = EmbeddedRollouts(Answering(args.tokens, size), backend, ranks)  # type: ignore[arg-type]
    with counted("embedded"):
        outputs = rollouts.generate(requests, lambda _count: None, ignore_output)
    scored: Any = None
    if outputs is not None:
        scored = SimpleNamespace(
            trained=[
                SimpleNamespace(
                    outcome=float(number % 2),
                    finish_reason=one.finish_reason,
                    rows=[TokenSequence.of_completion(prompt, one)],
                )
                for prompt, output in zip(prompts, outputs, strict=True)
                for number, one in enumerate(output.completions)
            ]
        )
    with counted("round"):
        batch = batch_of_round(scored, ranks)
    (micro_batches,) = split_round(batch, 1, Batching(Form(packed=True), 4, GROUP), ranks)
    for _ in range(2):  # the second is counted: backends set up things in the first
        with counted("step"):
            train_step(micro_batches, batch.rewards, backend, LossConfig(), 1.0, 1e-6, ranks)
    with counted("push"):
        for _bucket in backend.weight_buckets(policy_weights(backend.model)):
            pass
    run_dir = args.folder / "run"
    run = RunState(1, 1, 0, "", 1, 1, "id", 0, {}, {}, {}, None, {}, Fingerprint({}, 1, "", 1))
    saver = Saver(run_dir, backend, None, NoTokenizer(), ranks, 1, True)
    with counted("save"):
        saver.save(1, run, {}, last=True)
    with counted("resume"):
        backend.load_training_state(SavedTensors(run_dir / "checkpoint-1" / STATE, OPTIMIZER))
    ranks.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument(
        "--backends", nargs="+", default=["ddp", "zero0", "zero2", "zero3", "fsdp2"]
    )
    parser.add_argument("--size", choices=SIZES, default="5M")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.folder is not None:
        print("\n" + json.dumps(part(args)))
        return
    rows = []
    for backend in args.backends:
        for count in args.ranks:
            folder = Path(tempfile.mkdtemp(prefix="growth-"))
            try:
                write_model(folder / "model", args.size)
                (folder / "run").mkdir()
                words = [
                    "--folder",
                    str(folder),
                    "--backend",
                    backend,
                    "--tokens",
                    str(args.tokens),
                ]
                found = run_ranks(words, count)
            finally:
                shutil.rmtree(folder)
            print(
                json.dumps({"backend": backend, "ranks": count, "found": [found[0], found[-1]]}),
                flush=True,
            )
            row: dict[str, Any] = {"backend": backend, "ranks": count}
            for phase in PHASES:
                row[phase] = (
                    f"{found[0][f'{phase}_collectives']}: {found[0][f'{phase}_MB']:.3g}, "
                    f"{found[-1][f'{phase}_MB']:.3g} MB, {found[0][f'{phase}_s']:.2g} s"
                )
            rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
