"""The demo's data with as many problems again that have no solution, as a wrong label leaves them."""

import random

import task  # of the demo, whose plugin is loaded before
from swift.dataset import DatasetMeta, register_dataset

from swift_r1.data.registry import find_dataset

DEMO = find_dataset("countdown_mini")


def half_unsolvable(split="train", seed=42):
    """The rows of `countdown_mini`, in training each with a second one of a target that its numbers do not reach."""
    rows, rng = list(DEMO.loader(split=split, seed=seed)), random.Random(seed)
    if split == "train":
        for row in list(rows):
            reached = set(task.candidates(tuple(sorted(row["nums"]))).values())
            rows.append(
                row
                | {
                    "target": rng.choice(
                        [target for target in task.TARGETS if target not in reached]
                    )
                }
            )
        rng.shuffle(rows)
    return rows


register_dataset(
    DatasetMeta(
        dataset_name="half_unsolvable",
        loader=half_unsolvable,
        preprocess_func=DEMO.preprocess_func,
        tags=["math"],
    )
)
