"""A task that a random model learns in seconds: answer in digits. Written as a user would write it."""

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms


class Digits(ORM):
    """Share of the completion that is digits."""

    def __call__(self, completions, **kwargs):
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


orms["digits"] = Digits


class Preprocess(ResponsePreprocessor):
    def preprocess(self, row):
        row["query"] = f"count from {row['start']}"
        return super().preprocess(row)


def load(split, **kwargs):
    first = {"train": 0, "eval": 500}[split]
    return [{"start": number, "response": ""} for number in range(first, first + 200)]


register_dataset(DatasetMeta(dataset_name="counting", preprocess_func=Preprocess(), loader=load))
