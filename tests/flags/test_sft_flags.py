"""`swift sft`: what it takes, and what it refuses with a reason."""

from __future__ import annotations

import re

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags.forecast import arguments_of
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.plan import make_plan
from swift_r1.flags.sft import ALWAYS, SftArguments


def parsed(*words: str) -> SftArguments:
    given = ["--model", "m", "--dataset", "d", *words]
    return parse_arguments(SftArguments, given, environ={}, recorded=ALWAYS)


def test_a_step_is_of_rows() -> None:
    args = parsed("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2")
    plan = make_plan(args, 1, 20)
    assert (plan.completions_per_optimizer_step, plan.total_steps) == (8, 3)
    assert plan.optimizer_steps_per_round == 1
    again = arguments_of({"command": ["swift", "sft"], "args": args.to_dict()})
    assert isinstance(again, SftArguments) and again.loss_scale == "default"
    assert make_plan(again, 1, 20) == plan


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--reward_funcs format", "--reward_funcs is of sampling, rewards"),
        ("--loss_scale hermes", "--loss_scale hermes is not here: a token counts or does not"),
        (
            "--eval_steps 3 --metric_for_best_model reward",
            "one of loss, perplexity, token_accuracy",
        ),
        ("--max_length 10 --max_tokens_per_micro_batch 9", "is less than one completion may take"),
    ],
)
def test_what_is_refused(words: str, fault: str) -> None:
    with pytest.raises(UsageError, match=re.escape(fault)):
        parsed(*words.split())


def test_held_out_rows_that_are_named_are_all_evaluated() -> None:
    assert parsed("--eval_steps", "3").eval_limit == 64
    assert parsed("--eval_steps", "3", "--split_dataset_ratio", "0.1").eval_limit is None
    best = ["--eval_steps", "500", "--metric_for_best_model"]
    assert not parsed(*best, "loss").greater_is_better
    assert parsed(*best, "token_accuracy").greater_is_better
