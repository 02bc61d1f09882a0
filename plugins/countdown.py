"""Countdown: reach a target from a few numbers. A dataset and its reward, in one file to copy.

    swift rlhf --external_plugins plugins/countdown.py --dataset 'countdown#50000' \
        --reward_funcs external_countdown format ...
"""

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms
from swift.utils import get_logger

from swift_r1.data.countdown import countdown_problems
from swift_r1.rewards.graders import grade_countdown

logger = get_logger()

ROWS = 50_000  # of a `--dataset countdown` without #N

TASK = (
    "Using the numbers {numbers}, create an equation that equals {target}. "
    "You can use basic arithmetic operations (+, -, *, /) and each number can only be used once. "
    "Show your work in <think> </think> tags. "
)
PROMPT = TASK + (
    "And return the final equation and answer in <answer> </answer> tags, "
    "for example <answer> (1 + 2) / 3 * 4 = 4 </answer>."
)
# Without `=`: `countdown_expression` reads all of the answer tag as an expression.
EXPRESSION_PROMPT = (
    TASK
    + "And return the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)


def load_problems(split="train", count=None, seed=42):
    """Rows with `nums` and `target`; training and held-out problems never share numbers and target."""
    if split == "eval":
        seed = 42  # runs with different seeds are compared on the same problems
    for problem in countdown_problems(count or ROWS, seed, split):
        yield {"nums": list(problem.nums), "target": problem.target}


class CountdownPreprocessor(ResponsePreprocessor):
    prompt = PROMPT

    def preprocess(self, row):
        target = row.pop("response")  # the column `target`, renamed as the preprocessor does
        row["target"] = target
        row["query"] = self.prompt.format(numbers=row["nums"], target=target)
        return super().preprocess(row)


class ExpressionPreprocessor(CountdownPreprocessor):
    prompt = EXPRESSION_PROMPT


class CountdownReward(ORM):
    """1 for an equation that uses every number once and equals the target, else 0."""

    def __call__(self, completions, nums, target, **kwargs):
        return [
            grade_countdown(*item).score for item in zip(completions, nums, target, strict=True)
        ]


class ExpressionReward(ORM):
    """1 for a right expression in the last line's answer tag, 0.1 for a tag with anything else, 0 without one."""

    def __call__(self, completions, nums, target, **kwargs):
        return [
            grade_countdown(*item, mode="oat").score
            for item in zip(completions, nums, target, strict=True)
        ]


register_dataset(
    DatasetMeta(
        dataset_name="countdown",
        loader=load_problems,
        preprocess_func=CountdownPreprocessor(),
        tags=["math"],
        help="reach a target from 3 or 4 numbers, generated, always solvable",
    )
)
register_dataset(
    DatasetMeta(
        dataset_name="countdown_expression",
        loader=load_problems,
        preprocess_func=ExpressionPreprocessor(),
        tags=["math"],
        help="the same; the answer is to be an expression without `=`",
    )
)
orms["external_countdown"] = CountdownReward
orms["countdown_expression"] = ExpressionReward
logger.debug("countdown: datasets and rewards registered")
