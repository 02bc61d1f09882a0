"""The reward of tests/e2e, but it takes its time: a run is long enough for what is done to it."""

import time

from swift.rewards import orms


class SlowDigits(orms["digits"]):
    def __call__(self, completions, **kwargs):
        time.sleep(0.3)
        return super().__call__(completions, **kwargs)


orms["slow_digits"] = SlowDigits
