"""What `swift rollout` was told of several turns: the trainer takes it, and runs them."""

from pathlib import Path

import pytest

from tests.conftest import wait_until_serving

PLUGIN = Path(__file__).parent / "turns_plugin.py"
GYM = {
    "use_gym_env": True,
    "gym_env": "count_digits",
    "max_turns": 3,
    "external_plugins": [str(PLUGIN)],
}


@pytest.fixture
def server(start_tiny, tiny_model, tmp_path):
    """`server(**flags of swift rollout) -> flags of the trainer`."""

    def start(**told):
        one = start_tiny(tiny_model, **told)
        wait_until_serving(one)
        rows = tmp_path / "rows.jsonl"
        rows.write_text(
            "".join(
                f'{{"query": "count from {number}", "start": {number}}}\n' for number in range(20)
            )
        )
        return {
            "dataset": rows,
            "max_completion_length": 6,
            "max_steps": 1,
            "vllm_server_base_url": one.url,
        } | {
            "use_vllm": "true",
            "weight_check_steps": 0,
        }

    return start


@pytest.mark.long
def test_the_trainer_plays_the_servers_environment(rlhf, tiny_model, server):
    """Without a reward or a plugin of its own; and again where the run goes on."""
    flags = server(**GYM) | {"reward_funcs": [], "external_plugins": []}
    run = rlhf(tiny_model, **flags)
    assert run.code == 0
    assert "was told --max_turns 3 --use_gym_env true --gym_env count_digits" in run.errors
    assert "this trainer takes that, and runs the turns itself" in run.errors
    for row in run.lines("completions.jsonl"):
        said = [one["content"] for one in row["messages"] if one["role"] == "assistant"]
        assert row["turns"] == len(said) == 2
        assert row["reward"] == pytest.approx(
            sum(sum(c.isdigit() for c in t) / max(1, len(t)) for t in said)
        )
    again = rlhf(
        tiny_model,
        **flags | {"resume_from_checkpoint": "last", "max_steps": 2, "resume_force": "true"},
    )
    assert (
        again.code == 0
        and "--max_steps 1 became 2" in again.errors
        and "max_turns" not in again.errors.split("became")[1]
    )


def test_nothing_gives_a_reward(rlhf, tiny_model, server):
    run = rlhf(tiny_model, **server() | {"reward_funcs": []})
    assert (
        run.code == 2
        and "--reward_funcs is missing" in run.errors
        and "plays no environment either" in run.errors
    )
