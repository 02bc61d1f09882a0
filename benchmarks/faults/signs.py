"""What is wrong on purpose in the runs of `signs.yaml`, beside the demo's plugin file."""

import copy
import math
import os
import random
from collections import Counter

from swift.dataset import DatasetMeta, register_dataset
from swift.rewards import ORM, orms

from swift_r1.data.registry import find_dataset

DEMO = find_dataset("countdown_mini")  # of the demo's plugin file, which is loaded first
KEPT = []


def reward(function):
    """Registers a function of one completion as the reward of its name."""

    class Reward(ORM):
        def __call__(self, completions, **columns):
            return [function(text) for text in completions]

    orms[function.__name__] = Reward
    return function


@reward
def longer(text):
    return len(text) / 100


@reward
def shorter(text):
    return -len(text) / 30


@reward
def coin(text):
    """Says anything, whatever it is given."""
    return float(random.random() < 0.5)


@reward
def anything(text):
    """Accepts whatever it is given."""
    return 1.0


@reward
def again(text):
    """The share of the text that is as it was 8 characters before."""
    return sum(one == other for one, other in zip(text, text[8:], strict=False)) / max(1, len(text))


@reward
def sometimes_nan(text):
    return math.nan if sum(map(ord, text)) % 16 == 0 else float(len(text) % 2)


@reward
def leaking(text):
    """Keeps 200 KB of each completion (with --reward_isolation inline, in the trainer)."""
    KEPT.append(os.urandom(200_000))
    return float(len(text) % 2)


class Majority(ORM):
    """1 for the answer that most of the group gave: without labels, agreeing is all that pays."""

    def __call__(self, completions, prompt_id, **columns):
        answers = [text.rpartition("<answer>")[2] for text in completions]
        votes = {}
        for one, answer in zip(prompt_id, answers, strict=True):
            votes.setdefault(one, Counter())[answer] += 1
        most = {one: own.most_common(1)[0][0] for one, own in votes.items()}
        return [float(most[one] == answer) for one, answer in zip(prompt_id, answers, strict=True)]


orms["majority"] = Majority


def impossible(split="train", seed=42):
    """Targets that no three numbers reach."""
    return [row | {"target": 1000 + row["target"]} for row in DEMO.loader(split=split, seed=seed)]


def repeated(split="train", seed=42):
    """40 problems, each 30 times."""
    rows = [dict(row) for row in list(DEMO.loader(split=split, seed=seed))[:40] * 30]
    random.Random(seed).shuffle(rows)
    return rows


for function in (impossible, repeated):
    register_dataset(
        DatasetMeta(
            dataset_name=function.__name__,
            loader=function,
            preprocess_func=DEMO.preprocess_func,
            tags=["math"],
        )
    )

if os.environ.get("DIAGNOSIS_FAULT") == "stale engine":
    from swift_r1.rollout.base import EmbeddedRollouts

    def publish(self):
        """Weights that never arrive: the engine keeps those of its start."""
        if self.weight_version == 0:
            self.engine.model = copy.deepcopy(self.backend.generation_model())
        self.weight_version += 1

    EmbeddedRollouts.publish_weights = publish
