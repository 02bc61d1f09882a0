"""What is wrong on purpose in the runs of `second.yaml`, beside the plugin files of their tasks.

Data sets and rewards are asked for by their names; an engine's or a resource's fault by the environment variable
VERDICT_FAULT, which the trainer's process reads.
"""

import copy
import multiprocessing
import os
import time
from functools import partial

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms

from swift_r1.data.registry import find_dataset
from swift_r1.rewards.graders import grade_countdown

FAULT = os.environ.get("VERDICT_FAULT", "")
HOARDED_BYTES = 24_000_000
ENGINE_TEMPERATURE = 0.4
ROUNDS_BETWEEN_PUSHES = 8
HANG_SECONDS = 20
HOARD = []


def sorted_answers(split="train", seed=42):
    """The word problems with the column of answers sorted, and the questions as they were."""
    rows = list(find_dataset("word_problems").loader(split=split, seed=seed))
    answers = sorted((row["solution"] for row in rows), key=int)
    return [{**row, "solution": one} for row, one in zip(rows, answers, strict=True)]


def worked_answers(split="train", seed=42):
    """The word problems with the whole worked solution in the answer's column, as GSM8K has it."""
    for row in find_dataset("word_problems").loader(split=split, seed=seed):
        yield {**row, "solution": f"First one step, then the other.\n#### {row['solution']} things"}


for function in (sorted_answers, worked_answers):
    register_dataset(
        DatasetMeta(
            dataset_name=function.__name__,
            loader=function,
            preprocess_func=ResponsePreprocessor(),
            tags=["math"],
        )
    )


class CachedByProblem(ORM):
    """The demo's reward behind a cache whose key leaves the completion out: a group gets its first one's score."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cache = {}

    def __call__(self, completions, nums, target, **columns):
        scores = []
        for text, own, goal in zip(completions, nums, target, strict=True):
            problem = (tuple(own), goal)
            if problem not in self.cache:
                self.cache[problem] = grade_countdown(text, own, goal).score
            scores.append(self.cache[problem])
        return scores


class AsCompleted(ORM):
    """The demo's reward, in the order in which a pool of threads is done: short texts first."""

    def __call__(self, completions, nums, target, **columns):
        scores = [
            grade_countdown(*item).score for item in zip(completions, nums, target, strict=True)
        ]
        done = sorted(range(len(completions)), key=lambda number: len(completions[number]))
        return [scores[number] for number in done]


class Hanging(ORM):
    """The demo's reward by a symbolic checker that hangs on an answer with two products."""

    def __call__(self, completions, nums, target, **columns):
        scores = []
        for item in zip(completions, nums, target, strict=True):
            if item[0].rpartition("<answer>")[2].count("*") == 2:
                time.sleep(HANG_SECONDS)
            scores.append(grade_countdown(*item).score)
        return scores


orms["cached_by_problem"] = CachedByProblem
orms["as_completed"] = AsCompleted
orms["hanging"] = Hanging


def push_every_eighth(rollouts):
    """Has the engine keep its weights for eight rounds."""

    def publish(self):
        if self.weight_version % ROUNDS_BETWEEN_PUSHES == 0:
            self.engine.model = copy.deepcopy(self.backend.generation_model())
        self.weight_version += 1

    rollouts.publish_weights = publish


def when_it_trains(engine, faulty):
    """Has `faulty(generate, ...)` answer in the place of `generate`, except in the check before the first push, which
    would refuse such an engine: a server that has the fault under load passes it."""
    generate = engine.generate

    def answer(self, requests, version, *callbacks):
        if not version:
            return generate(self, requests, version, *callbacks)
        return faulty(partial(generate, self), requests, version, *callbacks)

    engine.generate = answer


def first_seed(generate, requests, *rest):
    own = [one.model_copy(update={"seeds": one.seeds[:1] * one.n}) for one in requests]
    return generate(own, *rest)


def own_temperature(generate, requests, *rest):
    changed = {"temperature": ENGINE_TEMPERATURE}
    own = [
        one.model_copy(update={"sampling": one.sampling.model_copy(update=changed)})
        for one in requests
    ]
    return generate(own, *rest)


def as_finished(generate, requests, version, on_done, on_output, unwanted):
    """Gives the outputs to the requests in the order in which they end."""
    finished = []

    def keep(_number, output):
        finished.append(output)

    generate(requests, version, on_done, keep, unwanted)
    outputs = []
    for number, output in enumerate(finished):
        own = output.model_copy(update={"request_id": requests[number].request_id})
        outputs.append(own)
        on_output(number, own)
    return outputs


def hoarding(generate, *given):
    """Keeps 24 MB of each round, as a callback does that gathers logits for a plot."""
    HOARD.append(os.urandom(HOARDED_BYTES))
    return generate(*given)


if FAULT and multiprocessing.parent_process() is None:  # no worker of the rewards
    from swift_r1.rollout.base import EmbeddedRollouts
    from swift_r1.serving.engines.transformers import TransformersEngine

    match FAULT:
        case "every eighth push":
            push_every_eighth(EmbeddedRollouts)
        case "one seed":
            when_it_trains(TransformersEngine, first_seed)
        case "own temperature":
            when_it_trains(TransformersEngine, own_temperature)
        case "order of finishing":
            when_it_trains(TransformersEngine, as_finished)
        case "hoarding":
            when_it_trains(TransformersEngine, hoarding)
        case _:
            raise ValueError(f"VERDICT_FAULT: {FAULT!r} is none of the faults")
