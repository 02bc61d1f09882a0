"""Sums in words for SmolLM2-135M, one call each: what it has to learn is to write the call."""

import random

import arithmetic  # the file beside this one
from swift.dataset import DatasetMeta, RowPreprocessor, register_dataset
from swift.rewards import ORM, orms

WORDS = {"+": "plus", "-": "minus", "*": "times"}
NUMBERS = range(11, 100)
ROWS, HELD_OUT = 4_000, 64
SPLIT_SEED = 20251124


def load_sums(split="train", count=None, seed=42):
    """Rows with `left`, `operator`, `right` and `total`; a pair of numbers is in one of the splits alone."""
    pairs = [(left, right) for left in NUMBERS for right in NUMBERS]
    random.Random(SPLIT_SEED).shuffle(pairs)
    pairs = pairs[HELD_OUT:] if split == "train" else pairs[:HELD_OUT]
    rng = random.Random(seed if split == "train" else SPLIT_SEED)
    for _ in range((count or ROWS) if split == "train" else HELD_OUT):
        left, right = rng.choice(pairs)
        operator = rng.choice(list(WORDS))
        yield {
            "left": left,
            "operator": operator,
            "right": right,
            "total": str(arithmetic.calculated(f"{left}{operator}{right}")),
        }


class SumPreprocessor(RowPreprocessor):
    def preprocess(self, row):
        question = f"What is {row['left']} {WORDS[row['operator']]} {row['right']}?"
        row["messages"] = [{"role": "user", "content": question}]
        return row


class RightCall(ORM):
    """1 for a first turn that calls the calculator with this sum, readable for the parser and of the right types."""

    def __call__(self, completions, total, tool_calls, **kwargs):
        return [
            float(
                len(calls) > 0 and calls[0]["outcome"] == "answer" and calls[0]["content"] == wanted
            )
            for wanted, calls in zip(total, tool_calls, strict=True)
        ]


class AnyCall(ORM):
    """1 for a call that can be read, whatever it says."""

    def __call__(self, completions, tool_calls, **kwargs):
        return [float(any(call["outcome"] != "unread" for call in calls)) for calls in tool_calls]


register_dataset(
    DatasetMeta(dataset_name="sums", loader=load_sums, preprocess_func=SumPreprocessor())
)
orms["right_call"] = RightCall
orms["any_call"] = AnyCall
