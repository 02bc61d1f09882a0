"""Rewards from which nothing can be learned, and an easy task for SmolLM2, for `benchmarks/forecast.py`."""

import random

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms

_SHOTS = (
    "12 + 5 = <answer>17</answer>\n31 + 40 = <answer>71</answer>\n26 + 8 = <answer>34</answer>\n"
)


class Unreachable(ORM):
    """1 for a completion that says what none says."""

    def __call__(self, completions, **kwargs):
        return [float("the answer is a secret" in text) for text in completions]


class Same(ORM):
    def __call__(self, completions, **kwargs):
        return [0.5] * len(completions)


class Noise(ORM):
    """1 or 0 by chance, whatever was said."""

    def __call__(self, completions, **kwargs):
        return [float(random.random() < 0.5) for _ in completions]


class Sum(ORM):
    def __call__(self, completions, solution, **kwargs):
        return [float(text.partition("</answer>")[0].removeprefix("<answer>").strip() == right)
                for text, right in zip(completions, solution, strict=True)]  # fmt: skip


class Prompt(ResponsePreprocessor):
    def preprocess(self, row):
        row["query"] = _SHOTS + row["query"]
        return super().preprocess(row)


def sums(least, largest):
    """A loader of sums of two numbers."""

    def load(split="train", seed=42):
        rng = random.Random(seed)
        for _ in range(2000):
            one, two = rng.randint(least, largest), rng.randint(least, largest)
            yield {"query": f"{one} + {two} =", "solution": str(one + two)}

    return load


register_dataset(DatasetMeta(dataset_name="sums_one", loader=sums(1, 9), preprocess_func=Prompt()))
register_dataset(
    DatasetMeta(dataset_name="sums_two", loader=sums(10, 99), preprocess_func=Prompt())
)
orms |= {"unreachable": Unreachable, "same": Same, "noise": Noise, "sum": Sum}
