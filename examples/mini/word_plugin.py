"""The data set `word_problems`, as any plugin file for `swift rlhf --external_plugins` has one."""

import random

import word_problems  # the file beside this one
from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset


def load_problems(split="train", seed=42):
    """Rows with `query` and `solution`; the held-out ones are the same whatever the seed."""
    training, held_out = word_problems.split()
    rng = random.Random(seed if split == "train" else 0)
    for problem in training if split == "train" else held_out:
        yield {"query": problem.question(rng), "solution": str(problem.steps[1])}


register_dataset(
    DatasetMeta(
        dataset_name="word_problems",
        loader=load_problems,
        preprocess_func=ResponsePreprocessor(),
        tags=["math"],
        help="two steps with numbers from 2 to 7; 200 problems held out",
    )
)
