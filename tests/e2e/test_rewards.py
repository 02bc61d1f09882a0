"""Hostile rewards in a whole run: it goes on and says what was wrong, or ends with exit code 5 and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

HOSTILE = '''
import os
from swift.rewards import orms


def dies_now_and_then(completions, trainer_state, **kwargs):
    """Ends its process in the second step, whatever it is given."""
    if trainer_state.global_step == 1:
        os._exit(3)
    return [0.5] * len(completions)


def always_nan(completions, **kwargs):
    return [float("nan")] * len(completions)


def says_nothing(completions, trainer_state, **kwargs):
    """From the second step on."""
    return [None if trainer_state.global_step == 1 else 0.5] * len(completions)


orms["dies_now_and_then"] = dies_now_and_then
orms["says_nothing"] = says_nothing
orms["always_nan"] = always_nan
'''


WAITS = '''
import time
from pathlib import Path
from swift.rewards import orms
from swift.rollout import MultiTurnScheduler, multi_turns

NOTE = Path(__file__).with_name("called")


def leaves_a_note(completions, **kwargs):
    NOTE.touch()
    return [0.5] * len(completions)


class Waits(MultiTurnScheduler):
    """The first prompt has one turn; the second goes on after its second turn only when a reward was called."""

    def check_finished(self, infer_request, response_choice, current_turn):
        first = infer_request.uuid.split("/")[-2] == "0"
        end = time.monotonic() + 100
        while current_turn == 2 and not NOTE.exists() and time.monotonic() < end:
            time.sleep(0.01)
        if current_turn == 2 and not NOTE.exists():
            raise TimeoutError("no reward was called while the second prompt was played")
        return first or current_turn == 3

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "more"})
        return {"infer_request": infer_request}


orms["leaves_a_note"] = leaves_a_note
multi_turns["waits"] = Waits
'''


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    return path


def plugins(hostile: Path) -> list[Path]:
    return [Path(__file__).parent / "digits_plugin.py", hostile]


def test_the_run_goes_on(rlhf, tiny_model, hostile: Path) -> None:
    run = rlhf(
        tiny_model,
        external_plugins=plugins(hostile),
        reward_funcs=["digits", "dies_now_and_then"],
        reward_isolation="process",
        max_steps=3,
        learning_rate=1e-3,
        max_invalid_reward_ratio=1,
    )
    assert run.code == 0
    shares = [step["rewards/dies_now_and_then/invalid"] for step in run.steps]
    assert shares == [0.0, 1.0, 0.0]
    assert run.steps[1]["rewards/dies_now_and_then/invalid/died"] == 1.0
    assert (
        run.steps[1]["frac_groups_all_invalid"] == 1.0
        and run.steps[0]["frac_groups_all_invalid"] == 0.0
    )
    assert (
        run.steps[0]["rewards/digits/seconds"] > 0 and run.steps[1]["rewards/digits/invalid"] == 0.0
    )
    rows = run.lines("invalid_rewards.jsonl")
    assert len(rows) == 8
    assert {(row["step"], row["reward"], row["kind"]) for row in rows} == {
        (2, "dies_now_and_then", "died")
    }
    assert all(
        "exit code 3" in row["cause"] and "completion" in row and "start" in row for row in rows
    )
    advantages = [row["advantage"] for row in run.lines("completions.jsonl") if row["step"] == 2]
    assert advantages == [None] * 8


@pytest.mark.long
def test_rewards_are_computed_while_other_prompts_are_played(
    rlhf, tiny_model, tmp_path: Path
) -> None:
    path = tmp_path / "waits.py"
    path.write_text(WAITS)
    run = rlhf(
        tiny_model,
        external_plugins=plugins(path),
        reward_funcs="leaves_a_note",
        reward_isolation="process",
        multi_turn_scheduler="waits",
        max_turns=4,
        max_completion_length=4,
        max_steps=1,
    )
    assert run.code == 0
    assert [row["turns"] for row in run.lines("completions.jsonl")] == [1] * 4 + [3] * 4
    assert run.steps[0]["rewards/leaves_a_note/mean"] == 0.5 and run.steps[0]["time/reward"] >= 0


def test_too_many_invalid_rewards_end_the_run(rlhf, tiny_model, hostile: Path) -> None:
    run = rlhf(
        tiny_model,
        external_plugins=plugins(hostile),
        reward_funcs=["digits", "always_nan"],
        truncated_reward=-1,
        max_steps=30,
    )
    assert run.code == 5
    assert (
        "reward always_nan was invalid" in run.errors and "nan is not a finite number" in run.errors
    )
    assert "for example on:" in run.errors
    assert {row["kind"] for row in run.lines("invalid_rewards.jsonl")} == {"value"}
    truncated = [row for row in run.lines("completions.jsonl") if row["finish_reason"] == "length"]
    assert truncated and {row["reward"] for row in truncated} == {-1.0}


@pytest.mark.long
def test_a_round_without_one_valid_reward_ends_the_run(rlhf, tiny_model, hostile: Path) -> None:
    run = rlhf(
        tiny_model,
        external_plugins=plugins(hostile),
        reward_funcs="says_nothing",
        reward_isolation="process",
        max_steps=3,
    )
    assert run.code == 5 and len(run.steps) == 1
    assert "none of the round's 8 completions has a valid reward; the first: each" in run.errors
    assert len(run.lines("completions.jsonl")) == 16  # those of the round that has none are there
