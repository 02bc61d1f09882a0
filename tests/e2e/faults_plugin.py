"""Rewards and data with a fault each."""

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms


class Nothing(ORM):
    """Tells no two completions apart."""

    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)


class Greek(ORM):
    """Share of the completion that is Greek."""

    def __call__(self, completions, **kwargs):
        return [sum(letter >= "\u0370" for letter in text) / max(1, len(text)) for text in completions]


orms["nothing"], orms["greek"] = Nothing, Greek


def again(split, **kwargs):
    """Four prompts, over and over."""
    return [{"query": f"count from {number % 4}", "response": ""} for number in range(400)]


register_dataset(DatasetMeta(dataset_name="again", preprocess_func=ResponsePreprocessor(), loader=again))
