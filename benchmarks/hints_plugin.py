"""`countdown_two` of `examples/smollm2_countdown`, whose teacher reads the problem solved before it reads it: three
times, since SmolLM2-135M seldom makes use of less."""

import operator

from swift.dataset import DatasetMeta, register_dataset

from swift_r1.data.registry import find_dataset

DEMO = find_dataset("countdown_two")  # of that plugin file, which is loaded before
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Hinted(type(DEMO.preprocess_func)):
    def preprocess(self, row):
        one, other = row["nums"]
        found = super().preprocess(row)
        sign = next(sign for sign, apply in OPERATORS.items() if apply(one, other) == row["target"])
        problem = found["messages"][-1]["content"].splitlines()[-1]
        solved = f"{problem} <answer>{one} {sign} {other}</answer>"
        found["teacher_prompt"] = "\n".join([solved] * 3 + [problem])
        return found


register_dataset(
    DatasetMeta(dataset_name="countdown_hinted", loader=DEMO.loader, preprocess_func=Hinted())
)


class Told(Hinted):
    """What the teacher reads, as the policy's prompt: how much a hint is worth to the model (`swift forecast`)."""

    def preprocess(self, row):
        found = super().preprocess(row)
        found["messages"][-1]["content"] = found.pop("teacher_prompt")
        return found


register_dataset(
    DatasetMeta(dataset_name="countdown_told", loader=DEMO.loader, preprocess_func=Told())
)
