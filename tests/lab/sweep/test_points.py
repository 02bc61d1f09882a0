"""What a file of a sweep becomes, and what is said of a wrong one, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swift_r1.cli.main import main
from swift_r1.errors import UsageError
from swift_r1.flags import parse_arguments
from swift_r1.lab.sweep import places
from swift_r1.lab.sweep.flags import SweepArguments
from swift_r1.lab.sweep.points import PlannedRun, check_runs, plan_runs
from swift_r1.launch.checks import preflight
from swift_r1.launch.environment import usable_cpus

FLAGS = """
flags:
  rlhf_type: grpo
  model: m
  dataset: d
  reward_funcs: [a, b]
  per_device_train_batch_size: 8
"""


def plan(tmp_path: Path, text: str) -> list[PlannedRun]:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    return plan_runs(
        parse_arguments(SweepArguments, [str(file)], {}), str(file), tmp_path / "out", {}
    )


def faults(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        plan(tmp_path, text)
    return [fault.replace(f"{tmp_path}/", "") for fault in caught.value.faults]


def test_a_grid_is_crossed_and_the_first_seed_comes_first(tmp_path: Path) -> None:
    runs = plan(
        tmp_path,
        "grid: {learning_rate: [1e-6, 3e-6], loss-type: [grpo, dr_grpo]}\nseeds: [3, 5]" + FLAGS,
    )
    points = [
        f"learning_rate={rate},loss_type={kind}"
        for rate in ("1e-6", "3e-6")
        for kind in ("grpo", "dr_grpo")
    ]
    assert [run.name for run in runs] == [
        f"{point},seed={seed}" for seed in (3, 5) for point in points
    ]
    assert (runs[6].args.learning_rate, runs[6].args.loss_type, runs[6].point) == (
        3e-6,
        "grpo",
        points[2],
    )
    again = parse_arguments(type(runs[6].args), runs[6].words, {})  # as `swift rlhf` reads them
    assert (again.seed, again.output_dir, again.add_version) == (
        5,
        str(tmp_path / "out" / runs[6].name),
        False,
    )
    assert again.reward_funcs == ["a", "b"] and again.resume_from_checkpoint == "last"


def test_listed_points_have_names_that_differ_and_win_over_the_common_flags(tmp_path: Path) -> None:
    listed = "runs: [{name: small/one, model: s}, {reward_weights: [1, 0.5]}, {tuner_type: lora}, {model: 'a:b'}, "
    listed += "{model: a b}]"
    runs = plan(tmp_path, listed + FLAGS + "  train_type: full\n")
    assert [run.name for run in runs] == [
        "small-one",
        "reward_weights=1+0.5",
        "tuner_type=lora",
        "model=a-b",
        "model=a-b-2",
    ]
    assert [run.args.train_type for run in runs][1:3] == ["full", "lora"]
    assert (
        runs[0].args.model == "s"
        and runs[1].args.reward_weights == [1, 0.5]
        and runs[0].seed is None
    )


def test_faults_have_a_line_and_their_points(tmp_path: Path) -> None:
    grid = "seeds: [1]\ngrid:\n  learning_rate: [1e-6, fast]\n  epsilon: [0.2, 0.3]"
    found = faults(tmp_path, grid + FLAGS + "  lerning_rate: 3\n  top_k: 0\n")
    assert found == [
        "sweep.yaml, line 11: unknown flag --lerning_rate: did you mean --learning_rate?",
        "sweep.yaml, line 12: --top_k 0 leaves no token to sample: -1 is off",
        "sweep.yaml, line 3: --learning_rate must be a number, not 'fast' (point learning_rate=fast,epsilon=0.2 and 1 "
        "more)",
    ]
    assert faults(tmp_path, "runs:\n- {name: a, beta: 0.1}\n- name: b\n  beta: -1" + FLAGS) == [
        "sweep.yaml, line 4: --beta must be at least 0, not -1.0 (point b)"
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FLAGS, "nothing varies"),
        ("seeds: [1, 1]" + FLAGS, "has one twice"),
        ("grid: {beta: 0.1}" + FLAGS, "--grid: beta must be a list of values, not 0.1"),
        ("runs: [a]" + FLAGS, "must be lists of flags"),
        ("runs: [{beta: 0}]\ngrid: {beta: [0]}" + FLAGS, "not both"),
        ("seeds: [1]\nparallel: many" + FLAGS, "must be auto or a whole number"),
        ("seeds: [1]\nstop_after: 3" + FLAGS, "needs --stop_behind or --stop_below"),
        ("seeds: [1]\nstop_below: 3" + FLAGS, "no effect without --stop_after"),
        (
            "seeds: [1]\nbeta: 0" + FLAGS,
            "is a flag of `swift rlhf`, not of `swift sweep`: put it under `flags:`",
        ),
        ("seeds: [1]\nmetric: eval/x/accuracy" + FLAGS, "nothing is evaluated"),
        (
            "seeds: [1]\nmetric: rewards/c/mean" + FLAGS,
            "--reward_funcs make rewards/a/mean, rewards/b/mean",
        ),
        ("grid: {seed: [1, 2]}" + FLAGS, "give seeds: [0, 1, 2] beside flags"),
        ("seeds: [1]" + FLAGS + "  output_dir: here", "output_dir stands beside flags"),
        ("seeds: [1]" + FLAGS + "  hub_token: abc", "SWIFT_HUB_TOKEN"),
        (
            "seeds: [1]" + FLAGS + "  use_vllm: true\n  vllm_server_host: h",
            "takes the weights of one trainer",
        ),
        ("seeds: [1]" + FLAGS + "  nnodes: 2", "one machine"),
        ("seeds: [1]", "--flags is missing"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, said: str) -> None:
    found = faults(tmp_path, text)
    assert len(found) == 1 and said in found[0]
    assert "abc" not in found[0]


def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    file = "examples/countdown_demo/sweep.yaml"
    args = parse_arguments(SweepArguments, [file], {})
    runs = plan_runs(args, file, Path("output"), {})
    assert len(runs) == 9 and {run.args.learning_rate for run in runs} == {3e-5, 3e-4, 3e-3}


def test_inputs_are_checked_once_for_points_that_differ_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "grid: {learning_rate: [1e-6, 3e-6], streaming: [false, true]}\nseeds: [1, 2]"
        + FLAGS
        + "  max_steps: 5\n"
    )
    runs = plan(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    Path("output").touch()  # where `swift rlhf` would write without --output_dir
    checked = []
    monkeypatch.setattr(
        preflight, "check_inputs", lambda args, *more: checked.append((args.streaming, more[-1]))
    )
    file = str(tmp_path / "sweep.yaml")
    check_runs(parse_arguments(SweepArguments, [file], {}), file, runs, {})
    assert checked == [(False, []), (True, [])]


def test_the_commands_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text("seeds: [1, 2]\nparallel: 1" + FLAGS)
    assert main(["sweep", "s.yaml", "--dry_run"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("taskset -c ") and " swift rlhf --rlhf_type grpo --model m" in first
    assert "--seed 2 --output_dir output/s/seed=2 --add_version false" in second
    assert os.listdir() == ["s.yaml"]


@pytest.mark.parametrize("words", [[], ["--dry_run"], ["nowhere.yaml"], ["bad.yaml"]])
def test_a_file_is_needed(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("flags: [")
    assert main(["sweep", *words]) == 2


def test_places_have_cores_or_gpus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = plan(tmp_path, "seeds: [1, 2, 3, 4, 5]" + FLAGS)
    assert [place.cpus for place in places.find_places("1", runs, {})] == [usable_cpus()]
    with pytest.raises(UsageError, match="here are"):
        places.find_places(str(len(usable_cpus()) + 1), runs, {})
    monkeypatch.setattr(places, "has_gpu", lambda environ: True)
    monkeypatch.setattr(places, "hardware", lambda environ: {"gpus": ["a"] * 8})
    monkeypatch.setattr(places, "usable_cpus", lambda: tuple(range(16)))
    found = places.find_places("auto", runs, {"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0"})
    assert list(map(str, found)) == [
        f"CUDA_VISIBLE_DEVICES={7 - number} taskset -c {3 * number}-{3 * number + 2}"
        for number in range(5)
    ]
    pairs = plan(tmp_path, "seeds: [1, 2, 3, 4, 5]" + FLAGS + "  nproc_per_node: 2\n")
    names = [
        place.variables["CUDA_VISIBLE_DEVICES"] for place in places.find_places("auto", pairs, {})
    ]
    assert names == ["0,1", "2,3", "4,5", "6,7"]
    with pytest.raises(UsageError, match="--parallel 5 needs 10 GPUs, 2 for each run; here are 8"):
        places.find_places("5", pairs, {})
