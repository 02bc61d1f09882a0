"""Rewards and data with a fault each, on the task of digits."""

import math

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms


def of_text(function):
    """Registers a function of one completion as the reward of its name."""

    class Reward(ORM):
        def __call__(self, completions, **columns):
            return [float(function(text)) for text in completions]

    orms[function.__name__] = Reward
    return function


@of_text
def nothing(text):
    return 0


@of_text
def sometimes_nan(text):
    return math.nan if sum(map(ord, text)) % 12 == 0 else len(text) / 50


def same(split, **kwargs):
    """Four prompts, over and over."""
    return [{"query": f"count from {number % 4}", "response": ""} for number in range(400)]


register_dataset(
    DatasetMeta(dataset_name="same", preprocess_func=ResponsePreprocessor(), loader=same)
)
