"""What two replays show beside each other, on logs that were made up; and the command of a new run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from swift_r1.cli.main import main
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.plan import make_plan
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.world import World
from swift_r1.lab.diagnosis.past import Past
from swift_r1.lab.diagnosis.proof import ComparedMetric, compared, new_command, told
from swift_r1.launch.run_folder import write_args
from swift_r1.record.metric_log import MetricLog

WORDS = [
    "--rlhf_type",
    "grpo",
    "--model",
    "m",
    "--dataset",
    "d",
    "--reward_funcs",
    "format",
    "--per_device_train_batch_size",
    "8",
    "--num_generations",
    "4",
    "--learning_rate",
    "3e-3",
    "--max_steps",
    "6",
]


def past(folder: Path, rows: Sequence[Mapping[str, Any]], per_round: int = 1) -> Past:
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": number, "loss": 0.0} | row) for number, row in rows]
    (folder / "logging.jsonl").write_text("".join(f"{line}\n" for line in lines))
    log = MetricLog(folder)
    log.refresh()
    return Past(log, {}, {"optimizer_steps_per_round": per_round})


def sides(
    tmp_path: Path, before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[ComparedMetric]:
    """Both replays of two rounds, of which the first is the same."""
    start = {"entropy": 0.5, "grad_norm": 1.0, "rollout/ess_seq": 1.0}
    pasts = [
        past(tmp_path / name, [(1, start), (2, start | values)])
        for name, values in (("before", before), ("after", after))
    ]
    return compared(*pasts, begin=0, rounds=2)


def test_what_flags_change_is_said_in_numbers(tmp_path: Path) -> None:
    found = sides(
        tmp_path,
        {"policy/moved": 1.6, "rollout/ess_seq": 0.9, "grad_norm": 3.0},
        {"policy/moved": 0.04, "rollout/ess_seq": 0.05},
    )
    assert {one.name: one.change for one in found} == {
        "policy/moved": -1,
        "rollout/ess_seq": -1,
        "grad_norm": -1,
        "entropy": 0,
    }
    said = list(told(found, 2, "updates too large"))
    assert said[0] == ("the policy moves by 0.04 nats per token instead of 1.6, 0.025 times as far")
    assert said[1] == "the gradient's norm is 1 instead of 3"
    assert said[2].startswith("5% of the recorded completions count") and "under 10%" in said[2]
    assert said[3] == "against 'updates too large' policy/moved was to be lower: it is"
    assert list(told(found, 2, "policy does not move"))[-1].endswith("was to be higher: it is not")
    assert not any("against" in line for line in told(found, 2, None))


def test_flags_that_change_nothing(tmp_path: Path) -> None:
    found = sides(tmp_path, {"policy/moved": 0.1}, {"policy/moved": 0.1})
    [line] = told(found, 2, "updates too large")
    assert line.startswith("in 2 rounds the flags change nothing at all")
    hardly = sides(tmp_path / "more", {"policy/moved": 0.1}, {"policy/moved": 0.101})
    assert list(told(hardly, 2, "updates too large"))[-1].endswith("it hardly changes")


def test_rounds_of_other_lengths_and_from_a_checkpoint(tmp_path: Path) -> None:
    """Two rounds after step 4: of two optimizer steps as it was, of one changed."""
    before = past(tmp_path / "a", [(n, {"entropy": float(n)}) for n in (5, 6, 7, 8)], 2)
    after = past(tmp_path / "b", [(n, {"entropy": float(n)}) for n in (5, 6)], 1)
    [entropy] = compared(before, after, begin=4, rounds=2)
    assert (entropy.before, entropy.after) == ([6.0, 8.0], [5.0, 6.0])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run as it stands before its first step."""
    folder = tmp_path / "run"
    folder.mkdir()
    words = [*WORDS, "--output_dir", str(folder), "--add_version", "false"]
    args = parse_arguments(RlhfArguments, words, {})
    write_args(folder, args, World(), words, "hash", plan=make_plan(args, 1, 100))
    (folder / "logging.jsonl").write_text('{"step": 1, "loss": 0.0, "reward": 0.0}\n')
    return folder


def test_the_command_of_a_new_run(run: Path) -> None:
    content = json.loads((run / "args.json").read_text())
    command = new_command(content, {"learning_rate": 1e-3, "overlong_filter": True}, 1)
    assert command == (
        "swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs format "
        "--per_device_train_batch_size 8 --num_generations 4 --max_steps 6 --add_version false "
        f"--learning_rate 0.001 --overlong_filter true --output_dir {run}-tried"
    )
    content["command"] = ["swift", "rlhf", "grpo.yaml", "--resume-from-checkpoint=last", "--lr=1"]
    content["args"]["add_version"] = True
    assert new_command(content, {"beta": 0.0}, 2) == (
        "NPROC_PER_NODE=2 swift rlhf grpo.yaml --lr=1 --beta 0.0"
    )


def test_what_cannot_be_replayed_is_said_and_only_the_command_printed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(run), "--try", "true", "--temperature", "1.2"]) == 0
    said = capsys.readouterr().out
    why = "it is of what was sampled, and that is recorded"
    assert f"to try: --temperature 1.2\n--temperature was not replayed: {why}\n" in said
    assert "--max_steps 6" in said and said.rstrip().endswith(
        f"--temperature 1.2 --output_dir {run}-tried"
    )


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--try", "true"], "--try: no cause was found: give the flags to try"),
        (["--try", "true", "--learning_rate", "1e-3"], "has no token record (--log_tokens"),
        (["--try", "true", "--lerning_rate", "1"], "did you mean --learning_rate?"),
        (["--try", "true", "--max_steps", "3"], "--rounds says how far the replays go"),
        (["--try", "true", "--learning_rate", "fast"], "--learning_rate must be a number"),
        (["--rounds", "2"], "--rounds has no effect without --try true"),
        (["--learning_rate", "1e-3"], "--learning_rate is a flag of `swift rlhf`"),
    ],
)
def test_faults(
    run: Path, words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(run), *words]) == 2
    assert fault in capsys.readouterr().err


def test_one_run_at_a_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run.parent / "other").mkdir()
    (run.parent / "other" / "args.json").write_text("{}")
    assert main(["why", str(run.parent), "--try", "true", "--beta", "0"]) == 2
    assert "--try is of one run, and these are 2" in capsys.readouterr().err
