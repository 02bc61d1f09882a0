"""The task of tests/e2e with a reward that takes its time: a run is long enough for what is done to it."""

import time

from tests.e2e.digits_plugin import Digits

from swift.rewards import orms


class SlowDigits(Digits):
    def __call__(self, completions, **kwargs):
        time.sleep(0.3)
        return super().__call__(completions, **kwargs)


orms["digits"] = SlowDigits
