r"""The datasets that are registered from the start: Countdown, mathematics to train on, and evaluation sets.

Rows of the mathematical sets have a `solution`: only the final answer, as the rewards `gsm8k`, `math` and `accuracy`
need it. Files in the folder SWIFT_R1_DATA come before any hub. All of this applies to the bare name: an id on a hub is
what the hub has, prepared like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from swift_r1.data.countdown import CountdownProblem, countdown_problem, countdown_problems
from swift_r1.data.preprocessors import (
    AutoPreprocessor,
    Preprocessed,
    ResponsePreprocessor,
    Row,
    RowPreprocessor,
)
from swift_r1.data.registry import DatasetMeta, SubsetDataset, builtin_datasets, hub_datasets

COUNTDOWN_ROWS = 50_000  # of a `--dataset countdown` without #N

_COUNTDOWN_PROMPT = (
    "Using the numbers {numbers}, create an equation that equals {target}. "
    "You can use basic arithmetic operations (+, -, *, /) and each number can only be used once. "
    "Show your work in <think> </think> tags. And return the final equation and answer in <answer> </answer> tags, "
    "for example <answer> (1 + 2) / 3 * 4 = 4 </answer>."
)
_NUMBER_IN_TAGS = (
    "Think inside <think> </think> tags first, then give the number inside <answer> </answer> tags."
)
_HASHES = re.compile(r"####\s*(.+)")
_BOX = re.compile(r"\\f?boxed(?![A-Za-z])\s*")
_UNIT = re.compile(r"\s*\([^()]*\)\s*$")


def load_countdown(
    split: str = "train", count: int | None = None, seed: int = 42, start: int = 0
) -> Iterator[Row]:
    """Generated problems `start` to `start + count` as rows; training and held-out problems are never the same."""
    end = start + (COUNTDOWN_ROWS if count is None else count)
    problems: Iterator[CountdownProblem] = (
        countdown_problem(index, seed) for index in range(start, end)
    )
    if split == "eval":  # runs with different seeds are compared on the same problems
        problems = islice(countdown_problems(end, 42, "eval"), start, None)
    for problem in problems:
        yield {"nums": list(problem.nums), "target": problem.target}


load_countdown.cacheable = True  # type: ignore[attr-defined]  # the same arguments give the same rows


class CountdownPreprocessor(ResponsePreprocessor):
    """Rows with `nums` and `target` to the task's prompt; both stay as columns."""

    def preprocess(self, row: Row) -> Preprocessed:
        target = row.pop("response")  # the column `target`, renamed
        row["target"] = target
        row["query"] = _COUNTDOWN_PROMPT.format(numbers=row["nums"], target=target)
        return super().preprocess(row)


class ProblemPreprocessor(ResponsePreprocessor):
    """A problem and its final answer, whatever the columns are called: the answer becomes `solution`."""

    questions = ("problem", "question", "query")
    answers = ("answer", "final_answer", "solution")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.columns = dict(self.origin_columns)  # the names here are known: no guessing

    def preprocess(self, row: Row) -> Preprocessed:
        lowered = {str(key).lower(): key for key in row}
        names = [lowered[name] for name in self.answers if name in lowered]
        question = next((lowered[name] for name in self.questions if name in lowered), None)
        if question is None or not names:
            raise ValueError(
                f"no problem or no answer among the columns {', '.join(map(str, row)) or '(none)'}"
            )
        problem = row[question]
        answer = row[names[0]]
        rest = {key: value for key, value in row.items() if key not in (question, *names)}
        solution = self.final(answer)
        if solution is None:
            return None
        return {**rest, "solution": solution, "messages": [{"role": "user", "content": problem}]}

    def final(self, answer: Any) -> Any:
        """Returns the final answer in the row's answer; None leaves the row out."""
        if isinstance(answer, float) and answer.is_integer():
            return str(int(answer))
        if isinstance(answer, list):
            return [self.final(one) for one in answer]
        return str(answer).strip()


