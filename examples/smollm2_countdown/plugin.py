"""Countdown with two numbers: a task that SmolLM2-135M can begin. The prompt shows a solved problem for each operator.

Each operator solves a third of the problems: without that the model finds that `a + b` pays most, and stays with it.
"""

from itertools import chain

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms

from swift_r1.data.countdown import CountdownSpec, countdown_problems
from swift_r1.rewards.graders import grade_countdown

ROWS = 4_000  # of a `--dataset countdown_two` without #N
OPERATORS = "+-*"
PROMPT = (
    "4 and 3 make 12: <answer>4 * 3</answer>\n"
    "9 and 5 make 14: <answer>9 + 5</answer>\n"
    "8 and 6 make 2: <answer>8 - 6</answer>\n"
    "{nums[0]} and {nums[1]} make {target}:"
)


def load_problems(split="train", count=None, seed=42):
    """Rows with `nums`, the larger first, and `target`; training and held-out problems never share both."""
    each = -(-(count or ROWS) // len(OPERATORS))
    specs = [
        CountdownSpec(counts=(2,), numbers=(2, 50), operators=one, targets=(2, 999))
        for one in OPERATORS
    ]
    in_turn = zip(*(countdown_problems(each, seed, split, spec) for spec in specs), strict=True)
    for problem in chain.from_iterable(in_turn):
        yield {"nums": sorted(problem.nums, reverse=True), "target": problem.target}


class TwoNumbersPreprocessor(ResponsePreprocessor):
    def preprocess(self, row):
        target = row.pop("response")  # the column `target`, renamed as the preprocessor does
        row["target"] = target
        row["query"] = PROMPT.format(nums=row["nums"], target=target)
        return super().preprocess(row)


class Solved(ORM):
    """1 for an expression that uses both numbers once and equals the target, else 0."""

    def __call__(self, completions, nums, target, **kwargs):
        return [
            grade_countdown(*item).score for item in zip(completions, nums, target, strict=True)
        ]


class AnswerTag(ORM):
    """1 for an answer in its tags, right or wrong, else 0."""

    def __call__(self, completions, nums, target, **kwargs):
        return [
            float(grade_countdown(*item).formatted)
            for item in zip(completions, nums, target, strict=True)
        ]


register_dataset(
    DatasetMeta(
        dataset_name="countdown_two", loader=load_problems, preprocess_func=TwoNumbersPreprocessor()
    )
)
orms["solved"] = Solved
orms["answer_tag"] = AnswerTag
