"""The digits task with a reward that draws from Python's generator, as a plugin in the trainer's process may, and a
sampler that follows it.

A file `signals.json` in the working directory, `{"step", "signal", "times"}`, makes it send signals to the trainer
(with `"after"`, once that file is there), and then wait for ever if there is a file `hang`. A file `slow` holds the
seconds that each call takes.
"""

import json
import os
import random
import threading
import time
from pathlib import Path

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms

from swift_r1 import Sampler, samplers


class NoisyDigits(ORM):
    def __call__(self, completions, trainer_state, **kwargs):
        order = Path("signals.json")
        if order.exists() and json.loads(order.read_text())["step"] <= trainer_state.global_step:
            wanted = json.loads(order.read_text())
            order.unlink()
            deadline = time.monotonic() + 120
            while (
                "after" in wanted
                and not Path(wanted["after"]).exists()
                and time.monotonic() < deadline
            ):
                time.sleep(0.02)
            for _ in range(wanted["times"]):
                os.kill(os.getpid(), wanted["signal"])
            if Path("hang").exists():
                threading.Event().wait()
        if Path("slow").exists():
            time.sleep(float(Path("slow").read_text()))
        return [
            sum(c.isdigit() for c in text) / max(1, len(text)) + random.random() / 10
            for text in completions
        ]


orms["noisy_digits"] = NoisyDigits


class Lowest(Sampler):
    """Half of a round are those that got the lowest rewards."""

    def __init__(self, rows, args):
        super().__init__(rows, args)
        self.rewards = {}

    def next(self, count):
        lowest = sorted(self.rewards, key=self.rewards.get)[: count // 2]
        for row in lowest:
            del self.rewards[row]
        return lowest + [self.order.draw() for _ in range(count - len(lowest))]

    def tell(self, outcomes):
        self.rewards |= {one.row: one.reward for one in outcomes}

    def state_dict(self):
        return super().state_dict() | {"rewards": list(self.rewards.items())}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.rewards = dict(state["rewards"])


samplers["lowest"] = Lowest


class Preprocess(ResponsePreprocessor):
    def preprocess(self, row):
        row["query"] = f"count from {row['start']}"
        return super().preprocess(row)


def load(split, **kwargs):
    first = {"train": 0, "eval": 500}[split]
    return [{"start": number, "response": ""} for number in range(first, first + 40)]


register_dataset(DatasetMeta(dataset_name="counting", preprocess_func=Preprocess(), loader=load))
