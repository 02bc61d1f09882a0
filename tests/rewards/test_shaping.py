"""The built-in rewards for form and length against values worked out by hand and ms-swift's expressions."""

from __future__ import annotations

import math
import re
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments, parse_arguments
from swift_r1.rewards import orms
from swift_r1.rewards.builtin import CosineReward, is_react
from swift_r1.rewards.orm import build_reward

FLAGS = [
    "--rlhf_type",
    "grpo",
    "--model",
    "m",
    "--dataset",
    "d.jsonl",
    "--per_device_train_batch_size",
    "8",
]


def arguments(*words: str) -> RlhfArguments:
    return parse_arguments(RlhfArguments, [*FLAGS, *words], {})


MS_SWIFT = re.compile(
    r"^<think>.*?</think>\s*Action:.*?Action Input:.*?$", re.DOTALL | re.MULTILINE
)
PIECES = ["<think>", "</think>", "Action:", "Action Input:", " ", "\n", "x", "</think>\nAction:"]


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=10).map("".join), st.booleans())
def test_react_means_what_the_expression_means(middle: str, whole: bool) -> None:
    text = f"<think>{middle}" if whole else middle
    assert is_react(text) == bool(MS_SWIFT.match(text))


def test_react_is_fast_on_hostile_text() -> None:
    started = time.process_time()
    texts = [
        "<think>" + "</think>" * 12_000,
        "<think>" + "</think> Action:" * 6_000,
        "<think>" + "</think>" + " " * 100_000,
    ]
    assert build_reward("react_format").function(texts) == [0.0, 0.0, 0.0]
    assert time.process_time() - started < 0.2


def test_toolbench_compares_the_last_call() -> None:
    wanted = 'Action: add\nAction Input: {"a": 1, "b": 2}'
    texts = [
        'I think.\nAction: sub\nAction: add\nAction Input: {"b": 2, "a": 1.0}',
        f"{wanted}\nObservation:",
        f"{wanted}\nObservation: 3",  # what the tool is to say
        'Action: add\nAction Input: {"a": 1}',
        "Action: add",
        "",
    ]
    reward = build_reward("toolbench").function
    assert reward(texts, solution=[wanted] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert reward(["Action: now", "no call"], solution=["Action: now\nAction Input: {}", ""]) == [
        1.0,
        1.0,
    ]
    assert reward(
        ["Action: say\nAction Input: hello"], solution=["Action: say\nAction Input: hello"]
    ) == [1.0]


def test_cosine() -> None:
    args = arguments(
        "--reward_funcs",
        "cosine",
        "--cosine_max_len",
        "100",
        "--cosine_max_len_value_correct",
        "0.25",
    )
    right = CosineReward(
        args, accuracy_orm=lambda completions, solution, **kwargs: [1.0, 1.0, 1.0, 0.0, 0.0, None]
    )
    ids = [[], [0] * 50, [[0] * 60, [0] * 40], [], [0] * 100, [0]]  # the third has two turns
    values = right(["x"] * 6, solution=["1"] * 6, response_token_ids=ids)
    assert values[:5] == pytest.approx([1.0, 0.625, 0.25, -0.5, 0.0])
    assert values[5] is None
    # 25 of 100 tokens: 0.25 + 0.75 * (1 + cos(pi / 4)) / 2
    assert right.scaled(True, 25) == pytest.approx(0.25 + 0.75 * (1 + math.sqrt(0.5)) / 2)
    # longer than the full length is no better than that
    assert [right.scaled(True, length) for length in (150, 200, 400)] == pytest.approx([0.25] * 3)
    assert [right.scaled(False, length) for length in (150, 200, 400)] == pytest.approx([0.0] * 3)


def test_cosine_asks_the_registered_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("--reward_funcs", "cosine")
    assert args.cosine_max_len == args.max_completion_length

    class Accuracy:
        def __init__(self, args=None, **kwargs):
            self.args = args

        def __call__(self, completions, solution, **kwargs):
            return [
                float(text == wanted) for text, wanted in zip(completions, solution, strict=True)
            ]

    monkeypatch.setitem(orms, "accuracy", Accuracy)
    reward = build_reward("cosine", args)
    assert reward.needs == ("solution",)
    assert reward.call(["1", "2"], {"solution": ["1", "1"], "response_token_ids": [[], []]}) == [
        1.0,
        -0.5,
    ]
    monkeypatch.delitem(orms, "accuracy")
    with pytest.raises(UsageError, match="no reward of that name is registered"):
        build_reward("cosine", args)


def test_repetition() -> None:
    args = arguments(
        "--reward_funcs",
        "repetition",
        "--repetition_n_grams",
        "2",
        "--repetition_max_penalty",
        "-2",
    )
    reward = build_reward("repetition", args).function
    # a b, b a, a b, b a: two of four bigrams are repeats
    assert reward(["A b a B a", "a b c", "a", "", "x x x x x"]) == pytest.approx(
        [-1.0, 0.0, 0.0, 0.0, -1.5]
    )


def test_soft_overlong() -> None:
    args = arguments(
        "--reward_funcs", "soft_overlong", "--soft_cache_length", "20", "--soft_max_length", "100"
    )
    reward = build_reward("soft_overlong", args).function
    lengths = [0, 80, 90, 100, 120, 200]
    values = reward(["x"] * 6, response_token_ids=[[0] * length for length in lengths])
    assert values == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0, -1.0])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["format", "--cosine_max_len", "9"],
            "--cosine_max_len has no effect without --reward_funcs cosine",
        ),
        (
            ["format", "--repetition_n_grams", "2", "--repetition_max_penalty", "-2"],
            "--repetition_n_grams, --repetition_max_penalty have no effect without --reward_funcs repetition",
        ),
        (["soft_overlong"], "--reward_funcs soft_overlong needs --soft_cache_length"),
        (
            ["soft_overlong", "--soft_cache_length", "512"],
            "--soft_cache_length 512 must be below --soft_max_length 512",
        ),
    ],
)
def test_flags_that_make_no_sense(words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        arguments("--reward_funcs", *words)
    assert caught.value.faults == (text,)


def test_a_plugins_reward_may_read_the_flags() -> None:
    args = arguments(
        "--reward_funcs", "mine", "--external_plugins", "p.py", "--soft_cache_length", "9"
    )
    assert SimpleNamespace(**args.to_dict()).soft_cache_length == 9
