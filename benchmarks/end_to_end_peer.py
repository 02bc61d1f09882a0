"""The peers' sides of `end_to_end.py`: a clock that any trainer of transformers calls back, ms-swift's plugin (this
file), and TRL's run (this file as a script: `end_to_end_peer.py FLAGS.json`). No swift_r1 here."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from operations import BetweenRounds
from transformers import TrainerCallback

generated = BetweenRounds()
SCORED = 0.0
"""When the reward was last asked: generation was over."""


def digits(completions, **kwargs):
    """Share of each completion that is digits, as in `end_to_end_plugin.py`; TRL hands over messages."""
    global SCORED
    SCORED = time.time()
    generated()
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts]


class StepClock(TrainerCallback):
    """A line a step in the file named by END_TO_END_STEPS: when it began, was generated and ended, and the mean length
    of its completions, as the trainer logs it."""

    def __init__(self, *args) -> None:
        self.file = Path(os.environ["END_TO_END_STEPS"])

    def on_step_begin(self, *args, **kwargs) -> None:
        self.began = time.time()

    def on_step_end(self, *args, **kwargs) -> None:
        self.times = {"began": self.began, "generated": SCORED, "ended": time.time()}

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "completions/mean_length" in (logs or {}):
            with self.file.open("a") as lines:
                lines.write(
                    json.dumps(self.times | {"length": logs["completions/mean_length"]}) + "\n"
                )


def register_in_ms_swift() -> None:
    from swift.callbacks import callbacks_map
    from swift.rewards import ORM, orms

    class Digits(ORM):
        def __call__(self, completions, **kwargs):
            return digits(completions)

    orms["digits"] = Digits
    callbacks_map["step_clock"] = StepClock


def run_trl(flags: dict) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = [
        json.loads(line)["messages"]
        for line in Path(flags.pop("dataset")).read_bytes().splitlines()
    ]
    trainer = GRPOTrainer(
        model=flags.pop("model"),
        args=GRPOConfig(**flags),
        train_dataset=Dataset.from_dict({"prompt": rows}),
        reward_funcs=digits,
        callbacks=[StepClock()],
    )
    trainer.train()


if __name__ == "__main__":
    run_trl(json.loads(Path(sys.argv[1]).read_text()))
else:
    register_in_ms_swift()
