"""The Countdown problems and the plugin file: solvable, deterministic, disjoint, and its reward right on solutions."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from swift_r1.data.countdown import (
    CountdownProblem,
    CountdownSpec,
    countdown_problem,
    countdown_problems,
    is_held_out,
)
from swift_r1.data.loading import columns_of, load_rows
from swift_r1.plugins import load_plugins
from swift_r1.rewards.graders.countdown import evaluate
from swift_r1.rewards.orm import build_rewards
from tests.data.test_builtin import arguments

PLUGIN = str(Path(__file__).parents[2] / "plugins" / "countdown.py")
SMALL = CountdownSpec(counts=(3,), numbers=(1, 9), operators="+-*", targets=(1, 99))


def solution(problem: CountdownProblem, operators: str = "+-*/") -> str:
    """Returns an expression that reaches the target, found by trying all."""

    def found(terms: list[tuple[str, int]]) -> str | None:
        if len(terms) == 1:
            return terms[0][0] if terms[0][1] == problem.target else None
        for one, other in permutations(range(len(terms)), 2):
            rest = [term for place, term in enumerate(terms) if place not in (one, other)]
            (a, left), (b, right) = terms[one], terms[other]
            values = {"+": left + right, "-": left - right, "*": left * right}
            if right and not left % right:
                values["/"] = left // right
            for operator in operators:
                if operator in values:
                    joined = (f"({a} {operator} {b})", values[operator])
                    if text := found([*rest, joined]):
                        return text
        return None

    text = found([(str(number), number) for number in problem.nums])
    assert text is not None, problem
    return text


@pytest.mark.parametrize("spec", [CountdownSpec(), SMALL])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_always_solvable_and_within_the_spec(spec: CountdownSpec, split: str) -> None:
    for problem in countdown_problems(30, 7, split, spec):
        solved = evaluate(solution(problem, spec.operators))
        assert solved.value == problem.target
        assert sorted(solved.numbers) == sorted(problem.nums)
        assert len(problem.nums) in spec.counts
        assert all(spec.numbers[0] <= number <= spec.numbers[1] for number in problem.nums)
        assert spec.targets[0] <= problem.target <= spec.targets[1]


def test_a_problem_depends_on_index_seed_and_split_alone() -> None:
    assert countdown_problem(5, 1) == list(countdown_problems(6, 1))[5]
    assert countdown_problem(5, 1) != countdown_problem(5, 2)
    # the same in every version: runs and papers refer to these problems
    assert countdown_problem(0, 42).identity == ((12, 48, 70, 79), 51)


def test_splits_share_no_problem_whatever_the_seed() -> None:
    train = {
        problem.identity
        for seed in (1, 2)
        for problem in countdown_problems(4000, seed, "train", SMALL)
    }
    held_out = {problem.identity for problem in countdown_problems(25, 3, "eval", SMALL)}
    assert len(held_out) == 25, "held-out problems are all different"
    assert not train & held_out
    assert all(is_held_out(*identity) for identity in held_out)
    assert not any(is_held_out(*identity) for identity in train)


def test_too_small_a_space_is_told() -> None:
    with pytest.raises(ValueError, match="held-out problems found"):
        list(countdown_problems(500, 1, "eval", CountdownSpec((2,), (1, 3), "+-*", (1, 9))))


def test_the_plugin_end_to_end() -> None:
    load_plugins([PLUGIN])
    data = load_rows(arguments(dataset=["countdown#300"], evaluates=True))
    again = load_rows(arguments(dataset=["countdown#300"], evaluates=True))
    other = load_rows(arguments(dataset=["countdown#300"], evaluates=True, seed=1))
    assert (len(data.train), len(data.eval)) == (300, 64)
    assert data == again
    assert data.train != other.train
    assert [row["nums"] for row in data.eval] == [row["nums"] for row in other.eval], (
        "held-out rows ignore the seed"
    )
    assert columns_of(data.train, data.eval) == {
        "nums",
        "target",
        "messages",
        "dataset",
        "prompt_id",
    }
    row = data.train[0]
    (message,) = row["messages"]
    assert (
        str(row["nums"]) in message["content"] and f"equals {row['target']}." in message["content"]
    )
    assert {row["prompt_id"] for row in data.train}.isdisjoint(
        row["prompt_id"] for row in data.eval
    )

    (reward,) = build_rewards(["external_countdown"], columns_of(data.train, data.eval))
    problems = list(countdown_problems(50))
    completions = [
        f"<answer>{solution(problem)} = {problem.target}</answer>" for problem in problems
    ]
    columns = {"nums": [list(p.nums) for p in problems], "target": [p.target for p in problems]}
    assert reward.call(completions, columns) == [1.0] * 50
    assert reward.call(["no idea"] * 50, columns) == [0.0] * 50
