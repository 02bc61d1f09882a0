"""Base classes, construction, validation, the built-in format reward, combination, and the monitor."""

from __future__ import annotations

import math
import re
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.errors import RunFailed, UsageError
from swift_r1.rewards import ORM, AsyncORM, orms
from swift_r1.rewards.builtin import is_formatted
from swift_r1.rewards.monitor import InvalidRewardMonitor
from swift_r1.rewards.orm import build_reward, build_rewards
from swift_r1.rewards.types import InvalidReward, ItemOutcome, RewardBatch, RewardColumn
from swift_r1.rewards.worker import checked
from swift_r1.rollout.scoring import reward_metrics

ARGS = SimpleNamespace(temperature=0.7, max_completion_length=100)


class V4(ORM):
    def __call__(self, completions, solution, level=1, **kwargs):
        return [0.0] * len(completions)


class V4Required:
    def __init__(self, args, **kwargs):
        self.args = args

    def __call__(self, completions, *, nums, messages, **kwargs):
        return [0.0] * len(completions)


class V3:
    def __init__(self):
        self.ready = True

    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)


class V3Named:
    def __init__(self, temperature, unknown=5):
        self.temperature, self.unknown = temperature, unknown

    def __call__(self, completions, answer, **kwargs):
        return [0.0] * len(completions)


class Impossible:
    def __init__(self, tokenizer_path):
        self.path = tokenizer_path

    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)


class Later(AsyncORM):
    async def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "v4": V4,
        "v4_required": V4Required,
        "v3": V3,
        "v3_named": V3Named,
        "later": Later,
        "ready": V3(),
    }
    entries |= {
        "impossible": Impossible,
        "number": 3,
        "plain": lambda completions, target: [0.0] * len(completions),
    }
    for name, entry in entries.items():
        monkeypatch.setitem(orms, name, entry)


@pytest.mark.parametrize(
    ("name", "needs", "is_async"),
    [
        ("v4", ("solution",), False),
        ("v4_required", ("nums",), False),
        ("v3", (), False),
        ("v3_named", ("answer",), False),
        ("later", (), True),
        ("ready", (), False),
        ("plain", ("target",), False),
        ("format", (), False),
    ],
)
def test_construction_and_needed_columns(
    registered: None, name: str, needs: tuple[str, ...], is_async: bool
) -> None:
    reward = build_reward(name, ARGS)
    assert reward.needs == needs
    assert reward.is_async is is_async


def test_arguments_reach_the_constructor(registered: None) -> None:
    assert build_reward("v4", ARGS).function.args is ARGS
    assert build_reward("v4_required", ARGS).function.args is ARGS
    named = build_reward("v3_named", ARGS).function
    assert (named.temperature, named.unknown) == (0.7, 5)


def test_plain_function_gets_only_what_it_names(registered: None) -> None:
    columns = {"target": [1, 2], "messages": [[], []], "trainer_state": None}
    assert build_reward("plain").call(["a", "b"], columns) == [0.0, 0.0]


def test_faults_are_reported_together(registered: None) -> None:
    with pytest.raises(UsageError) as caught:
        build_rewards(
            ["v4", "formt", "v4 v3", "impossible", "number", "v3"],
            frozenset(("answer", "messages")),
            ARGS,
        )
    needs, unknown, several, impossible, number = caught.value.faults
    assert "v4 needs the column solution, and the data has answer" in needs
    assert "formt" in unknown and "did you mean format" in unknown
    assert several.endswith(
        "there is no reward function 'v4 v3': several are a list, in YAML [v4, v3]"
    )
    assert "impossible cannot be constructed" in impossible and "tokenizer_path" in impossible
    assert "number is an int" in number
    assert all("\n" not in fault for fault in caught.value.faults)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, 0.5, None], (1.0, 0.5, None)),
        ((True, False, Fraction(1, 2)), (1.0, 0.0, 0.5)),
        (np.array([1.0, 2.0, 3.0]), (1.0, 2.0, 3.0)),
        ([np.float32(1), np.int64(2), np.bool_(True).item()], (1.0, 2.0, 1.0)),
        (torch.tensor([1.0, 2.0, 3.0]), (1.0, 2.0, 3.0)),
        ([torch.tensor(1.0), torch.tensor([2.0]), 3], (1.0, 2.0, 3.0)),
    ],
)
def test_good_values(returned: object, expected: tuple) -> None:
    assert checked(returned, 3) == ItemOutcome(expected)


def test_bad_values_are_invalid_one_by_one() -> None:
    found = checked([math.nan, -math.inf, "1", [1], {}, 10**400, None, 1, torch.ones(2)], 9)
    values, invalid = found.values, found.invalid
    assert [bad.index for bad in invalid] == [0, 1, 2, 3, 4, 5, 8]
    assert values[6:8] == (None, 1.0)
    assert all(math.isnan(values[bad.index]) for bad in invalid)


@pytest.mark.parametrize(
    "returned",
    [1.0, 5, True, np.float64(1), torch.tensor(1.0), None, "abc", {}, [1, 2], [1] * 4, {1, 2, 3}],
)
def test_wrong_shapes(returned: object) -> None:
    outcome = checked(returned, 3)
    assert outcome.failure is not None and (outcome.kind, outcome.values) == ("shape", ())


