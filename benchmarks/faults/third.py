"""Faults of `third.yaml` that no flag can make: data sets, rewards, and what is done to the engine where
`THIRD_FAULT` names it."""

import os
import random
import sys
import time
from pathlib import Path
from statistics import mean

from swift.dataset import DatasetMeta, ResponsePreprocessor, RowPreprocessor, register_dataset
from swift.rewards import ORM, orms

from swift_r1.rewards.graders import grade_countdown

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path += [str(_EXAMPLES / name) for name in ("countdown_demo", "mini")]

import task  # noqa: E402
import word_problems  # noqa: E402


def easiest_first(split="train"):
    """Three files of the demo's problems behind one another, 64 rows each: those with most solutions, some from the
    middle, those with fewest."""

    def solutions(problem):
        return list(task.candidates(problem.nums).values()).count(problem.target)

    every = sorted(task.split()[split != "train"], key=solutions, reverse=True)
    middle = len(every) // 2
    for problem in every[:64] + every[middle - 32 : middle + 32] + every[-64:]:
        yield {"nums": list(problem.nums), "target": problem.target}


class CountdownPrompt(RowPreprocessor):
    def preprocess(self, row):
        row["messages"] = [{"role": "user", "content": task.prompt(row["nums"], row["target"])}]
        return row


def _word_problems(split, seed):
    problems = word_problems.split()[split != "train"]
    rng = random.Random(seed if split == "train" else 0)
    for problem in problems:
        yield problem.question(rng), problem.steps[1]


def float_answers(split="train", seed=42):
    """Word problems whose answers went through a column of floats: `12.0`."""
    for question, answer in _word_problems(split, seed):
        yield {"query": question, "solution": str(float(answer))}


def rendered_questions(split="train", seed=42):
    """Word problems whose questions are in the chat template already."""
    for question, answer in _word_problems(split, seed):
        yield {"query": f"Question: {question}\nAnswer: ", "solution": str(answer)}


class Brevity(ORM):
    """1 for an empty completion, 0 for one of 160 characters."""

    def __call__(self, completions, **kwargs):
        return [max(0.0, 1 - len(text) / 160) for text in completions]


class CentredCountdown(ORM):
    """The score less the mean of its prompt's scores."""

    def __call__(self, completions, nums, target, prompt_id, **kwargs):
        scores = [
            float(grade_countdown(*item).score)
            for item in zip(completions, nums, target, strict=True)
        ]
        groups = {}
        for one, score in zip(prompt_id, scores, strict=True):
            groups.setdefault(one, []).append(score)
        return [score - mean(groups[one]) for one, score in zip(prompt_id, scores, strict=True)]


class NovelCountdown(ORM):
    """The score; each completion is compared with all that came before, which takes longer from step to step."""

    seen = 0

    def __call__(self, completions, nums, target, **kwargs):
        time.sleep(len(completions) * self.seen * 150e-6)
        self.seen += len(completions)
        return [
            float(grade_countdown(*item).score)
            for item in zip(completions, nums, target, strict=True)
        ]


def _rounded_to_four_bits(weight):
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / 7
    return (weight / scale).round() * scale


def _hinder(fault):
    """Changes what the embedded engine does in each round."""
    import torch

    from swift_r1.serving.engines.transformers import TransformersEngine

    generate = TransformersEngine.generate

    def with_equal_seeds(self, requests, *args, **kwargs):
        requests = [
            one.model_copy(update={"seeds": type(one.seeds)([one.seeds[0]] * one.n)})
            for one in requests
        ]
        return generate(self, requests, *args, **kwargs)

    def with_four_bits(self, requests, weight_version, *args, **kwargs):
        if weight_version == 0:  # the check of the engine before the run
            return generate(self, requests, weight_version, *args, **kwargs)
        matrices = [one for one in self.model.parameters() if one.ndim == 2]
        kept = [one.detach().clone() for one in matrices]
        with torch.no_grad():
            for one in matrices:
                one.copy_(_rounded_to_four_bits(one))
        try:
            return generate(self, requests, weight_version, *args, **kwargs)
        finally:
            with torch.no_grad():
                for one, whole in zip(matrices, kept, strict=True):
                    one.copy_(whole)

    ways = {"equal seeds": with_equal_seeds, "four bits": with_four_bits}
    TransformersEngine.generate = ways[fault]


if os.environ.get("THIRD_FAULT") and "torch" in sys.modules:  # not in processes of rewards
    _hinder(os.environ["THIRD_FAULT"])

for _name, _loader, _preprocessor in (
    ("countdown_easiest_first", easiest_first, CountdownPrompt()),
    ("word_problems_float_answers", float_answers, ResponsePreprocessor()),
    ("word_problems_rendered", rendered_questions, ResponsePreprocessor()),
):
    register_dataset(DatasetMeta(dataset_name=_name, loader=_loader, preprocess_func=_preprocessor))
orms["brevity"] = Brevity
orms["centred_countdown"] = CentredCountdown
orms["novel_countdown"] = NovelCountdown
