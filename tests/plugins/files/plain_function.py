"""A function and a ready object, no class of ms-swift in sight."""

from swift.rewards import orms


def mentions(completions, word):
    """1 where the row's word is in the completion."""
    return [float(wanted in text) for text, wanted in zip(completions, word)]


class Constant:
    """The same for all."""

    def __init__(self, value):
        self.value = value

    def __call__(self, completions, **kwargs):
        return [self.value] * len(completions)


orms["mentions"] = mentions
orms["half"] = Constant(0.5)