class WorkedPreprocessor(ProblemPreprocessor):
    r"""The answer is worked text that ends in `#### N`, or in a `\boxed{}`, or is the final answer itself."""

    def final(self, answer: Any) -> Any:
        text = super().final(answer)
        if not isinstance(text, str):
            return text
        hashes = _HASHES.search(text)
        if hashes:
            return hashes[1].strip()
        return last_boxed(text) or text


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed`, braces balanced; None where there is none or it is never closed."""
    found = max(_BOX.finditer(text), key=re.Match.start, default=None)
    if found is None or text[found.end() : found.end() + 1] != "{":
        return None
    end = closing(text, found.end())
    return None if end is None else text[found.end() + 1 : end]


def closing(text: str, start: int) -> int | None:
    r"""Returns where the brace at `start` is closed; `\{` and `\}` do not count."""
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if token[0] == "}" and depth == 0:
            return start + token.start()
    return None


class AsdivPreprocessor(ProblemPreprocessor):
    """ASDiv: a story and its question apart, a unit after the answer; rows with two answers are left out."""

    def preprocess(self, row: Row) -> Preprocessed:
        if "body" in row:
            row = {**row, "question": f"{row['body'].strip()} {row['question'].strip()}"}
            del row["body"]
        return super().preprocess(row)

    def final(self, answer: Any) -> Any:
        text = str(answer)
        return None if ";" in text else _UNIT.sub("", text).strip()


class DapoPreprocessor(ProblemPreprocessor):
    """DAPO-Math: the prompt is text or messages, the answer is in `solution` or in `reward_model`."""

    questions = ("prompt", "problem", "question")

    def preprocess(self, row: Row) -> Preprocessed:
        row = dict(row)
        about = row.pop("reward_model", None)
        if isinstance(about, dict) and "solution" not in row:
            row["solution"] = about.get("ground_truth")
        if isinstance(row.get("prompt"), list) and row["prompt"]:
            row["prompt"] = row["prompt"][-1]["content"]
        return super().preprocess(row)


class ClevrPreprocessor(ResponsePreprocessor):
    """Rows with a question about a picture; asks for tags around the thoughts and the number."""

    def preprocess(self, row: Row) -> Preprocessed:
        asked = row.get("query") or ""
        row["query"] = f"{asked} {_NUMBER_IN_TAGS}"
        return super().preprocess(row)


class ToolCallPreprocessor(RowPreprocessor):
    """A question, tools, and the calls that answer it: the first is the `solution`, as `toolbench` reads it.

    ms-swift draws one of the calls at random, another one at each start.
    """

    def preprocess(self, row: Row) -> Preprocessed:
        calls = row["answers"]
        call = (json.loads(calls) if isinstance(calls, str) else calls)[0]
        solution = f"Action: {call['name']}\nAction Input: {json.dumps(call['arguments'])}"
        return {
            "messages": [{"role": "user", "content": row["query"]}],
            "tools": row["tools"],
            "solution": solution,
        }


def _builtin(name: str, of_id: RowPreprocessor | None = None, **about: Any) -> None:
    """Registers a set under its bare name; `of_id` prepares the sets of its ids on the hubs (default: automatic)."""
    given: dict[str, Any] = {"preprocess_func": WorkedPreprocessor(), "tags": ["math"]} | about
    builtin_datasets[name] = meta = DatasetMeta(dataset_name=name, **given)
    for hub_id in filter(None, (meta.ms_dataset_id, meta.hf_dataset_id)):
        hub_datasets[hub_id] = replace(
            meta,
            dataset_name=hub_id,
            loader=None,
            files={},
            preprocess_func=of_id or AutoPreprocessor(),
        )


def _evaluation(name: str, **about: Any) -> None:
    """Registers an evaluation set."""
    _builtin(name, files={"train": f"math_eval/{name}.jsonl"}, tags=["math", "evaluation"], **about)


_builtin(
    "countdown",
    ms_dataset_id="zouxuhong/Countdown-Tasks-3to4",
    hf_dataset_id="Jiayi-Pan/Countdown-Tasks-3to4",
    loader=load_countdown,
    preprocess_func=CountdownPreprocessor(),
    of_id=CountdownPreprocessor(),  # its rows hold numbers, and no question
    help="reach a target from 3 or 4 numbers, generated, always solvable; hf::countdown: the published problems",
)
_builtin(
    "gsm8k",
    ms_dataset_id="modelscope/gsm8k",
    hf_dataset_id="openai/gsm8k",
    subsets=["main"],
    eval_split=["test"],
    files={"train": "gsm8k_train.jsonl", "eval": "gsm8k_test.jsonl"},
    help="grade-school word problems; the solution is a number",
)
_builtin(
    "asdiv",
    hf_dataset_id="EleutherAI/asdiv",
    subsets=["asdiv"],
    split=["validation"],
    files={"train": "asdiv.jsonl"},
    preprocess_func=AsdivPreprocessor(),
    help="short word problems; the solution is a number",
)
_builtin(
    "math",
    ms_dataset_id="tastelikefeet/competition_math",
    hf_dataset_id="DigitalLearningGmbH/MATH-lighteval",
    eval_split=["test"],
    files={"train": "math_train.jsonl", "eval": "math_test.jsonl"},
    help="competition problems of five levels (MATH); the solution is LaTeX",
)
_builtin(
    "xlam",
    ms_dataset_id="LLM-Research/xlam-function-calling-60k",
    hf_dataset_id="Salesforce/xlam-function-calling-60k",
    subsets=[SubsetDataset("grpo", "dataset", preprocess_func=ToolCallPreprocessor())],
    preprocess_func=ToolCallPreprocessor(),
    tags=["agent"],
    help="questions, tools and the calls that answer them; the solution is the first (--agent_template)",
)
_builtin(
    "clevr",
    ms_dataset_id="AI-ModelScope/clevr_cogen_a_train",
    hf_dataset_id="leonardPKU/clevr_cogen_a_train",
    preprocess_func=ClevrPreprocessor(),
    tags=["vision"],
    help="pictures of solids and questions how many of a kind there are; needs a model that reads images",
)
_builtin(
    "dapo-math",
    ms_dataset_id="AI-ModelScope/DAPO-Math-17k",
    hf_dataset_id="open-r1/DAPO-Math-17k-Processed",
    files={"train": "dapo_math.jsonl"},
    preprocess_func=DapoPreprocessor(),
    help="competition problems with integer answers (DAPO)",
)
_evaluation(
    "math500",
    ms_dataset_id="AI-ModelScope/MATH-500",
    hf_dataset_id="HuggingFaceH4/MATH-500",
    split=["test"],
    help="500 problems of MATH's test set",
)
_evaluation(
    "aime24",
    ms_dataset_id="HuggingFaceH4/aime_2024",
    hf_dataset_id="HuggingFaceH4/aime_2024",
    preprocess_func=ProblemPreprocessor(),
    help="30 problems of AIME 2024",
)
_evaluation(
    "amc23",
    ms_dataset_id="evalscope/amc_22-24",
    hf_dataset_id="math-ai/amc23",
    split=["test"],
    ms_split=["amc23"],
    preprocess_func=ProblemPreprocessor(),
    help="83 problems of AMC 12, 2022 and 2023",
)
_evaluation(
    "minerva",
    ms_dataset_id="knoveleng/Minerva-Math",
    hf_dataset_id="math-ai/minervamath",
    split=["test"],
    ms_split=["train"],
    help="272 problems of university courses",
)
_evaluation(
    "olympiad_bench",
    ms_dataset_id="AI-ModelScope/OlympiadBench",
    hf_dataset_id="Hothan/OlympiadBench",
    subsets=[SubsetDataset("default", "OE_TO_maths_en_COMP")],
    preprocess_func=ProblemPreprocessor(),
    help="open-ended Olympiad problems in English, text only",
)
