"""What is wrong on purpose in the runs of `first.yaml`, beside the plugin file of its task.

The data sets are made of those of that other file, which is loaded first, and so are only asked for when rows are.
"""

import os
import random
import time
import zlib
from itertools import permutations, product

from swift.dataset import DatasetMeta, register_dataset
from swift.rewards import ORM, orms

from swift_r1 import Sampler, samplers
from swift_r1.data.registry import find_dataset
from swift_r1.rewards.graders import grade_countdown
from swift_r1.rewards.graders.answers import first_answer
from swift_r1.rewards.graders.countdown import ArithmeticFault, evaluate


def solved(completions, nums, target):
    return [grade_countdown(*item).score for item in zip(completions, nums, target, strict=True)]


# Data


def data(base):
    """Registers a function from the rows of the data set `base` and the split to other rows, under its name."""

    def register(function):
        def load(split="train", seed=42):
            rows = [dict(row) for row in find_dataset(base).loader(split=split, seed=seed)]
            return function(rows, split)

        def preprocess(row):
            return find_dataset(base).preprocess_func(row)

        register_dataset(
            DatasetMeta(
                dataset_name=function.__name__,
                loader=load,
                preprocess_func=preprocess,
                tags=["math"],
            )
        )
        return function

    return register


@data("word_problems")
def one_row_down(rows, split):
    """Joined by their place with a file of answers that lacks its first line."""
    answers = [row["solution"] for row in rows]
    return [
        row | {"solution": answer}
        for row, answer in zip(rows, answers[1:] + answers[:1], strict=True)
    ]


@data("word_problems")
def through_a_spreadsheet(rows, split):
    """Whole numbers that a table with an empty cell has made floats."""
    return [row | {"solution": f"{int(row['solution'])}.0"} for row in rows]


@data("countdown_mini")
def sums_only(rows, split):
    """Trains on problems that adding up solves; those held out are as ever."""
    if split != "train":
        return rows
    return [row for row in rows if sum(row["nums"]) == row["target"]]


@data("countdown_mini")
def easy_ones_first(rows, split):
    """192 problems in the order of the file: that with the most solutions first."""
    return sorted(rows[:192], key=solutions, reverse=True)


def solutions(row):
    """Returns how many expressions reach the row's target."""
    expressions = {
        f"{a}{one}{b}{other}{c}"
        for (a, b, c), one, other in product(permutations(row["nums"]), "+-*", "+-*")
    }
    return sum(evaluate(text).value == row["target"] for text in expressions)


# Templates

WITHOUT_ITS_F = (
    "4 and 3 make 12: <answer>4 * 3</answer>\n"
    "9 and 5 make 14: <answer>9 + 5</answer>\n"
    "8 and 6 make 2: <answer>8 - 6</answer>\n"
    "{nums[0]} and {nums[1]} make {target}:"
)


def load_pairs(split="train", count=None, seed=42):
    return find_dataset("countdown_two").loader(split=split, count=count, seed=seed)


def ask(row):
    """Asks for {target}, as it stands there."""
    return row | {"messages": [{"role": "user", "content": WITHOUT_ITS_F}]}


register_dataset(
    DatasetMeta(dataset_name="placeholders", loader=load_pairs, preprocess_func=ask, tags=["math"])
)

# Rewards


class ShortestFirst(ORM):
    """Grades in the order of length, as a reward model's batches want it, and leaves the scores in that order."""

    def __call__(self, completions, nums, target, **columns):
        order = sorted(range(len(completions)), key=lambda one: len(completions[one]))
        return solved(*([column[one] for one in order] for column in (completions, nums, target)))


class Critic(ORM):
    """A judge that is sent the first message in the place of the last."""

    def __call__(self, completions, messages, **columns):
        return [zlib.crc32(turns[0]["content"].encode()) % 11 / 10 for turns in messages]


class NoneWhereWrong(ORM):
    """Has no opinion of what its parser cannot match with the gold answer, which is every wrong answer."""

    def __call__(self, completions, nums, target, **columns):
        return [score or None for score in solved(completions, nums, target)]


class Distance(ORM):
    """How far the answer is from the target, where its negative was meant; 0 for what is no expression."""

    def __call__(self, completions, target, **columns):
        return [distance(*item) for item in zip(completions, target, strict=True)]


def distance(completion, target):
    answer = first_answer(completion)
    if answer is None:
        return 0.0
    try:
        return abs(float(evaluate(answer).value) - target) / 100
    except ArithmeticFault:
        return 0.0


class MoodyJudge(ORM):
    """A judge at temperature 1 that is less sure of its points the longer the text is."""

    def __call__(self, completions, nums, target, **columns):
        scores = solved(completions, nums, target)
        return [
            score + random.gauss(0, len(text) / 20)
            for score, text in zip(scores, completions, strict=True)
        ]


class OneByOne(ORM):
    """Asks a service that takes a tenth of a second, for one completion after the other."""

    def __call__(self, completions, nums, target, **columns):
        time.sleep(0.1 * len(completions))
        return solved(completions, nums, target)


orms["shortest_first"] = ShortestFirst
orms["critic"] = Critic
orms["none_where_wrong"] = NoneWhereWrong
orms["distance"] = Distance
orms["moody_judge"] = MoodyJudge
orms["one_by_one"] = OneByOne


# Resources


class Archive(Sampler):
    """Keeps 2 MB of what it is told of each group, for a plot that nobody has drawn yet."""

    def __init__(self, rows, args):
        super().__init__(rows, args)
        self.kept = []

    def next(self, count):
        return self.order.draws(count)

    def tell(self, outcomes):
        self.kept += [os.urandom(2_000_000) for _ in outcomes]


samplers["archive"] = Archive

# The engine


def without_an_end(engine, request):
    """The engine does not know which token ends the model's turn."""
    engine.eos = engine.eos[:0]
    sampling = request.sampling.model_copy(update={"stop_token_ids": ()})
    return request.model_copy(update={"sampling": sampling})


def alike(engine, request):
    """The engine begins each completion of a request with the request's own seed."""
    return request.model_copy(update={"seeds": request.seeds[:1] * request.n})


ENGINES = {"no end": without_an_end, "one seed": alike}

if os.environ.get("VERDICT_FAULT") in ENGINES:
    from swift_r1.serving.engines.transformers import TransformersEngine

    changed = ENGINES[os.environ["VERDICT_FAULT"]]
    generate = TransformersEngine.generate

    def generate_changed(self, requests, *args, **kwargs):
        return generate(self, [changed(self, one) for one in requests], *args, **kwargs)

    TransformersEngine.generate = generate_changed
