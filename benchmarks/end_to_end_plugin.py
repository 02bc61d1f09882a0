"""Our side of `end_to_end.py`: its reward, and what its profile is called by."""

from operations import BetweenRounds
from swift.rewards import ORM, orms

from swift_r1.training.loop import OpenRound, Trainer

generated = BetweenRounds()
begin_round = Trainer.begin_round


class Digits(ORM):
    """Share of the completion that is digits."""

    def __call__(self, completions, **kwargs):
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def begun(trainer: Trainer) -> OpenRound:
    found = begin_round(trainer)
    generated()
    return found


orms["digits"] = Digits
Trainer.begin_round = begun
