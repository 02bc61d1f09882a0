"""The problems, the calculator and the reward, as any plugin file for `swift rlhf --external_plugins` has them."""

import json
import random
from itertools import islice

import arithmetic  # the file beside this one
from swift.dataset import DatasetMeta, RowPreprocessor, register_dataset
from swift.rewards import ORM, orms

from swift_r1 import tools

ROWS = 20_000  # of training
TRACES = 38_400  # of the warm start


def calculate(expression: str) -> int:
    """Calculates with two whole numbers and one operator, + - or *.

    Args:
        expression: such as 12*34
    """
    return arithmetic.calculated(expression)


def load_problems(split="train", count=None, seed=42):
    """Rows with `problem` and `total`; the held-out ones are the same whatever the seed."""
    rng = random.Random(seed if split == "train" else arithmetic.SPLIT_SEED)
    count = arithmetic.HELD_OUT if split != "train" else count or ROWS
    for problem in islice(arithmetic.problems(split, rng), count):
        yield {"problem": problem.question, "total": str(problem.answer)}


def load_traces(split="train", count=None, seed=42):
    """Conversations in which every choice is drawn (`arithmetic.write_trace`)."""
    rng = random.Random(seed if split == "train" else arithmetic.SPLIT_SEED)
    count = arithmetic.HELD_OUT if split != "train" else count or TRACES
    for problem in islice(arithmetic.problems(split, rng), count):
        expressions, answer = arithmetic.write_trace(problem, rng)
        messages = [{"role": "user", "content": problem.question}]
        for expression in expressions:
            call = {"name": "calculate", "arguments": {"expression": expression}}
            result = str(arithmetic.calculated(expression))
            messages.append({"role": "tool_call", "content": json.dumps(call)})
            messages.append({"role": "tool_response", "content": result})
        messages.append({"role": "assistant", "content": answer})
        yield {"messages": messages, "tools": ["calculate"]}


class ProblemPreprocessor(RowPreprocessor):
    def preprocess(self, row):
        row["messages"] = [{"role": "user", "content": row["problem"]}]
        return row


class RightTotal(ORM):
    """1 where the model's last turn is the right number and nothing else."""

    def __call__(self, completions, total, **kwargs):
        return [float(said == wanted) for said, wanted in zip(completions, total, strict=True)]


register_dataset(
    DatasetMeta(
        dataset_name="two_calls",
        loader=load_problems,
        preprocess_func=ProblemPreprocessor(),
        tags=["math"],
        help="a product of two numbers and a third number; no held-out product is in training",
    )
)
register_dataset(
    DatasetMeta(
        dataset_name="drawn_calls",
        loader=load_traces,
        tags=["math"],
        help="the same with calls and answers that are drawn, for a warm start",
    )
)
tools["calculate"] = calculate
orms["right_total"] = RightTotal
