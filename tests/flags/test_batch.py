"""The batch of a resumed run: the same flags are the same batch on any number of processes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments, make_plan, parse_arguments
from swift_r1.flags.batch import batch_sizes, began_with

BASE = "--rlhf_type grpo --model m --dataset d --reward_funcs a --num_generations 4 --add_version false --output_dir"


def parse(folder: Path, words: str, processes: int) -> RlhfArguments:
    return parse_arguments(
        RlhfArguments,
        [*BASE.split(), str(folder), *words.split()],
        {"NPROC_PER_NODE": str(processes)},
    )


def record(folder: Path, args: RlhfArguments, checkpoint: int | None = None) -> None:
    """What a start leaves, and a save."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text(json.dumps({"args": args.to_dict()}))
    if checkpoint is not None:
        state = folder / f"checkpoint-{checkpoint}" / "state"
        state.mkdir(parents=True)
        (state / "run.json").write_text(json.dumps({"fingerprint": {"args": args.to_dict()}}))


@pytest.mark.parametrize(
    "words",
    [
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 3 --steps_per_generation 6",
        "--per_device_train_batch_size 4 --generation_batch_size 48",
        "--per_device_train_batch_size 3",  # the accumulation is chosen
        "",
    ],
)
def test_the_same_flags_are_the_same_batch_on_any_number_of_processes(tmp_path, words):
    began = parse(tmp_path, words, 2)
    record(tmp_path, began)
    plan = make_plan(began, 2, 100)
    for processes in (1, 3, 4, 2):
        args = parse(tmp_path, f"{words} --resume_from_checkpoint last", processes)
        assert replace(args, resume_from_checkpoint=None) == began
        assert (args.batch_processes, batch_sizes(args.to_dict())) == (
            2,
            batch_sizes(began.to_dict()),
        )
        assert make_plan(args, processes, 100) == replace(plan, world_size=processes)
        record(tmp_path, args, processes)


def test_other_flags_are_of_the_processes_that_there_are(tmp_path):
    began = parse(tmp_path, "--per_device_train_batch_size 4", 2)
    record(tmp_path, began, 5)
    for words, processes in (("1 --gradient_accumulation_steps 2", 4), ("8", 1)):
        args = parse(
            tmp_path,
            f"--resume_from_checkpoint last --per_device_train_batch_size {words}",
            processes,
        )
        assert args.batch_processes == processes
        assert batch_sizes(args.to_dict()) == batch_sizes(began.to_dict()) == (8, 8, 0)
    with pytest.raises(UsageError, match="5 x 3 processes"):
        words = "--resume_from_checkpoint last --per_device_train_batch_size 5 --gradient_accumulation_steps 1"
        parse(tmp_path, words, 3)


def test_a_new_run_and_one_with_the_weights_alone_have_the_processes_that_there_are(tmp_path):
    record(tmp_path, parse(tmp_path, "--per_device_train_batch_size 4", 2), 5)
    named = f"--resume_from_checkpoint {tmp_path / 'checkpoint-5'}"
    for more, processes in (("", 3), (f"{named} --resume_only_model true", 3), (named, 2)):
        args = parse(tmp_path, f"--per_device_train_batch_size 4 {more}", 3)
        assert args.batch_processes == processes


def test_the_newest_checkpoint_that_can_be_read_says_what_the_run_began_with(tmp_path):
    assert began_with(tmp_path / "none", False, "last") is None
    for checkpoint, processes in ((9, 2), (10, 4)):
        record(tmp_path, parse(tmp_path, "--per_device_train_batch_size 4", processes), checkpoint)
    record(tmp_path, parse(tmp_path, "--per_device_train_batch_size 4", 3))

    def found(resume_from: str = "last") -> int:
        known = began_with(tmp_path, False, resume_from)
        assert known is not None
        return known[1]

    assert (found(), found(str(tmp_path / "checkpoint-9"))) == (4, 2)
    (tmp_path / "checkpoint-10" / "state" / "run.json").write_text("{")
    assert found() == 2
    (tmp_path / "checkpoint-9" / "state" / "run.json").write_text("[]")
    assert found() == 3
    (tmp_path / "args.json").write_text('{"args": {"steps_per_generation": 0}}')
    assert began_with(tmp_path, False, "last") is None
    version = tmp_path / "v3-20260101-000000"
    record(version, parse(tmp_path, "--per_device_train_batch_size 4", 2))
    newest = began_with(tmp_path, True, "last")
    assert newest is not None and newest[1] == 2


@pytest.mark.parametrize(
    ("words", "processes", "parts"),
    [
        (
            "--num_generations 7 --per_device_train_batch_size 32",
            1,
            ["224 completions, 7 times as many: use 28 or 35 for", "--num_generations 8 or 4;"],
        ),
        (
            "--rlhf_type ppo --num_generations 8 --per_device_train_batch_size 7",
            1,
            ["56 completions, 8 times as many: use 8 for", "--num_generations 7 or 14;"],
        ),
    ],
)
def test_a_step_that_whole_groups_would_multiply_is_refused(tmp_path, words, processes, parts):
    with pytest.raises(UsageError) as caught:
        parse(tmp_path, words, processes)
    assert all(part in str(caught.value) for part in parts), caught.value
    chosen = re.search(r"--gradient_accumulation_steps \d+", str(caught.value))
    meant = parse(tmp_path, f"{words} {chosen[0]}", processes)
    assert meant.chosen == () and meant.generation_batch_size % meant.num_generations == 0
    for flag, near in re.findall(r"(?:use|or (--num_generations)) ([\d or]+)", str(caught.value)):
        for size in near.split(" or "):
            flag = flag or "--per_device_train_batch_size"
            args = parse(tmp_path, re.sub(rf"{flag} \d+", f"{flag} {size}", words), processes)
            asked = max(args.per_device_train_batch_size * processes, args.num_generations)
            assert args.completions_per_step <= 2 * max(16, asked)


def test_what_ms_swift_takes_is_taken(tmp_path):
    """Its step without `--gradient_accumulation_steps` is the micro-batches that hold 16 completions or more."""
    for size, groups, processes in product(range(1, 26, 2), (2, 3, 6, 8, 9, 12, 16), (1, 3)):
        step = size * processes * math.ceil(16 / (size * processes))
        if step % groups == 0:
            words = f"--per_device_train_batch_size {size} --num_generations {groups}"
            assert parse(tmp_path, words, processes).completions_per_step <= step
