"""A dataset with subsets, one with a preprocessor of its own, and the article's `row.pop('response')`."""

from typing import Any, Dict

from swift.llm import DatasetMeta, ResponsePreprocessor, SubsetDataset, register_dataset

numbers = [(2, 3), (4, 5)]


def load(subset=None):
    for a, b in numbers:
        yield {"nums": [a, b], "target": a + b if subset == "sum" else a * b}


class Reach(ResponsePreprocessor):
    def preprocess(self, row: Dict[str, Any]) -> Dict[str, Any]:
        target = row.pop("response", None)
        row["target"] = target
        row["query"] = f"Using {row['nums']}, reach {target}."
        return super().preprocess(row)


class Product(Reach):
    def preprocess(self, row):
        row = super().preprocess(row)
        row["messages"][-1]["content"] += " Multiply."
        return row


register_dataset(
    DatasetMeta(
        dataset_name="reach",
        subsets=[
            SubsetDataset("sum", subset="sum"),
            SubsetDataset("product", "product", preprocess_func=Product()),
        ],
        preprocess_func=Reach(),
        loader=load,
        help="reach a number",
    )
)
