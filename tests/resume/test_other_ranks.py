"""A run that is killed goes on with another number of processes, and with another backend: it stays the same run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_r1.training.checkpoint.tensors import SavedTensors
from tests.resume.conftest import Runs, happened
from tests.resume.test_exact_resume import PPO, TAUGHT, cut_back

RUN = {
    # Four optimizer steps a round; of the checkpoints only the last but one is between rounds.
    "max_steps": 14,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "save_steps": 3,
    "logging_steps": 1,
    "log_tokens": "all",
    "beta": 0.05,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 4,
    "resume_from_checkpoint": "last",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": "fsdp2"},
    **{f"zero{stage}": {"deepspeed": f"zero{stage}"} for stage in range(4)},
}
LEARNED = (
    "loss",
    "reward",
    "kl",
    "teacher_kl",
    "entropy",
    "grad_norm",
    "learning_rate",
    "clip_ratio/low",
)
LEARNED_OF_EXPERTS = ("chord/nll", "chord/mu")
LEARNED_OF_CRITIC = (
    "value_loss",
    "critic/grad_norm",
    "critic/learning_rate",
    "values/mean",
    "kl_penalty",
)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def assert_the_same_run(folder: Path, expected: Path) -> None:
    """Prompts, seeds, completions and rewards are equal; what is learned from them agrees to rounding."""
    found, wanted = (lines(one, "completions.jsonl") for one in (folder, expected))
    assert len(found) == len(wanted) >= 48
    exact = (
        "step",
        "prompt_id",
        "request_id",
        "group",
        "number",
        "completion",
        "reward",
        "weight_version",
        "tokens",
    )
    for row, other in zip(found, wanted, strict=True):
        assert {name: row[name] for name in exact} == {name: other[name] for name in exact}
        assert row["advantage"] == pytest.approx(other["advantage"], abs=1e-5)
    steps, others = (lines(one, "logging.jsonl") for one in (folder, expected))
    assert [line["step"] for line in steps] == list(range(1, len(others) + 1))
    for line, other in zip(steps, others, strict=True):
        for name in line.keys() & {*LEARNED, *LEARNED_OF_EXPERTS, *LEARNED_OF_CRITIC}:
            assert line[name] == pytest.approx(other[name], rel=2e-3, abs=2e-5), (
                line["step"],
                name,
            )


def go_on(runs: Runs, folder: Path, kill_at: int | None, processes: int, **flags: Any) -> str:
    """Starts the run, or goes on with it; rank 0 is killed as the round that begins after step `kill_at` is scored.
    Returns what was said."""
    if kill_at is not None:
        order = {"step": kill_at, "signal": signal.SIGKILL, "times": 1}
        (folder.parent / "signals.json").write_text(json.dumps(order))
    said = folder.parent / f"{folder.name}.log"
    before = len(said.read_text()) if said.exists() else 0
    ended = runs.run(folder, processes=processes, **RUN | flags)
    assert (ended.code == 0) == (kill_at is None), ended.said
    return ended.said[before:]


@pytest.fixture(scope="module")
def undisturbed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On two processes, from the beginning to the end."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    go_on(runs, folder, None, 2)
    return folder


@pytest.mark.long
def test_a_killed_run_goes_on_with_fewer_and_with_more_processes(runs, undisturbed, tmp_path):
    """Two are killed in the middle of a round, one between rounds; three, among which a step's eight completions do
    not divide, reach the end."""
    folder = tmp_path / "run"
    go_on(runs, folder, 8, 2)
    assert max(path.name for path in folder.glob("checkpoint-*")) == "checkpoint-6"
    said = go_on(runs, folder, 12, 1)
    assert (
        "2 processes became 1: the same prompts, seeds and batches; sums are added up in another order"
        in said
    )
    assert "4 completions x 2 processes (at first)" in said
    said = go_on(runs, folder, None, 3, deepspeed="zero3")
    assert "1 process became 3" in said and "--deepspeed None became zero3" in said
    assert_the_same_run(folder, undisturbed)
    marks = [text for kind, _, text in happened(folder) if kind == "resumed"]
    assert marks == [
        "from checkpoint-6, processes: 1 (2 before)",
        "from checkpoint-12, processes: 3 (1 before)",
    ]
    generators = SavedTensors(folder / "checkpoint-14" / "state", "rng")
    states = [generators(f"torch:{rank}") for rank in range(3)]
    assert not any(
        torch.equal(states[one], states[other]) for one, other in ((0, 1), (1, 2), (0, 2))
    )
    args = json.loads((folder / "args.json").read_text())
    assert (args["world_size"], args["args"]["generation_batch_size"]) == (3, 16)
    assert args["plan"]["completions_per_optimizer_step"] == 8
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.log"}


CHORD = {
    # Four answers a step, which three ranks do not divide.
    "max_steps": 12,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "chord_sft_per_device_train_batch_size": 2,
    "chord_mu_warmup_steps": 1,
    "chord_mu_decay_steps": 10,
    "chord_mu_peak": 0.8,
    "chord_mu_valley": 0.2,
}


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(PPO, id="ppo"),
        pytest.param(TAUGHT, id="taught"),
        pytest.param(CHORD, id="chord"),
    ],
)
def test_what_was_computed_before_a_round_belongs_to_no_rank(runs, tmp_path, settings):
    """Values of the critic, what a teacher said of many tokens, and which of the experts' answers a step takes: saved
    on two in the middle of a round, and needed after it on one and on three."""
    both = (
        "save_steps",
        "logging_steps",
        "log_tokens",
        "resume_from_checkpoint",
        "per_device_train_batch_size",
    )
    flags = {name: value for name, value in settings.items() if not name.startswith("eval")}
    flags |= {name: RUN[name] for name in both} | {"learning_rate": 1e-4, "torch_dtype": "float32"}
    if settings is CHORD:
        flags["chord_sft_dataset"] = tmp_path / "experts.jsonl"
        rows = (
            {"query": f"count from {one}", "response": f"{one} " * (1 + one)} for one in range(7)
        )
        flags["chord_sft_dataset"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert runs.run(tmp_path / "run", processes=2, **flags).code == 0
    for processes, step in ((1, 6), (3, 9)):
        own = dict[str, int]()
        folder = cut_back(tmp_path / "run", tmp_path / f"on{processes}", step)
        assert json.loads((folder / f"checkpoint-{step}/state/run.json").read_text())["round"]
        if settings is CHORD and processes == 1:  # twice as much on half of the processes
            own = {"per_device_train_batch_size": 8, "chord_sft_per_device_train_batch_size": 4}
        ended = runs.run(folder, processes=processes, **flags | own)
        assert ended.code == 0 and f"2 processes became {processes}" in ended.said
        assert_the_same_run(folder, tmp_path / "run")


@pytest.mark.long
def test_ranks_may_share_rows_and_weights_otherwise(runs, undisturbed, tmp_path):
    for name, before, deepspeed in (
        ("sequence_parallel_size", 1, "zero2"),
        ("zero_hpz_partition_size", None, "zero3"),
    ):
        folder = cut_back(undisturbed, tmp_path / name, 9)
        said = go_on(runs, folder, None, 2, deepspeed=deepspeed, **{name: 2})
        assert f"--{name} {before} became 2" in said
        assert_the_same_run(folder, undisturbed)
    ended = runs.run(folder, processes=3, **RUN, sequence_parallel_size=2)
    assert (
        ended.code == 2
        and "--sequence_parallel_size 2 does not divide the number of processes, 3" in ended.said
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_saved_on_any_number_and_gone_on_with_any_other(
    runs, undisturbed, same, tmp_path, layout, saved
):
    """In the middle of a round both times; as many as saved it go on bit for bit."""
    folder = cut_back(undisturbed, tmp_path / "run", 3)
    go_on(runs, folder, None, saved, **LAYOUTS[layout])
    assert_the_same_run(folder, undisturbed)
    for processes in (1, 2, 3, 4):
        other = cut_back(folder, tmp_path / f"on{processes}", 6)
        go_on(runs, other, None, processes, **LAYOUTS[layout])
        assert_the_same_run(other, undisturbed)
        if processes == saved:
            same(folder, other)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "more",
    [{"train_type": "lora", "lora_rank": 4}, {"sync_ref_model": "true", "ref_model_sync_steps": 2}],
    ids=["lora", "moving reference"],
)
def test_adapters_and_a_moving_reference_go_on_with_any_number(runs, tmp_path, more):
    """Saved on two; on three with ZeRO-3, on one, and on nine, of which one has nothing of a step's eight
    completions."""
    calm = tmp_path / "calm"
    go_on(runs, calm, None, 2, **more)
    for processes, layout in ((3, "zero3"), (1, "ddp"), (9, "ddp")):
        folder = cut_back(calm, tmp_path / f"on{processes}", 9)
        go_on(runs, folder, None, processes, **LAYOUTS[layout], **more)
        assert_the_same_run(folder, calm)
