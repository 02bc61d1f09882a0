"""Rewards and data with a fault each, on the task of digits."""

import math
from itertools import pairwise

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms

KEPT = []


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
def anything(text):
    return 1


@of_text
def greek(text):
    return sum(letter >= "\u0370" for letter in text) / max(1, len(text))


@of_text
def lower(text):
    """Right is what has one of the first letters."""
    return any("a" <= letter <= "m" for letter in text)


@of_text
def longer(text):
    return len(text) / 50


@of_text
def seven(text):
    """A 7, and nothing else."""
    return (text[:1] == "7") - len(text) / 10


@of_text
def sometimes_nan(text):
    return math.nan if sum(map(ord, text)) % 12 == 0 else len(text) / 50


@of_text
def again(text):
    """The share of characters that are as the one before, of texts of any length."""
    return sum(one == other for one, other in pairwise(text)) / max(1, len(text))


@of_text
def leaking(text):
    KEPT.append(b"x" * (4 << 20))
    return len(text) / 50


def same(split, **kwargs):
    """Four prompts, over and over."""
    return [{"query": f"count from {number % 4}", "response": ""} for number in range(400)]


register_dataset(
    DatasetMeta(dataset_name="same", preprocess_func=ResponsePreprocessor(), loader=same)
)
