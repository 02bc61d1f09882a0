"""Pictures of discs to count, and the reward for the right number."""

import drawing  # the file beside this one
from swift.dataset import DatasetMeta, RowPreprocessor, register_dataset
from swift.rewards import ORM, orms

HELD_OUT = 256
TRAINING = 20_000


def load_problems(split="train", seed=42):
    """Rows of a problem's number; the pictures of the held-out ones are drawn for no other row."""
    first, count = (0, HELD_OUT) if split != "train" else (HELD_OUT, TRAINING)
    return ({"number": first + number} for number in range(count))


class CountingPrompt(RowPreprocessor):
    def preprocess(self, row):
        problem = drawing.problem(row["number"])
        asked = {"role": "user", "content": drawing.question(problem.colour)}
        answer = {"role": "assistant", "content": str(problem.count)}
        return {
            "messages": [asked, answer],
            "images": [{"bytes": problem.picture}],
            "count": problem.count,
        }


class SwappedPrompt(CountingPrompt):
    """The same questions about the picture of another row: nothing can be learned but what is guessed most often."""

    def preprocess(self, row):
        other = drawing.problem(row["number"] + 1_000_000)
        return super().preprocess(row) | {"images": [{"bytes": other.picture}]}


class RightCount(ORM):
    def __call__(self, completions, count, **kwargs):
        return [
            float(completion.strip() == str(number))
            for completion, number in zip(completions, count, strict=True)
        ]


for name, preprocessor, what in (
    ("counting", CountingPrompt, "pictures of 1 to 5 discs of a colour among other shapes"),
    ("counting_swapped", SwappedPrompt, "the same with the pictures of other rows"),
):
    register_dataset(
        DatasetMeta(
            dataset_name=name,
            loader=load_problems,
            preprocess_func=preprocessor(),
            tags=["vision"],
            help=f"{what}; {HELD_OUT} held out",
        )
    )
orms["right_count"] = RightCount
