"""The division of GPUs: what is best, what fits, and what is said where nothing does."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_r1.flags.parser import parse_arguments
from swift_r1.lab.estimate.chips import chip_of
from swift_r1.lab.estimate.flags import EstimateArguments
from swift_r1.lab.estimate.job import job_of
from swift_r1.lab.estimate.layout import Layout, estimate_layout
from swift_r1.lab.estimate.roles import Job, trainer_memory, trainer_of
from swift_r1.lab.estimate.split import best_split, layouts
from swift_r1.lab.estimate.work import GPU
from tests.lab.estimate.conftest import HUGE, folder_of

FLAGS = (
    "--use_vllm",
    "true",
    "--num_generations",
    "16",
    "--per_device_train_batch_size",
    "4",
    "--max_length",
    "512",
)
FLAGS += ("--gradient_accumulation_steps", "128", "--max_completion_length", "4096")


def job(folder: Path, *more: str, chip: str = "h100") -> Job:
    args = parse_arguments(EstimateArguments, ["--model", str(folder), *FLAGS, *more], {})
    return job_of(args, 1, chip_of(chip), GPU)


@pytest.mark.parametrize(
    "more", [(), ("--async_generate", "true"), ("--async_generate", "true", "--max_staleness", "2")]
)
def test_more_gpus_are_never_slower(model_folder: Path, more: tuple[str, ...]) -> None:
    asked = job(model_folder, *more)
    steps = [best_split(asked, gpus).best[0].step for gpus in (8, 12, 16, 24, 32, 64, 128)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 2 * steps[-1]


def test_fewer_replicas_are_tried(model_folder: Path) -> None:
    """By http each is sent the weights, so that more of them may be slower."""
    tried = (
        one
        for one in layouts(job(model_folder), 64)
        if one.mode == "server" and one.tensor_parallel == 1
    )
    assert {one.replicas for one in tried if one.ranks == 8} == {56, 28, 14, 7, 3, 1}


def test_a_push_goes_down_a_tree_unless_the_flag_says_no(model_folder: Path) -> None:
    """By itself on several machines; on one there is shared memory."""
    by_http = ("--weight_transport", "http")

    def push(layout: Layout, *more: str) -> float:
        return estimate_layout(job(model_folder, *by_http, *more), layout).phases["push"]

    several, one = Layout(8, 3, "server", 32, 1), Layout(2, 3, "server", 6, 1)
    directly = push(several, "--weight_fanout", "0")
    assert (
        push(several)
        == push(several, "--weight_fanout", "2")
        < push(several, "--weight_fanout", "8")
        < directly
    )
    assert push(one) == push(one, "--weight_fanout", "0")


def test_a_better_chip_is_never_slower(model_folder: Path) -> None:
    steps = [
        best_split(job(model_folder, chip=chip), 16).best[0].step
        for chip in ("a100", "h100", "h200", "b200")
    ]
    assert steps == sorted(steps, reverse=True)


def test_the_best_fit_and_come_in_order(model_folder: Path) -> None:
    found = best_split(job(model_folder), 16)
    assert len(found.best) == 5
    assert [one.step for one in found.best] == sorted(one.step for one in found.best)
    for one in found.best:
        assert one.layout.devices <= 16 and not one.faults and all(held.fits for held in one.memory)


def test_ahead_is_the_slower_side_and_no_colocation(model_folder: Path) -> None:
    found = best_split(job(model_folder, "--async_generate", "true"), 16)
    for one in found.best:
        trained = one.phases["log-probs"] + one.phases["train"] + one.phases["push"]
        assert one.layout.mode == "server" and one.overlapped
        assert one.step == pytest.approx(max(one.phases["generate"], trained))
        assert one.bottleneck == ("rollout" if one.phases["generate"] > trained else "train")


def test_one_after_the_other_is_the_sum(model_folder: Path) -> None:
    one = estimate_layout(job(model_folder), Layout(8, 3, "server", 4, 2))
    assert not one.overlapped and one.step == pytest.approx(sum(one.phases.values()))


def test_too_few_gpus_say_how_many_it_takes(model_folder: Path) -> None:
    asked = job(model_folder)
    found = best_split(asked, 1)
    assert not found.best
    assert (
        "too few of 75 GiB: training needs 3 (ZeRO-3), a replica 1, so at least 4, or 3"
        in found.why_not
    )
    assert best_split(asked, 4).best  # and that is so


def test_a_model_for_no_number_of_gpus(tmp_path: Path) -> None:
    asked = job(folder_of(HUGE, tmp_path / "huge"), chip="rtx4090")
    assert "does not fit on any number" in best_split(asked, 1024).why_not


def test_memory_of_a_rank_is_that_of_rlhf(model_folder: Path) -> None:
    """One mechanism: `swift rlhf --estimate true` counts the same."""
    from swift_r1.flags.world import World
    from swift_r1.models.shape import shape_of
    from swift_r1.training.memory import estimated

    flags = ["--model", str(model_folder), *FLAGS, "--deepspeed", "zero3", "--nproc_per_node", "8"]
    flags += ["--gradient_checkpointing", "true", "--max_tokens_per_micro_batch", "9216"]
    args = parse_arguments(EstimateArguments, flags, {})
    theirs = estimated(args, shape_of(str(model_folder)), World(8), chip_of("h100").memory)
    ours = trainer_memory(job_of(args, 8, chip_of("h100"), GPU), 8, 3)
    assert ours.parts == theirs.parts and ours.phases == theirs.phases


def test_a_step_is_cut_as_rlhf_cuts_it_on_such_a_gpu(model_folder: Path) -> None:
    """Where nobody says how: for what memory there is, which an engine beside it has a share of; never on a CPU."""
    asked = job(model_folder)
    alone, beside = (trainer_memory(asked, 8, 3, one).peak for one in (False, True))
    assert beside < alone <= 0.97 * asked.chip.memory
    assert trainer_of(asked, 8, 3).micro_batches < asked.updated / 8
    roomy = job(model_folder, chip="h200")
    assert not trainer_of(roomy, 8, 3).recomputes
    given = ("--gradient_checkpointing", "true", "--max_tokens_per_micro_batch", "4608")
    said = trainer_of(job(model_folder, *given, chip="h200"), 8, 3)
    # 64 completions of a rank, of 2,176 tokens with their prompts: 139,264 tokens
    assert said.recomputes and said.micro_batches == 31
    assert trainer_of(job(model_folder, chip="cpu"), 8, 3).micro_batches == 16


def test_memory_of_a_rank_depends_on_the_batch_not_on_the_ranks_it_was_written_for(
    model_folder: Path,
) -> None:
    # of an optimizer step: 4 x 128 = 4 x 2 x 64
    flags = [{"128": "2"}.get(word, word) for word in FLAGS]
    args = parse_arguments(
        EstimateArguments, ["--model", str(model_folder), *flags, "--nproc_per_node", "64"], {}
    )
    on_64 = trainer_memory(job_of(args, 64, chip_of("h100"), GPU), 64, 3)
    assert trainer_memory(job(model_folder), 64, 3).phases == on_64.phases


def test_a_replica_without_room(model_folder: Path) -> None:
    one = estimate_layout(job(model_folder, chip="l4"), Layout(8, 3, "server", 1, 1))
    assert (
        any("the longest prompt and completion" in fault for fault in one.faults)
        or "a rank needs" in one.faults[0]
    )
    assert estimate_layout(job(model_folder), Layout(1, None)).faults[0].startswith("a rank needs")
    assert (
        "ranks for"
        in estimate_layout(job(model_folder, "--deepspeed", "zero3"), Layout(1024, 3)).faults[-1]
    )
