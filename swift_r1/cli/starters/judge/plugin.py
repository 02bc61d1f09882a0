"""Texts that only a reader can judge: another model gives points (judge.yaml), a function keeps them short."""

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms


class Wishes(ResponsePreprocessor):
    def preprocess(self, row):
        """From a line of data.jsonl to what the model is asked; `rubric` is what the judge looks for."""
        row["query"] = row.pop("query") + " At most 60 words."
        return super().preprocess(row)


class Short(ORM):
    """1 up to 60 words, then less, 0 from 120 on and for nothing."""

    def __call__(self, completions, **kwargs):
        words = [len(text.split()) for text in completions]
        return [0.0 if count == 0 else min(1.0, max(0.0, 2 - count / 60)) for count in words]


register_dataset(
    DatasetMeta(dataset_name="wishes", dataset_path="data.jsonl", preprocess_func=Wishes())
)
orms["short"] = Short
