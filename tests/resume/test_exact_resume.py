"""A run that is killed by SIGKILL at any moment and resumed equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.resume.conftest import HERE

FULL = {
    # Four optimizer steps a round, and checkpoints, log lines and evaluations in the middle of rounds.
    "max_steps": 10,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "save_steps": 3,
    "eval_steps": 5,
    "eval_limit": 4,
    "beta": 0.05,
    "sync_ref_model": "true",
    "ref_model_sync_steps": 3,
    "torch_dtype": "bfloat16",
    "lr_scheduler_type": "cosine",
    "entropy_coef": 0.05,
}
LORA = {
    "max_steps": 12,
    "save_steps": 2,
    "save_total_limit": 1,
    "train_type": "lora",
    "lora_rank": 4,
    "lora_dropout": 0.1,
    "lorap_lr_ratio": 4,
    "use_dora": "true",
    "modules_to_save": "norm",
    "beta": 0.05,
    "dynamic_sample": "true",
    "top_entropy_quantile": 0.5,
}
STREAMED = {
    # More than three epochs of 40 rows.
    "max_steps": 8,
    "save_steps": 2,
    "save_total_limit": 1,
    "per_device_train_batch_size": 64,
    "streaming": "true",
    "shuffle_buffer_size": 16,
}
CHOSEN = {
    # Several epochs of 40 rows, in an order that hangs on their rewards; checkpoints in the middle of rounds.
    "max_steps": 10,
    "save_steps": 1,
    "per_device_train_batch_size": 32,
    "steps_per_generation": 2,
    "prompt_sampler": "lowest",
}
DIGITS = {"reward_funcs": "noisy_digits"}
MIXED = {
    # A sampler that goes by rewards, a scheduler's turns, and prompts without signal that are replaced; by weights.
    "max_steps": 5,
    "save_steps": 3,
    "per_device_train_batch_size": 12,
    "steps_per_generation": 2,
    "dynamic_sample": "true",
    "external_plugins": [HERE / "noisy_plugin.py", HERE.parent / "e2e" / "turns_plugin.py"],
    "dataset": [],
    "mixture": json.dumps(
        {
            "chosen": DIGITS | {"dataset": "counting#40", "prompt_sampler": "lowest"},
            "plain": DIGITS | {"dataset": "counting#30", "weight": 0.8},
            # rewards of which no group has a signal
            "turns": {
                "dataset": "starts#20",
                "reward_funcs": "seen",
                "multi_turn_scheduler": "again",
                "max_turns": 3,
            },
        }
    ),
    "reward_funcs": [],
}
PPO = {
    # The critic alone first; values and log-probs of before the round are needed in the middle of rounds.
    "rlhf_type": "ppo",
    "max_steps": 10,
    "num_generations": 2,
    "num_mini_batches": 2,
    "num_iterations": 2,
    "save_steps": 3,
    "eval_steps": 5,
    "eval_limit": 4,
    "kl_coef": 0.05,
    "critic_warmup_steps": 2,
    "critic_learning_rate": 1e-3,
    "torch_dtype": "bfloat16",
    "lr_scheduler_type": "cosine",
}
TAUGHT = {
    # By itself after another prompt than its own: what it said then is needed in the middle of rounds.
    "max_steps": 12,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "save_steps": 3,
    "external_plugins": [
        Path(__file__).parent / "noisy_plugin.py",
        Path(__file__).parents[1] / "e2e/hints_plugin.py",
    ],
    "dataset": "hinted#40",
    "teacher_model": "policy",
    "gkd_logits_topk": 8,
    # Of the policy before the round, too: the baseline of each token, and the tokens that are drawn.
    "advantage_estimator": "optimal_token_baseline",
    "loss_type": "clip_cov",
    "clip_cov_ratio": 0.3,
    "clip_cov_lb": 0.0,
}
TWO_RANKS = {"processes": 2, "per_device_train_batch_size": 4}
SETTINGS = {
    "full": FULL,
    "lora": LORA,
    "streamed": STREAMED,
    "chosen": CHOSEN,
    "mixed": MIXED,
    "ddp": FULL | TWO_RANKS,
    "fsdp2": FULL | TWO_RANKS | {"fsdp": "fsdp2", "gradient_checkpointing": "true"},
    "zero3": FULL | TWO_RANKS | {"deepspeed": "zero3", "max_steps": 6, "save_steps": 2},
    "ppo": PPO,
    "taught": TAUGHT,
    "zero3-ppo": PPO | TWO_RANKS | {"deepspeed": "zero3"},
    "fsdp2-qlora": LORA | TWO_RANKS | {"train_type": "qlora", "fsdp": "fsdp2"},
}


@pytest.fixture(scope="module")
def uninterrupted(runs, tmp_path_factory):
    """`uninterrupted(name) -> (folder, seconds)`, each once."""
    made = {}

    def give(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / "run"
            started = time.monotonic()
            assert runs.run(folder, **SETTINGS[name]).code == 0
            made[name] = folder, time.monotonic() - started
        return made[name]

    return give


def kill_and_resume(runs, folder, settings, seconds, kills):
    """Runs until `kills` starts have been killed at random moments, then to the end; returns how many were.

    Fewer are where a start reached the end first; a first one that does is done again with half the time.
    """
    for killed in range(kills):
        run = runs.start(folder, resume_from_checkpoint="last", **settings)
        ended = runs.wait(run, folder, kill_after=random.uniform(0.1, seconds))
        if ended.code == 0 and killed == 0:
            shutil.rmtree(folder)
            return kill_and_resume(runs, folder, settings, seconds / 2, kills)
        if ended.code == 0:
            return killed
        assert ended.code == -signal.SIGKILL, ended.said
    assert runs.run(folder, resume_from_checkpoint="last", **settings).code == 0
    return kills


SHORT = ("full", "zero3")


@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in SETTINGS],
)
def test_killed_and_resumed_equals_uninterrupted(runs, uninterrupted, same, tmp_path, name):
    expected, seconds = uninterrupted(name)
    kill_and_resume(runs, tmp_path / "run", SETTINGS[name], seconds, 1)
    same(expected, tmp_path / "run")


def cut_back(folder: Path, copy: Path, step: int) -> Path:
    """A copy of a run as it is after a kill some time after its checkpoint of `step`."""
    shutil.copytree(folder, copy)
    for path in copy.glob("checkpoint-*"):
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)
    return copy


PARTS = ("master",)
MORE_PARTS = (
    "prompts_taken",
    "rng",
    "exp_avg",
    "old_logps",
    "rounds",
    "weight_version",
    "window",
    "learning_rate",
    "reference",
    "exp_avg_sq",
    "updates",
)


@pytest.mark.parametrize(
    "part", [*PARTS, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_PARTS)]
)
def test_without_one_part_of_the_state_it_is_another_run(runs, uninterrupted, same, tmp_path, part):
    """The control: everything that a checkpoint holds is needed, and its lack is seen."""
    expected, _ = uninterrupted("full")
    folder = cut_back(expected, tmp_path / "run", 3)
    assert runs.run(folder, forget=part, resume_from_checkpoint="last", **FULL).code == 0
    with pytest.raises(AssertionError):
        same(expected, folder)


def test_a_mixture_goes_on_in_the_middle_of_a_round(runs, uninterrupted, same, tmp_path):
    expected, _ = uninterrupted("mixed")
    folder = cut_back(expected, tmp_path / "run", 3)
    assert runs.run(folder, resume_from_checkpoint="last", **MIXED).code == 0
    same(expected, folder)
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    assert {row["task"] for row in rows if "dropped" in row} == {"turns"}
