"""Answers as JSON with given keys: a reward that can be had in parts, so that learning has where to begin."""

import json

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms

PROMPT = "{text}\nReply with one JSON object with the keys {keys}, and nothing else."


class Texts(ResponsePreprocessor):
    def preprocess(self, row):
        """From a line of data.jsonl to what the model is asked; other columns go to the rewards as they are."""
        row["query"] = PROMPT.format(
            text=row.pop("query"), keys=", ".join(json.loads(row["solution"]))
        )
        return super().preprocess(row)


class WantedJson(ORM):
    """0.2 for valid JSON, up to 0.5 more for its keys, and up to 0.3 for their values."""

    def __call__(self, completions, solution, **kwargs):
        return [score(text, json.loads(wanted)) for text, wanted in zip(completions, solution)]


def score(text, wanted):
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(found, dict):
        return 0.0
    keys = len(wanted.keys() & found.keys()) / len(wanted.keys() | found.keys())
    values = sum(found.get(key) == value for key, value in wanted.items()) / len(wanted)
    return 0.2 + 0.5 * keys + 0.3 * values


def gold(row):
    """A right completion: `swift check` sees by it whether rewards tell right from wrong."""
    return row["solution"]


register_dataset(
    DatasetMeta(dataset_name="texts", dataset_path="data.jsonl", preprocess_func=Texts())
)
orms["wanted_json"] = WantedJson
