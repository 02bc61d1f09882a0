"""Small programs: the built-in reward `code` runs them against the tests of their row, in a sandbox."""

import re

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms

PROMPT = "{task}\nWrite it in Python, in one block between ```python and ```."


class Tasks(ResponsePreprocessor):
    def preprocess(self, row):
        """From a line of data.jsonl to what the model is asked; `verification_info` has the tests."""
        row["query"] = PROMPT.format(task=row.pop("query"))
        return super().preprocess(row)


class OneBlock(ORM):
    """1 for exactly one block of Python, else 0: a first step that pays before any program is right."""

    def __call__(self, completions, **kwargs):
        return [
            float(len(re.findall(r"```python\n.*?```", text, re.DOTALL)) == 1)
            for text in completions
        ]


def gold(row):
    """A right completion: `swift check` sees by it whether rewards tell right from wrong."""
    return f"```python\n{row['solution']}\n```"


register_dataset(
    DatasetMeta(dataset_name="tasks", dataset_path="data.jsonl", preprocess_func=Tasks())
)
orms["one_block"] = OneBlock
