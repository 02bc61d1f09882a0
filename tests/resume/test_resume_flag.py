"""`--resume_from_checkpoint`: which checkpoint is taken, and when resuming is refused."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swift_r1.runtime.processes import run_folder_held

SETTINGS = {"max_steps": 4, "save_steps": 1, "logging_steps": 1}


@pytest.fixture(scope="module")
def finished(runs, tmp_path_factory) -> Path:
    """A run of four steps, a checkpoint each; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert runs.run(folder, **SETTINGS).code == 0
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run as after a kill at the end of its third step."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    return tmp_path / "run"


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*checkpoint-*"))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_broken_checkpoints_are_skipped_with_a_warning(runs, finished, copy, same):
    flip_a_bit(copy / "checkpoint-3" / "state" / "optimizer-00001.safetensors")
    model = copy / "checkpoint-2" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-10])
    ended = runs.run(copy, resume_from_checkpoint="last", **SETTINGS)
    assert ended.code == 0
    assert (
        "checkpoint-3 is skipped: state/optimizer-00001.safetensors is not what was written"
        in ended.said
    )
    assert "checkpoint-2 is skipped: model.safetensors has" in ended.said
    assert "resuming from" in ended.said and "checkpoint-1\n" in ended.said
    same(finished, copy)
    # What is not continued is kept under a name that is never taken for a checkpoint.
    wanted = {f"checkpoint-{number}" for number in (1, 2, 3, 4)} | {
        "aside-checkpoint-2",
        "aside-checkpoint-3",
    }
    assert set(checkpoints(copy)) == wanted


def test_a_path_goes_on_from_that_checkpoint(runs, finished, copy, same):
    ended = runs.run(copy, resume_from_checkpoint=copy / "checkpoint-1", **SETTINGS)
    assert ended.code == 0 and "resuming from" in ended.said
    assert "aside-checkpoint-2" in checkpoints(copy)
    same(finished, copy)
    # the console compares its rewards with the run's first one, not with the first after the resume
    log = map(json.loads, (copy / "logging.jsonl").read_text().splitlines())
    rewards = {line["step"]: line["reward"] for line in log if "reward" in line}
    shown = re.findall(r"step (\d)/4 · reward \S+ \((\S+)\)", ended.said)
    assert [(int(step), change) for step, change in shown] == [
        (step, f"{reward - rewards[1]:+.3f}") for step, reward in rewards.items() if step > 1
    ]


def test_last_begins_at_the_beginning_where_there_is_no_checkpoint(runs, finished, tmp_path, same):
    new = SETTINGS | {"max_steps": 1}
    ended = runs.run(tmp_path / "new", resume_from_checkpoint="last", **new)
    assert ended.code == 0 and "there is no run in" in ended.said
    folder = tmp_path / "run"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    ended = runs.run(folder, resume_from_checkpoint="last", **SETTINGS)
    assert (
        ended.code == 0 and "has no whole checkpoint yet: starting from the beginning" in ended.said
    )
    same(finished, folder)


@pytest.mark.long
def test_with_versions_last_is_the_newest_run(runs, tmp_path):
    flags = SETTINGS | {"add_version": "true", "max_steps": 2}
    base = tmp_path / "runs"
    for _ in range(2):
        assert runs.run(base, **flags).code == 0
    first, second = sorted(base.glob("v*"))
    shutil.rmtree(second / "checkpoint-2")
    assert runs.run(base, resume_from_checkpoint="last", **flags).code == 0
    assert sorted(base.glob("v*")) == [first, second]
    assert checkpoints(second) == ["checkpoint-1", "checkpoint-2"]
    assert json.loads((second / "args.json").read_text())["resumed_from"] == str(
        second / "checkpoint-1"
    )


def test_a_checkpoint_without_state_is_refused(runs, tmp_path):
    folder = tmp_path / "run"
    flags = SETTINGS | {"save_only_model": "true", "max_steps": 1}
    assert runs.run(folder, **flags).code == 0
    assert (
        not (folder / "checkpoint-1" / "state").exists()
        and (folder / "checkpoint-1" / "model.safetensors").exists()
    )
    ended = runs.run(folder, resume_from_checkpoint="last", **flags)
    assert ended.code == 2 and "was saved without state/ (--save_only_model true)" in ended.said


