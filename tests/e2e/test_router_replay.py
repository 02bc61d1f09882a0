"""`--router_replay_mode` in whole runs, with an engine whose routers have noise."""

from pathlib import Path

import pytest

from tests.conftest import start_tiny_server, wait_until_serving
from tests.e2e.test_replay import learned, replay, weights
from tests.families import save_family

HERE = Path(__file__).parent
FLAGS = {
    "external_plugins": [HERE / "digits_plugin.py", HERE / "noisy_routes_plugin.py"],
    "max_steps": 4,
    "num_iterations": 2,
    "learning_rate": 1e-2,
    "torch_dtype": "float32",
}
DIFFERS = "rollout/logp_diff"
OTHER = "router_replay/differing"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Two layers of four experts, of which a token goes to two."""
    return save_family(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def test_r2_replays_what_the_trainer_has_chosen(rlhf, mixture):
    """Before the round's first update its own choice is the same; the engine's was another all the time."""
    forms = {
        "packing": "true",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": "true",
        "beta": 0.1,
    }
    run = rlhf(mixture, router_replay_mode="R2", **FLAGS, **forms)
    assert run.code == 0
    assert min(line[DIFFERS] for line in run.steps) > 0.05
    assert [line[OTHER] == 0 for line in run.steps] == [True, False, True, False]
    assert all(line["grad_norm"] > 0 for line in run.steps)


@pytest.fixture
def server(tmp_path, mixture):
    started = start_tiny_server(
        tmp_path / "server", mixture, vllm_engine_kwargs={"enable_return_routed_experts": True}
    )
    yield started
    started.stop()


@pytest.mark.long
def test_experts_come_over_http_through_several_turns(rlhf, mixture, server):
    """Those of the engine give the trainer the engine's log-probs. The last turns share what they begin with."""
    wait_until_serving(server)
    turns = {
        "max_steps": 2,
        "external_plugins": HERE / "turns_plugin.py",
        "dataset": "starts#50",
        "reward_funcs": "seen",
        "multi_turn_scheduler": "again",
        "max_turns": 3,
        "share_prompt": "true",
    }
    run = rlhf(
        mixture,
        router_replay_mode="R3",
        use_vllm="true",
        vllm_server_base_url=server.url,
        **FLAGS | turns,
    )
    assert run.code == 0
    assert run.steps[0][DIFFERS] < 1e-5
    assert min(line[OTHER] for line in run.steps) > 0.1


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({}, "llama has no routers that are known"),
        pytest.param({"use_vllm": "true"}, "does not tell which experts", marks=pytest.mark.long),
    ],
)
def test_what_cannot_be_replayed_is_refused(rlhf, tiny_model, mixture, tiny_server, flags, why):
    if flags:
        flags = flags | {"vllm_server_base_url": tiny_server.url}
    run = rlhf(mixture if flags else tiny_model, max_steps=1, router_replay_mode="R3", **flags)
    assert run.code == 2 and why in run.errors and "--router_replay_mode R3" in run.errors


@pytest.mark.long
def test_a_replay_has_the_experts_of_the_record(rlhf, mixture, tmp_path):
    flags = {"log_tokens": "all", "save_steps": 4}
    run = rlhf(mixture, router_replay_mode="R3", **FLAGS | flags)
    assert run.code == 0
    same = replay(run.folder, tmp_path / "same")
    assert same.code == 0 and learned(same) == learned(run)
    assert weights(same.folder, 4) == weights(run.folder, 4)
    other = replay(run.folder, tmp_path / "other", router_replay_mode="disabled")
    assert other.code == 2 and "is not the model of the record" in other.errors
