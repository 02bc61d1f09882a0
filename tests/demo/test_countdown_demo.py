"""The demo's problems, traces, tokenizer, model and plugin; what it learns is measured by `make demo`."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest

from tests import forks

REPO = Path(__file__).resolve().parents[2]
DEMO = REPO / "examples" / "countdown_demo"
sys.path.append(str(DEMO))

import task  # noqa: E402
import tiny_model  # noqa: E402

TRACE = "<think>4+6*5=4+30=34n,4*6+5=24+5=29y</think><answer>4*6+5</answer>"


def test_candidate_values_agree_with_the_grader() -> None:
    from swift_r1.rewards.graders.countdown import evaluate

    for expression, value in task.candidates((3, 7, 8)).items():
        assert evaluate(expression).value == value
    assert len(task.candidates((3, 7, 8))) == 6 * 9
    assert len(task.candidates((3, 3, 8))) == 3 * 9


def test_split_is_disjoint_solvable_and_fixed() -> None:
    training, held_out = task.split()
    assert (len(training), len(held_out)) == (1185, 128)
    assert not set(training) & set(held_out)
    assert all(
        list(p.nums) == sorted(p.nums) and p.target in task.candidates(p.nums).values()
        for p in held_out
    )
    task.split.cache_clear()
    assert task.split() == (training, held_out)


def test_traces_say_the_truth() -> None:
    rng, right = random.Random(0), 0
    problems = [rng.choice(task.split()[0]) for _ in range(500)]
    for problem in problems:
        text = task.write_trace(problem, rng)
        thought, answer = re.fullmatch(r"<think>(.*)</think><answer>(.*)</answer>", text).groups()
        for candidate in thought.split(","):
            expression, value = candidate.partition("=")[0], int(candidate[:-1].rpartition("=")[2])
            assert task.candidates(problem.nums)[expression] == value
            assert candidate[:-1] == task.work(expression)
            assert (candidate[-1] == "y") == (value == problem.target)
        assert thought.count("y") == thought.endswith("y")  # the search ends at the first solution
        assert answer == expression
        right += thought.endswith("y")
        assert thought.count(",") < task.MOST_CANDIDATES
    assert 0.7 < right / len(problems) < 0.95


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "model"
    tiny_model.save(tiny_model.make_model(seed=1), folder)
    return folder


def test_tokenizer_gives_back_the_exact_text(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TRACE)["input_ids"]
    assert len(ids) == len(re.sub(r"</?\w+>", "#", TRACE))  # a token a tag, a token a character
    assert tokenizer.decode(ids) == TRACE
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == TRACE
    messages = [{"role": "user", "content": "4 6 5>29"}]
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        == "4 6 5>29\n"
    )
    assert tokenizer.decode(tokenizer("4 6 5>29\n")["input_ids"]) == "4 6 5>29\n"
    assert tokenizer.unk_token_id not in tokenizer(TRACE + "4 6 5>29\n")["input_ids"]


def test_plugin_rows_and_reward() -> None:
    from swift_r1.plugins import load_plugins

    (plugin,) = load_plugins([str(DEMO / "plugin.py")])
    assert plugin.datasets == ("countdown_mini", "countdown_traces")
    assert plugin.orms == ("countdown_expression",)
    from swift_r1.data.registry import find_dataset
    from swift_r1.rewards import orms

    meta = find_dataset("countdown_mini")
    rows = {
        split: [meta.preprocess_func(row) for row in meta.loader(split=split, seed=3)]
        for split in ("train", "eval")
    }
    problems = {
        split: {(*sorted(row["nums"]), row["target"]) for row in part}
        for split, part in rows.items()
    }
    assert (len(problems["train"]), len(problems["eval"])) == (1185, 128)
    assert not problems["train"] & problems["eval"]
    row = rows["eval"][0]
    assert row["messages"] == [{"role": "user", "content": task.prompt(row["nums"], row["target"])}]
    reward = orms["countdown"]()
    assert reward(
        [TRACE, TRACE, "4*6+5"], nums=[[4, 6, 5], [4, 6, 5], [4, 6, 5]], target=[29, 30, 29]
    ) == [
        1.0,
        0.0,
        0.0,
    ]


def test_the_warm_start_is_taught_problems_of_training_alone() -> None:
    from swift_r1.data.registry import find_dataset
    from swift_r1.plugins import load_plugins

    load_plugins([str(DEMO / "plugin.py")])
    meta = find_dataset("countdown_traces")
    rows = [meta.preprocess_func(row) for row in meta.loader(split="train", seed=3)]
    assert {(*sorted(row["nums"]), row["target"]) for row in rows} == {
        (*problem.nums, problem.target) for problem in task.split()[0]
    }
    tokenizer = tiny_model.make_tokenizer()
    for row in rows[:50]:
        (asked, answer) = row["messages"]
        assert asked["content"] == task.prompt(row["nums"], row["target"])
        assert answer["role"] == "assistant" and answer["content"].startswith("<think>")
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        assert text == f"{asked['content']}\n{answer['content']}{tokenizer.eos_token}"


def test_the_warm_start_learns(tmp_path: Path) -> None:
    folder = tmp_path / "random"
    tiny_model.save(tiny_model.make_model(5), folder)
    words = f"""
        --model {folder} --external_plugins {DEMO / "plugin.py"} --dataset countdown_traces#320
        --output_dir {tmp_path / "run"} --add_version false --max_steps 10 --logging_steps 1 --warmup_ratio 0
    """.split()
    done = forks.run(
        ["-m", "swift_r1", "sft", str(DEMO / "warm_start.yaml"), *words], cwd=tmp_path, timeout=200
    )
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "run/logging.jsonl").read_text().splitlines()]
    assert log[9]["loss"] < log[0]["loss"] - 1.5
    assert (tmp_path / "run/checkpoint-10/model.safetensors").is_file()
