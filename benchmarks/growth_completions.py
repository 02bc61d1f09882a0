"""What a round's completions cost outside of the model, by their number: CPU microseconds and bytes a completion.

    python benchmarks/growth_completions.py
    python benchmarks/growth_completions.py --sizes 32 128 512 2048 8192 --model true --plot true

Groups of 16 completions of 64 tokens, with the rewards of the demo in two worker processes. `wire` is a round's
requests and answers as JSON and back, `rewards` the trainer's share of scoring, `reward wait` the time until the last
reward, `batch` tensors and micro-batches, `record` metrics and completions.jsonl. With `--model true` also CPU time of
generation (embedded engine) and of the training part. A column that is constant grows linearly with the round.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# a reward worker, which imports this module again and needs none of it
if __name__ != "__mp_main__":
    import torch
    from growth_plot import growth

    from swift_r1.algorithms import LossConfig, group_advantages
    from swift_r1.algorithms.rewards import Composition
    from swift_r1.data.prompts import Prompt
    from swift_r1.plugins import load_plugins
    from swift_r1.record.metrics import JsonLines
    from swift_r1.rewards.pool import RewardPool
    from swift_r1.rollout.multi_turn import SingleTurn
    from swift_r1.rollout.scoring import Scoring, completion_row, round_metrics
    from swift_r1.runtime.ranks import Ranks
    from swift_r1.serving.engines.transformers import TransformersEngine
    from swift_r1.training.backends.local import LocalBackend
    from swift_r1.training.batching import Batching
    from swift_r1.training.grpo import batch_of_round, before_training, split_round, train_step
    from swift_r1.training.micro_batches import Form
    from swift_r1.training.optimizer import OptimizerConfig
    from swift_r1.wire.protocol import (
        Completion,
        RolloutBatch,
        RolloutOutput,
        RolloutRequest,
        RolloutResponse,
        SamplingParams,
    )

DEMO = Path(__file__).parent.parent / "examples" / "countdown_demo"
sys.path.insert(0, str(DEMO))
GROUP, TOKENS, AT_ONCE = 16, 64, 32
SERIES = {
    "wire": "wire, us",
    "rewards": "rewards, us",
    "wait": "reward wait, us",
    "batch": "batch, us",
    "record": "record, us",
    "generate": "generate, us",
    "train": "train, us",
    "memory": "Python, bytes",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 128, 512, 2048, 8192])
    parser.add_argument("--model", choices=("true", "false"), default="false")
    parser.add_argument("--repeats", type=int, default=3, help="the least counts")
    parser.add_argument("--plot", choices=("true", "false"), default="false")
    args = parser.parse_args()
    import tiny_model

    load = partial(load_plugins, [str(DEMO / "plugin.py")])
    load()
    tokenizer = tiny_model.make_tokenizer()
    flags = SimpleNamespace(
        reward_timeout=10.0,
        reward_num_workers=2,
        reward_memory_limit=2.0,
        reward_env=[],
        reward_isolation="process",
    )
    rows: list[dict[str, float]] = []
    with (
        RewardPool(flags, ["countdown", "format"], load) as rewards,
        tempfile.TemporaryDirectory() as folder,
    ):
        rewards.wait_ready()
        for size in args.sizes:
            prompts, requests, outputs = made(size // GROUP, tokenizer)
            with JsonLines(Path(folder) / f"{size}.jsonl") as file:
                parts = Parts(prompts, requests, outputs, rewards, tokenizer, file)
                found = [parts.measured() for _ in range(args.repeats)]
                row = {name: 1e6 / size * min(one[name] for one in found) for name in found[0]}
                tracemalloc.start()
                parts.measured()
                row |= {"completions": size, "memory": tracemalloc.get_traced_memory()[1] / size}
                tracemalloc.stop()
            if args.model == "true":
                row |= {
                    name: 1e6 * value / size
                    for name, value in of_model(requests, parts.batch).items()
                }
            rows.append(row)
    series = {name: label for name, label in SERIES.items() if name in rows[0]}
    growth(
        "completions",
        "completions",
        rows,
        series,
        y_label="of a completion",
        plot=args.plot == "true",
    )
    return 0


def made(
    groups: int, tokenizer: Any
) -> tuple[list[Prompt], list[RolloutRequest], list[RolloutOutput]]:
    """Prompts, and completions of random tokens."""
    chance = random.Random(0)
    prompts, requests, outputs = [], [], []
    for group in range(groups):
        nums, target = [chance.randint(1, 9) for _ in range(3)], chance.randint(1, 99)
        text = f"{' '.join(map(str, nums))}={target}\n"
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        messages = ({"role": "user", "content": text},)
        prompts.append(
            Prompt(f"data:{group}", "data", messages, text, ids, {"nums": nums, "target": target})
        )
        name, seeds = f"0123456789ab/0/{group}", tuple(range(group * GROUP, (group + 1) * GROUP))
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        requests.append(
            RolloutRequest(
                request_id=name, prompt_token_ids=ids, n=GROUP, seeds=seeds, sampling=sampling
            )
        )
        completions = [
            Completion(
                token_ids=tuple(chance.randrange(8, len(tokenizer)) for _ in range(TOKENS)),
                logprobs=tuple(-chance.expovariate(1) for _ in range(TOKENS)),
                finish_reason="stop",
                weight_version=1,
            )
            for _ in range(GROUP)
        ]
        outputs.append(RolloutOutput(request_id=name, completions=tuple(completions)))
    return prompts, requests, outputs


class Answers:
    """Gives the outputs as an engine does, one request after another."""

    def __init__(self, outputs: Sequence[RolloutOutput]) -> None:
        self.outputs = outputs

    def generate(
        self, requests: Any, on_done: Any, on_output: Callable[[RolloutOutput], None]
    ) -> Any:
        for output in self.outputs:
            on_output(output)
        return self.outputs


class Parts:
    """A round's work outside of the model, in the trainer's order."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[RolloutRequest],
        outputs: Sequence[RolloutOutput],
        rewards: RewardPool,
        tokenizer: Any,
        file: JsonLines,
    ) -> None:
        self.prompts, self.requests, self.outputs, self.rewards, self.file = (
            prompts,
            requests,
            outputs,
            rewards,
            file,
        )
        self.tokenizer = tokenizer
        self.ranks = Ranks(0, 1, torch.device("cpu"), None)

    def measured(self) -> dict[str, float]:
        """Seconds by part."""
        found = {}

        def timed(name: str, work: Callable[[], Any]) -> Any:
            began = time.process_time()
            result = work()
            found[name] = time.process_time() - began
            return result

        answers = timed("wire", self.over_the_wire)
        began = time.perf_counter()
        scored = timed("rewards", lambda: self.scored(answers))
        found["wait"] = time.perf_counter() - began
        self.batch, advantages = timed("batch", lambda: self.tensors(scored))
        timed("record", lambda: self.recorded(scored, advantages))
        return found

    def over_the_wire(self) -> list[RolloutOutput]:
        """Request after request, as to a server."""
        answers = []
        for request, output in zip(self.requests, self.outputs, strict=True):
            RolloutBatch.model_validate_json(RolloutBatch(requests=(request,)).model_dump_json())
            text = RolloutResponse(outputs=(output,)).model_dump_json()
            answers.append(RolloutResponse.model_validate_json(text).outputs[0])
        return answers

    def scored(self, answers: Sequence[RolloutOutput]) -> Any:
        names = [request.request_id for request in self.requests]
        scoring = Scoring(
            self.prompts,
            names,
            self.rewards.open,
            Composition([1.0, 0.1]),
            {"global_step": 0, "max_steps": 1},
        )
        turns = SingleTurn(
            Answers(answers),
            lambda ids: str(self.tokenizer.decode(list(ids), skip_special_tokens=True)),
        )
        turns.generate(
            list(zip(self.prompts, self.requests, strict=True)), lambda _count: None, scoring.add
        )
        return scoring.result()

    def tensors(self, scored: Any) -> Any:
        batch = batch_of_round(scored, self.ranks)
        advantages = group_advantages(batch.rewards, GROUP)
        split_round(batch, 1, Batching(Form(), AT_ONCE, GROUP), self.ranks)
        return batch, advantages

    def recorded(self, scored: Any, advantages: Any) -> None:
        round_metrics(scored)
        for trajectory in scored.with_advantages(advantages.tolist(), None).trained:
            self.file.write(completion_row(trajectory, 1))


def of_model(requests: Sequence[RolloutRequest], batch: Any) -> dict[str, float]:
    """CPU seconds of generation and of the training part."""
    import tiny_model

    model, tokenizer = tiny_model.make_model(0), tiny_model.make_tokenizer()
    engine = TransformersEngine(model, tokenizer, (tokenizer.eos_token_id,), tokenizer.pad_token_id)
    began = time.process_time()
    with torch.no_grad():
        engine.generate(list(requests), 0)
    generated = time.process_time()
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    backend = LocalBackend(model, OptimizerConfig(1e-4, 0.0, 0.9, 0.999, 1e-8, 1.0))
    (steps,) = before_training(
        split_round(batch, 1, Batching(Form(), AT_ONCE, GROUP), ranks),
        backend,
        None,
        1.0,
        old_policy=False,
    )
    train_step(
        steps, group_advantages(batch.rewards, GROUP), backend, LossConfig(), 1.0, 1e-4, ranks
    )
    return {"generate": generated - began, "train": time.process_time() - generated}


if __name__ == "__main__":
    sys.exit(main())
