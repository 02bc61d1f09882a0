"""`--router_replay_mode` in whole runs, with an engine whose routers have noise."""

from pathlib import Path

import pytest

from tests.families import save_family

DIGITS = Path(__file__).with_name("digits_plugin.py")
NOISE = Path(__file__).with_name("noisy_routes_plugin.py")
FLAGS = {"max_steps": 2, "learning_rate": 1e-3, "torch_dtype": "float32"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("mixture"), "qwen3_moe", num_hidden_layers=2)


def test_noise(rlhf, mixture, tmp_path):
    found = {}
    for mode in ("disabled", "R3"):
        run = rlhf(
            mixture,
            **FLAGS,
            output_dir=tmp_path / mode,
            external_plugins=[DIGITS, NOISE],
            router_replay_mode=mode,
        )
        assert run.code == 0
        found[mode] = [line["rollout/logp_diff"] for line in run.steps]
        print(mode, run.steps)
    print(found)
    assert min(found["disabled"]) > 0.05 and max(found["R3"]) < 1e-5
