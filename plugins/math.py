"""MATH without its easy problems. The rewards `math`, `math_tag` and `math_tag_strict` are there without a plugin
(`--verifier` chooses between two judges), and so are the data set `math` and the evaluation sets.

    swift rlhf --external_plugins plugins/math.py --dataset math_lvl3to5 --reward_funcs math ...
"""

from swift.dataset import DatasetMeta, register_dataset

from swift_r1.data.builtin import WorkedPreprocessor

HARD = ("Level 3", "Level 4", "Level 5")


class HardProblems(WorkedPreprocessor):
    """Rows of the levels 3 to 5; their final answer is the column `solution`."""

    def preprocess(self, row):
        return super().preprocess(row) if row.get("level") in HARD else None


def gold(row):
    """A right completion, for `swift check`: right by the box and by the tag."""
    solution = row["solution"][0] if isinstance(row["solution"], list) else row["solution"]
    return f"<think> I work it out. </think> <answer> \\boxed{{{solution}}} </answer>"


register_dataset(
    DatasetMeta(
        ms_dataset_id="tastelikefeet/competition_math",
        hf_dataset_id="DigitalLearningGmbH/MATH-lighteval",
        dataset_name="math_lvl3to5",
        eval_split=["test"],
        files={"train": "math_train.jsonl", "eval": "math_test.jsonl"},
        preprocess_func=HardProblems(),
        tags=["math"],
        help="the problems of MATH of levels 3 to 5",
    )
)
