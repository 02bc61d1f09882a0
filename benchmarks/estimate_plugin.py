"""A reward for `estimate.py` that differs within every group, so that all completions are trained on."""

from swift.rewards import ORM, orms


class Spread(ORM):
    """Of the completion's length in characters, which means nothing."""

    def __call__(self, completions, **kwargs):
        return [len(text) % 17 / 16 for text in completions]


orms["spread"] = Spread
