"""Pictures of discs to count, and the reward for the right number."""

import random

import drawing  # the file beside this one
from swift.dataset import DatasetMeta, RowPreprocessor, register_dataset
from swift.rewards import ORM, orms

HELD_OUT = 256
TRAINING = 8_000


def load_problems(split="train", count=None, seed=42):
    """Rows of a problem's number; held-out ones have numbers of their own (2 of their 256 pictures occur in training)."""
    first, most = (0, HELD_OUT) if split != "train" else (HELD_OUT, TRAINING)
    count = min(count or most, most)
    return ({"number": first + number} for number in range(count))


class CountingPrompt(RowPreprocessor):
    def preprocess(self, row):
        problem = drawing.problem(row["number"])
        return {
            "messages": [{"role": "user", "content": drawing.QUESTION}],
            "images": [{"bytes": problem.picture}],
            "count": problem.count,
        }


class SwappedPrompt(CountingPrompt):
    """The same about the picture of another row: nothing can be learned but what is guessed most often."""

    def preprocess(self, row):
        other = drawing.problem(row["number"] + 1_000_000)
        return super().preprocess(row) | {"images": [{"bytes": other.picture}]}


class FormPrompt(CountingPrompt):
    """The same with an answer that is drawn: what an answer looks like, and nothing about the picture."""

    def preprocess(self, row):
        prompt = super().preprocess(row)
        drawn = random.Random(f"answer {row['number']}").randint(1, drawing.MOST)
        answer = {"role": "assistant", "content": str(drawn)}
        return {"messages": [*prompt["messages"], answer], "images": prompt["images"]}


class RightCount(ORM):
    def __call__(self, completions, count, **kwargs):
        return [
            float(completion.strip() == str(number))
            for completion, number in zip(completions, count, strict=True)
        ]


for name, preprocessor, what in (
    ("counting", CountingPrompt, "pictures of 1 to 5 discs among squares"),
    ("counting_swapped", SwappedPrompt, "the same with the pictures of other rows"),
    ("counting_form", FormPrompt, "the same with answers that are drawn, for a warm start"),
):
    register_dataset(
        DatasetMeta(
            dataset_name=name,
            loader=load_problems,
            preprocess_func=preprocessor(),
            tags=["vision"],
            help=f"{what}; {HELD_OUT} held out",
        )
    )
orms["right_count"] = RightCount
