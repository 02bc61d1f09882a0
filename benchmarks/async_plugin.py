"""A task for `async.py` that a small model gets better at within a few steps: answer in digits."""

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms


class Digits(ORM):
    """Share of the completion that is digits."""

    def __call__(self, completions, **kwargs):
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


orms["digits"] = Digits


class Preprocess(ResponsePreprocessor):
    def preprocess(self, row):
        row["query"] = f"Count from {row['start']} to {row['start'] + 40}."
        return super().preprocess(row)


def load(split, **kwargs):
    return [{"start": number, "response": ""} for number in range(2000)]


register_dataset(DatasetMeta(dataset_name="counting", preprocess_func=Preprocess(), loader=load))