def test_other_settings_are_refused_with_what_differs(runs, copy):
    changed = SETTINGS | {
        "learning_rate": 1e-4,
        "per_device_train_batch_size": 4,
        "dataset": "counting#30",
    }
    before = (copy / "args.json").read_text()
    ended = runs.run(copy, resume_from_checkpoint="last", **changed)
    assert ended.code == 2
    assert "--learning_rate 0.003 became 0.0001" in ended.said
    assert "--per_device_train_batch_size 8 became 4" in ended.said
    assert "the training data has other rows, or another order" in ended.said
    assert (copy / "args.json").read_text() == before

    ended = runs.run(copy, resume_from_checkpoint="last", resume_force="true", **changed)
    assert (
        ended.code == 0 and "--resume_force true: --learning_rate 0.003 became 0.0001" in ended.said
    )
    steps = [json.loads(line) for line in (copy / "logging.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert steps[3]["learning_rate"] < 1e-4 < steps[1]["learning_rate"]


def test_another_model_is_refused_even_by_force(runs, copy, tiny_model_untied):
    flags = SETTINGS | {"model": tiny_model_untied}
    ended = runs.run(copy, resume_from_checkpoint="last", resume_force="true", **flags)
    assert ended.code == 2 and "its state is of another model" in ended.said


def test_other_processes_may_have_other_flags_for_the_same_batch(runs, finished, copy):
    """The state is whole tensors, so any number of ranks can take it; the next step is nearly the same."""
    flags = SETTINGS | {"processes": 2, "deepspeed": "zero3"}
    ended = runs.run(copy, resume_from_checkpoint="last", **flags, per_device_train_batch_size=6)
    assert ended.code == 2 and "--generation_batch_size 8 became 12" in ended.said
    ended = runs.run(copy, resume_from_checkpoint="last", **flags, per_device_train_batch_size=4)
    assert ended.code == 0 and "1 process became 2" in ended.said, ended.said

    def last_step(folder: Path) -> dict[str, float]:
        return json.loads((folder / "logging.jsonl").read_text().splitlines()[-1])

    one, two = last_step(finished), last_step(copy)
    assert one["step"] == two["step"] == 4
    for name in ("loss", "grad_norm", "reward", "entropy", "learning_rate"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


@pytest.mark.long
def test_moments_of_8_bits_stay_with_the_ranks_that_have_their_parts(runs, tmp_path):
    """In plain torch every rank has all of them."""
    flags = {
        "processes": 2,
        "per_device_train_batch_size": 4,
        "optim": "adamw_8bit",
        "max_steps": 2,
        "save_steps": 1,
    }
    assert runs.run(tmp_path / "plain", **flags).code == 0
    shutil.rmtree(tmp_path / "plain" / "checkpoint-2")
    ended = runs.run(tmp_path / "plain", resume_from_checkpoint="last", **flags | {"processes": 1})
    assert ended.code == 0 and "2 processes became 1" in ended.said
    assert runs.run(tmp_path / "sharded", **flags, fsdp="fsdp2").code == 0
    for other in (flags | {"processes": 3, "fsdp": "fsdp2"}, flags | {"deepspeed": "zero2"}):
        ended = runs.run(
            tmp_path / "sharded", resume_from_checkpoint="last", resume_force="true", **other
        )
        assert ended.code == 2
        assert (
            "has 8-bit moments (--optim adamw_8bit) in the parts of 2 processes of --fsdp fsdp2"
            in ended.said
        )


def test_a_missing_checkpoint_is_named(runs, copy):
    ended = runs.run(copy, resume_from_checkpoint=copy / "checkpoint-9", **SETTINGS)
    assert ended.code == 2 and "checkpoint-9: there is no such folder" in ended.said


def test_a_run_elsewhere_is_refused(runs, copy, tmp_path):
    ended = runs.run(tmp_path / "other", resume_from_checkpoint=copy / "checkpoint-1", **SETTINGS)
    assert ended.code == 2 and "which is not in --output_dir" in ended.said


def test_a_log_that_was_cut_is_refused(runs, copy):
    log = copy / "completions.jsonl"
    log.write_text(log.read_text()[:100])
    ended = runs.run(copy, resume_from_checkpoint="last", **SETTINGS)
    assert (
        ended.code == 2
        and "completions.jsonl is shorter than it was at the checkpoint" in ended.said
    )


def test_it_waits_for_a_process_that_still_works_in_the_folder(runs, finished, copy, same):
    with (copy / ".lock").open("w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        run = runs.start(copy, resume_from_checkpoint="last", **SETTINGS)
        log, deadline = copy.parent / "run.log", time.monotonic() + 100
        while not (log.exists() and "waiting for another process" in log.read_text()):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
    assert runs.wait(run, copy).code == 0
    same(finished, copy)


def test_a_folder_in_use_is_refused_in_the_end(tmp_path):
    ask = (
        "import sys, pathlib; from swift_r1.runtime.processes import run_folder_held\n"
        "with run_folder_held(pathlib.Path(sys.argv[1]), wait_s=0.3): print('held')"
    )

    def another_process() -> str:
        done = subprocess.run(
            [sys.executable, "-c", ask, str(tmp_path)], capture_output=True, text=True, timeout=60
        )
        return done.stdout + done.stderr

    with run_folder_held(tmp_path):
        assert "another process still trains in it; stop that one first" in another_process()
    assert another_process() == "held\n"