MS_SWIFT = re.compile(
    r"^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])", re.DOTALL | re.MULTILINE
)
PIECES = ["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "x", "</think>\n<answer>"]


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=10).map("".join), st.booleans())
def test_format_means_what_the_expression_means(middle: str, whole: bool) -> None:
    text = f"<think>{middle}</answer>" if whole else middle
    assert is_formatted(text) == bool(MS_SWIFT.match(text))


def test_format_is_fast_on_hostile_text() -> None:
    started = time.process_time()
    reward = build_reward("format").function
    texts = [
        "<think>" + "</think><answer>" * 6_000,
        "<think>" + "</think> " * 11_000 + "</answer>",
        "<think>" * 14_000,
    ]
    assert reward(texts) == [0.0, 0.0, 0.0]
    assert reward(
        ["<think>a</think> <answer>b</answer>", "<think>a</think><answer>b</answer>\n"]
    ) == [1.0, 0.0]
    assert time.process_time() - started < 0.2


def column(name: str, values: list[float | None]) -> RewardColumn:
    bad = [i for i, value in enumerate(values) if value is not None and math.isnan(value)]
    return RewardColumn(name, tuple(values), tuple(InvalidReward(i, "because") for i in bad), 0.0)


def test_groups_without_any_usable_reward_are_counted() -> None:
    item = SimpleNamespace
    scored = [
        item(group=g, reward=r) for g, r in ((0, math.nan), (0, math.nan), (1, 1.0), (1, math.nan))
    ]
    assert reward_metrics(scored, [])["frac_groups_all_invalid"] == 0.5


def test_monitor_names_function_cause_and_example() -> None:
    monitor = InvalidRewardMonitor(0.2)
    batch = RewardBatch(["some\ncompletion", "b", "c", "d"], {}, 4)
    broken = column("bad", [math.nan] * 4)
    for _ in range(4):  # 4 of 20 steps are exactly the share allowed
        monitor.update([column("good", [1.0] * 4), broken], batch)
    with pytest.raises(
        RunFailed, match=r"reward bad .*cause: because; for example on: 'some completion'"
    ):
        monitor.update([column("good", [1.0] * 4), broken], batch)


def test_monitor_writes_a_row_for_each_invalid_reward() -> None:
    rows: list = []
    batch = RewardBatch(
        ["a", "b"], {"target": [1, 2], "response_token_ids": [[1], [2]]}, 2, {"global_step": 4}
    )
    InvalidRewardMonitor(1.0, rows.append).update(
        [column("bad", [1.0, math.nan]), column("good", [1.0, None])], batch
    )
    row = {
        "target": 2,
        "step": 5,
        "reward": "bad",
        "kind": "value",
        "cause": "because",
        "completion": "b",
    }
    assert rows == [row]
    with pytest.raises(RunFailed):  # the rows of the step that ends the run are written too
        InvalidRewardMonitor(0.0, rows.append).update([column("bad", [math.nan, math.nan])], batch)
    assert len(rows) == 3


def test_metrics_count_invalid_rewards_by_kind() -> None:
    bad = tuple(
        InvalidReward(i, "x", kind) for i, kind in enumerate(("timeout", "timeout", "died"))
    )
    metrics = reward_metrics([], [RewardColumn("r", (math.nan, math.nan, math.nan, 1.0), bad, 2.5)])
    assert metrics["rewards/r/invalid"] == 0.75
    assert metrics["rewards/r/invalid/timeout"] == 0.5 and metrics["rewards/r/invalid/died"] == 0.25
    assert "rewards/r/invalid/memory" not in metrics
    assert metrics["rewards/r/seconds"] == 2.5


def test_monitor_forgets_old_steps_and_bears_a_few() -> None:
    monitor = InvalidRewardMonitor(0.2)
    batch = RewardBatch(["a", "b", "c", "d"], {}, 4)
    for step in range(200):  # one of four in every other step: 12.5 %
        bad = step % 2 == 0
        monitor.update([column("rare", [math.nan if bad else 1.0, 1.0, 1.0, 1.0])], batch)
    for _ in range(4):
        monitor.update([column("rare", [math.nan, math.nan, 1.0, 1.0])], batch)
    with pytest.raises(RunFailed):
        for _ in range(20):
            monitor.update([column("rare", [math.nan, math.nan, 1.0, 1.0])], batch)


@pytest.mark.parametrize("name", ["math", "math_tag", "math_tag_strict"])
def test_verifier_chooses_the_judge(name: str) -> None:
    """A fraction that is not in lowest terms is right only by the library."""
    text = "<think> half </think> <answer> \\boxed{\\frac{2}{4}} </answer>"
    values = {}
    for verifier in ("fast", "math_verify"):
        reward = build_reward(name, SimpleNamespace(verifier=verifier))
        values[verifier] = reward.call(
            [text, text.replace("2}", "3}")], {"solution": ["\\frac{1}{2}"] * 2}
        )
    assert values == {"fast": [0.0, 0.0], "math_verify": [1.0, 0.0]}
    loose = text.replace("> <answer", "><answer")
    strict = build_reward(name, None).call(
        [loose.replace("\\frac{2}{4}", "0.5")], {"solution": ["\\frac{1}{2}"]}
    )
    assert strict == [0.0 if name == "math_tag_strict" else 1.0]
