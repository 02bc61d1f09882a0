"""The data sets `word_problems` and `word_traces`, as any plugin file for `swift rlhf --external_plugins` has them."""

import random

import word_model  # the files beside this one
import word_problems
from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset

TRACES = 28_800


def load_problems(split="train", seed=42):
    """Rows with `query` and `solution`; the held-out ones are the same whatever the seed."""
    training, held_out = word_problems.split()
    rng = random.Random(seed if split == "train" else 0)
    for problem in training if split == "train" else held_out:
        yield {"query": problem.question(rng), "solution": str(problem.steps[1])}


def load_traces(split="train", count=None, seed=42):
    """Conversations of the recipes, in all forms alike, with answers that often take the wrong operation."""
    problems = word_problems.split()[0 if split == "train" else 1]
    rng = random.Random(seed if split == "train" else 0)
    count = word_problems.HELD_OUT if split != "train" else count or TRACES
    for problem in rng.choices(problems, k=count):
        name = rng.choice(list(word_problems.FORMS))
        form = word_problems.FORMS[name]
        trace = form.wording.response_prefix + word_problems.write_trace(problem, form, rng)
        answer = {"role": "assistant", "content": trace}
        yield {"messages": [*word_model.asked(name, problem.question(rng)), answer]}


register_dataset(
    DatasetMeta(
        dataset_name="word_problems",
        loader=load_problems,
        preprocess_func=ResponsePreprocessor(),
        tags=["math"],
        help="two steps with numbers from 2 to 7; 200 problems held out",
    )
)
register_dataset(
    DatasetMeta(
        dataset_name="word_traces",
        loader=load_traces,
        tags=["math"],
        help="word_problems in the recipes' forms, answered with operations that are often wrong, for a warm start",
    )
)
