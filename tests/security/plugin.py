"""A reward that tells all it sees, and fails with it."""

import os

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms


class Tells(ORM):
    """Prints its variables; raises, with them, where a completion's length is odd."""

    def __call__(self, completions, **kwargs):
        environ = dict(os.environ)
        print(environ)
        if any(len(text) % 2 for text in completions):
            raise RuntimeError(f"failed with {environ}")
        return [1.0] * len(completions)


orms["tells"] = Tells


def load(split, **kwargs):
    return [
        {"query": f"count from {number}", "response": "", "solution": "1"} for number in range(200)
    ]


register_dataset(
    DatasetMeta(dataset_name="counting", preprocess_func=ResponsePreprocessor(), loader=load)
)
