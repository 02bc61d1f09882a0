"""Several turns through both engines: tokens carried, only the model's own trained, and schedulers that misbehave."""

from pathlib import Path

import pytest
from pyarrow.parquet import read_table

PLUGIN = Path(__file__).parent / "turns_plugin.py"
FLAGS = {
    "external_plugins": PLUGIN,
    "dataset": "starts#50",
    "reward_funcs": "seen",
    "max_completion_length": 6,
}


def check_trajectories(run, turns):
    """The trainer's log-probs of the trained tokens are the engine's: tokens, positions and masks fit together."""
    assert run.code == 0
    for line in run.steps:
        assert line["rollout/logp_diff"] < 2e-3
        assert line["multi_turn/mean_turns"] == line["multi_turn/max_turns"] == turns
        assert 0 < line["multi_turn/trained_tokens"] < 1
    return run.lines("completions.jsonl")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_embedded(rlhf, tiny_model, processes):
    parallel = {"deepspeed": "zero3", "per_device_train_batch_size": 4} if processes == 2 else {}
    more = {
        "max_steps": 2,
        "learning_rate": 1e-2,
        "eval_steps": 2,
        "eval_limit": 2,
        "split_dataset_ratio": 0.1,
    }
    flags = FLAGS | parallel | more
    run = rlhf(tiny_model, processes, multi_turn_scheduler="again", max_turns=4, **flags)
    rows = check_trajectories(run, 4)
    assert len(rows) == 16
    for row in rows:
        # The second turn's text goes on as the third, the fourth answers "again 3".
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 3
        assert [message["content"] for message in row["messages"][2::2]] == ["again 1", "again 3"]
        assert " Wait," in row["messages"][3]["content"] and row["turns"] == 4
        assert row["reward"] == pytest.approx(1 + 0.04 + 0.3)
    evaluation = run.lines("eval_completions.jsonl")
    assert evaluation and all(row["turns"] == 4 for row in evaluation)
    # In the token record too what the policy did not write is not in the loss, and has no log-probs.
    for line in run.steps:
        recorded = read_table(run.folder / "tokens" / f"step-{line['step']:06}.parquet").to_pylist()
        written = [one for row in recorded for one in row["mask"]]
        assert len(recorded) == 8 and sum(written) / len(written) == pytest.approx(
            line["multi_turn/trained_tokens"]
        )
        for name in ("rollout_logps", "logps"):
            values = [one for row in recorded for one in row[name]]
            assert [value != 0 for value in values] == written


def test_server(rlhf, tiny_model, rollout_server):
    url = rollout_server(tiny_model, torch_dtype="float32")
    server = {"use_vllm": "true", "vllm_server_base_url": url, "max_steps": 2}
    run = rlhf(tiny_model, multi_turn_scheduler="again", max_turns=3, **FLAGS | server)
    check_trajectories(run, 3)


def test_an_environment_makes_prompts_and_rewards(rlhf, tiny_model):
    gym = {
        "use_gym_env": "true",
        "gym_env": "count_digits",
        "context_manager": "adds",
        "max_turns": 5,
        "advantage_estimator": "gigpo",
    }
    run = rlhf(tiny_model, max_steps=2, **FLAGS | gym | {"reward_funcs": "format"})
    rows = check_trajectories(run, 2)
    assert any(row["turn_advantages"][0] != row["turn_advantages"][1] for row in rows)
    for row in rows:
        talk = row["messages"]
        assert [message["role"] for message in talk] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert (
            talk[1]["content"] == f"digits for {row['start']} (go)"
            and talk[3]["content"] == "turn 1 (go)"
        )
        assert "You say digits." in row["prompt"] and row["prompt"].endswith("assistant\n")
        said = [talk[2]["content"], talk[4]["content"]]
        assert row["reward"] == pytest.approx(
            sum(sum(c.isdigit() for c in t) / max(1, len(t)) for t in said)
        )


@pytest.mark.parametrize(
    ("name", "way"), [("board", "write an Env"), ("tree", "here a scheduler leads one")]
)
def test_a_scheduler_that_only_ms_swift_can_run_is_refused(rlhf, tiny_model, name, way):
    plugin = PLUGIN.with_name("unfit_schedulers_plugin.py")
    run = rlhf(
        tiny_model, multi_turn_scheduler=name, **FLAGS | {"external_plugins": [PLUGIN, plugin]}
    )
    assert run.code == 2 and f"--multi_turn_scheduler {name} " in run.errors and way in run.errors


def test_an_unknown_scheduler_is_refused_before_the_model_is_loaded(rlhf, tiny_model):
    run = rlhf(tiny_model, max_steps=1, multi_turn_scheduler="agian", **FLAGS)
    assert run.code == 2 and "--multi_turn_scheduler: there is no scheduler agian" in run.errors
