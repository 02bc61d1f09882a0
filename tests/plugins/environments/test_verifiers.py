"""Environments for verifiers: their own rollouts with the episode's client, and their own rubrics. They need verifiers
(`make test-agents`)."""

from __future__ import annotations

import signal

import pytest

from swift_r1.errors import UsageError
from swift_r1.plugins.environments.base import adapter
from swift_r1.plugins.environments.scripted import ScriptedModel
from tests.plugins.environments.conftest import FILES, Played

pytest.importorskip("verifiers", reason="needs the extra verifiers")

REVERSING = "verifiers:reversing"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FILES)


def test_one_turn(played: Played) -> None:
    result, model = played(REVERSING, {}, ["<think>a</think><answer>enots</answer>"])
    assert model.requests[0]["messages"] == [
        {"role": "system", "content": "You reverse."},
        {"role": "user", "content": "Reverse stone."},
    ]
    assert (result["reward"], result["exact"], result["length"], result["turns"]) == (
        1.25,
        1.0,
        1.0,
        1.0,
    )


def test_several_turns(played: Played) -> None:
    result, model = played(REVERSING, {"how": "several"}, ["stone", "<answer>enots</answer>"])
    assert [message["role"] for message in model.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert result["turns"] == 2.0 and result["exact"] == 1.0 and result["length"] == 3.0


def test_tools(played: Played) -> None:
    calls = [("turned", {"text": "stone"}), "<answer>enots</answer>"]
    result, model = played(REVERSING, {"how": "tools"}, calls)
    assert model.requests[0]["tools"][0]["function"]["name"] == "turned"
    assert model.requests[1]["messages"][-1]["content"] == "enots"
    assert result["exact"] == 1.0 and result["turned_calls"] == 1.0


def test_rows_and_the_right_answer() -> None:
    agent = adapter(REVERSING, {"count": 2})
    train, held_out = list(agent.rows("train", None)), list(agent.rows("eval", None))
    assert [row["env_row"]["answer"] for row in train] == ["enots", "revir"]
    assert [row["env_row"]["question"] for row in held_out] == ["Reverse cloud."]
    said = agent.scripts(train[0]["env_row"])["the row's answer"](None)  # type: ignore[arg-type]
    assert "<answer>\nenots\n</answer>" in said


def test_no_rows_are_held_out_without_an_evaluation_set() -> None:
    with pytest.raises(
        UsageError, match="has no evaluation set: give --split_dataset_ratio or --val_dataset"
    ):
        list(adapter(REVERSING, {"held_out": 0}).rows("eval", None))


def test_a_reward_that_raises_is_no_zero(played: Played) -> None:
    with pytest.raises(RuntimeError, match="broken: 'no such column'"):
        played(REVERSING, {"reward": "broken"}, ["x"])


def test_what_the_model_is_refused_is_raised(played: Played) -> None:
    with pytest.raises(Exception, match="Connection error"):
        played(REVERSING, {}, [])  # the script ends, and with it the answer


def test_a_limit_behind_the_first_turn_ends_the_episode(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ScriptedModel.respond

    def respond(self: ScriptedModel, body: dict[str, object]) -> tuple[int, dict[str, object]]:
        return (
            own(self, body)
            if not self.requests
            else (403, {"error": {"message": "the session's calls are used up"}})
        )

    monkeypatch.setattr(ScriptedModel, "respond", respond)
    result, _ = played(REVERSING, {"how": "several"}, ["stone"])
    assert (result["reward"], result["is_truncated"], result["turns"]) == (0.25, 1.0, 1.0)


def test_a_first_prompt_that_is_too_long_is_said(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"error": {"message": "this model's maximum context length is 4 tokens"}}
    monkeypatch.setattr(ScriptedModel, "respond", lambda self, body: (400, said))
    with pytest.raises(RuntimeError, match="its first prompt is longer than the model takes"):
        played(REVERSING, {}, [])


def test_an_empty_answer_is_the_models_and_no_failure(played: Played) -> None:
    assert played(REVERSING, {}, [""])[0] == {"reward": 0.0, "is_truncated": 0.0, "turns": 1.0}
    result, _ = played(REVERSING, {"how": "several"}, ["stone", ""])
    assert (result["reward"], result["is_truncated"], result["turns"]) == (0.25, 0.0, 2.0)


def test_environments_that_cannot_be_played(played: Played) -> None:
    for args, said in (
        ({"reward": "best"}, "its reward best compares episodes, which are scored one by one"),
        ({"speed": 1}, "unexpected keyword argument 'speed'"),
    ):
        with pytest.raises(UsageError, match=said):
            adapter(REVERSING, args).prepare()
    with pytest.raises(
        UsageError, match=r"Could not import 'nowhere' environment.*No module named 'nowhere'"
    ):
        adapter("verifiers:nowhere", {}).prepare()


def test_this_processs_signals_stay(played: Played) -> None:
    before = signal.getsignal(signal.SIGTERM)
    adapter(REVERSING, {}).prepare()
    assert signal.getsignal(signal.SIGTERM) == before
