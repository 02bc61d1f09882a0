"""The demo's data and a reward, as any plugin file for `swift rlhf --external_plugins` has them."""

import random

import task  # the file beside this one
from swift.dataset import DatasetMeta, RowPreprocessor, register_dataset
from swift.rewards import ORM, orms

from swift_r1.rewards.graders import grade_countdown

TRACES = 23_040  # of training: each problem comes about 19 times, with other searches


def load_problems(split="train", seed=42):
    """Rows with `nums`, in a random order, and `target`; the held-out ones are the same whatever the seed."""
    training, held_out = task.split()
    rng = random.Random(seed if split == "train" else 0)
    for problem in training if split == "train" else held_out:
        yield {"nums": rng.sample(problem.nums, 3), "target": problem.target}


def load_traces(split="train", count=None, seed=42):
    """Rows of the training problems, or of the held-out ones, each with a search and its answer (`task.write_trace`)."""
    training, held_out = task.split()
    problems = training if split == "train" else held_out
    count = task.HELD_OUT if split != "train" else count or TRACES
    rng = random.Random(seed if split == "train" else 0)
    for problem in rng.choices(problems, k=count):
        nums = rng.sample(problem.nums, 3)
        yield {
            "nums": nums,
            "target": problem.target,
            "trace": task.write_trace(problem, rng),
        }


class CountdownPrompt(RowPreprocessor):
    def preprocess(self, row):
        row["messages"] = [{"role": "user", "content": task.prompt(row["nums"], row["target"])}]
        return row


class CountdownTrace(CountdownPrompt):
    def preprocess(self, row):
        answer = {"role": "assistant", "content": row.pop("trace")}
        row = super().preprocess(row)
        row["messages"].append(answer)
        return row


class ExpressionReward(ORM):
    """As the built-in `countdown`, 1 for an expression that uses every number once and equals the target; and 0.1 for a
    wrong one in its tag."""

    def __call__(self, completions, nums, target, **kwargs):
        return [
            grade_countdown(*item, mode="oat").score
            for item in zip(completions, nums, target, strict=True)
        ]


register_dataset(
    DatasetMeta(
        dataset_name="countdown_mini",
        loader=load_problems,
        preprocess_func=CountdownPrompt(),
        tags=["math"],
        help="three numbers from 1 to 9, + - *, target 1 to 99; 128 problems held out",
    )
)
register_dataset(
    DatasetMeta(
        dataset_name="countdown_traces",
        loader=load_traces,
        preprocess_func=CountdownTrace(),
        tags=["math"],
        help="countdown_mini with searches that give up early, for a warm start",
    )
)
orms["countdown_expression"] = ExpressionReward
