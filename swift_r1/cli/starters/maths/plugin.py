"""Word problems with a number as the answer: a dataset in a file, and a reward that reads the answer."""

import re

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms

PROMPT = "{question}\nThink step by step, then give the number in <answer> </answer> tags."


class Problems(ResponsePreprocessor):
    def preprocess(self, row):
        """From a line of data.jsonl to what the model is asked; other columns go to the rewards as they are."""
        row["query"] = PROMPT.format(question=row.pop("query"))
        return super().preprocess(row)


class RightNumber(ORM):
    """1 if the number in the last answer tag is the solution, else 0."""

    def __call__(self, completions, solution, **kwargs):
        return [score(text, wanted) for text, wanted in zip(completions, solution)]


def score(text, wanted):
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    found = number(answers[-1]) if answers else None
    return float(found is not None and found == number(wanted))


def number(text):
    """`1,200` and `$1200.00` are the same; None where there is no number."""
    plain = re.sub(r"[,$\s]", "", str(text))
    return float(plain) if re.fullmatch(r"-?\d+(\.\d+)?", plain) else None


def gold(row):
    """A right completion: `swift check` sees by it whether rewards tell right from wrong."""
    return f"<answer>{row['solution']}</answer>"


register_dataset(
    DatasetMeta(dataset_name="problems", dataset_path="data.jsonl", preprocess_func=Problems())
)
orms["right_number"] = RightNumber
