"""The rule `fast` on rewritten answers and on near ones that are wrong: a part of benchmarks/grading_accuracy.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from swift_r1.rewards.orm import build_reward

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("SWIFT_R1_DATA", ROOT / ".." / "shared" / "data"))
pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}: set SWIFT_R1_DATA"),
]


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import grading_accuracy

    yield grading_accuracy
    del sys.modules["grading_accuracy"], sys.modules["rewritten_answers"]


def test_no_near_answer_is_right_for_the_reward_accuracy(accuracy: ModuleType) -> None:
    chosen = accuracy.pairs(accuracy.CHANGES, accuracy.gold_answers(DATA))[::10]
    texts = [accuracy.completion(answer, number) for number, (_, _, answer) in enumerate(chosen)]
    assert len(texts) == 200
    texts += [f"So the answer is {answer}." for _, _, answer in chosen]
    assert (
        build_reward("accuracy").call(texts, {"solution": [gold for _, gold, _ in chosen] * 2})
        == [0.0] * 400
    )


def test_no_near_answer_is_right_and_hardly_a_rewritten_one_is_wrong(accuracy: ModuleType) -> None:
    golds = accuracy.gold_answers(DATA)
    # made by sympy: slow
    kept = {kind: rule for kind, rule in accuracy.KEEPS.items() if kind != "equivalent forms"}
    wrong = {}
    for rules, right in ((kept, 1.0), (accuracy.CHANGES, 0.0)):
        chosen = accuracy.pairs(rules, golds)
        assert len(chosen) == accuracy.COUNT and {kind for kind, _, _ in chosen} == set(rules)
        wrong[right] = [
            (kind, gold, answer)
            for number, (kind, gold, answer) in enumerate(chosen)
            if accuracy.VERIFIERS["fast"](accuracy.completion(answer, number), gold) != right
        ]
    assert wrong[0.0] == []
    assert len(wrong[1.0]) <= accuracy.COUNT // 100, wrong[1.0]
