"""`swift estimate` as a command: files and flags, what it says, and how soon."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swift_r1.cli.main import main
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.lab.estimate.chips import chip_of
from swift_r1.lab.estimate.job import assumed, of_run
from swift_r1.lab.estimate.layout import estimate_layout
from swift_r1.lab.estimate.measured import lengths_of, read_measured, seconds_of
from tests.lab.estimate.conftest import SMALL, folder_of
from tests.vision import write_tiny

PLUGIN = Path(__file__).resolve().parents[3] / "plugins" / "countdown.py"


def run_file(folder: Path, model: Path, roles: str, more: str = "") -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"""
rlhf:
  rlhf_type: grpo
  model: {model}
  external_plugins: {PLUGIN}
  dataset: countdown#1000
  reward_funcs: [external_countdown, format]
  num_generations: 16
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 16
  deepspeed: zero3
  max_length: 512
  max_completion_length: 2048
{more}
roles:
{roles}
"""
    )
    return path


def test_a_run_file(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roles = (
        "  train: {nodes: 2, gpus: 8}\n  rollout: {replicas: 4, gpus: 2}\n  teacher: {gpus: 1}\n"
    )
    more = f"  teacher_kl_coef: 0.1\nrollout: {{vllm_max_num_seqs: 64}}\nteacher: {{model: {model_folder}}}\n"
    path = run_file(tmp_path, model_folder, roles, more)
    file = tmp_path / "found.json"
    words = [
        "estimate",
        str(path),
        "--chip",
        "h200",
        "--mean_completion_length",
        "500",
        "--json",
        str(file),
    ]
    assert main([*words, "--learning_rate", "1e-6"]) == 0
    said = capsys.readouterr().out
    assert "train 16 (ZeRO-3) + rollout 4 x 2, on h200" in said
    assert "64 completions at once, at most 64 (--vllm_max_num_seqs)" in " ".join(
        said.replace("│", " ").split()
    )
    found = json.loads(file.read_text())
    given = found["given"]
    assert [held["role"] for held in given["memory"]] == ["train", "rollout", "teacher"]
    assert given["layout"] == {
        "ranks": 16,
        "stage": 3,
        "mode": "server",
        "replicas": 4,
        "tensor_parallel": 2,
    }
    assert found["round"]["completion_tokens"] == 500 and found["round"]["prompt_tokens"] == 128
    assert given["sent_bytes"]["push, whole"] == 2 * 8_030_261_248
    assert given["seconds"]["teacher"] > 0 and not given["faults"]
    # Flags of the command line win over the file's, and --gpus divides anew.
    assert main([*words, "--max_completion_length", "1024", "--gpus", "32"]) == 0
    assert "The best of" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert (
        found["round"]["longest"] == 1024 and found["given"] is not None and len(found["best"]) == 5
    )


def test_a_cache_of_a_given_size(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each GPU, as vLLM takes it, in the place of what is left of its share."""
    roles = "  train: {gpus: 8}\n  rollout: {gpus: 2}\n  teacher: {gpus: 1}\n"
    own, of_teacher = (
        f"vllm_engine_kwargs: {{kv_cache_memory_bytes: {size}}}" for size in (2**30, 2**31)
    )
    more = f"  teacher_kl_coef: 0.1\nrollout: {{{own}}}\nteacher: {{model: {model_folder}, {of_teacher}}}\n"
    path, file = run_file(tmp_path, model_folder, roles, more), tmp_path / "found.json"
    assert main(["estimate", str(path), "--chip", "h100", "--json", str(file)]) == 0
    given = json.loads(file.read_text())["given"]
    held = {one["role"]: one["bytes"].get("keys and values") for one in given["memory"]}
    assert (held["rollout"], held["teacher"]) == (2**30, 2**31)
    capsys.readouterr()
    run_file(tmp_path, model_folder, roles, more.replace(str(2**30), str(80 * 2**30)))
    main(["estimate", str(path), "--chip", "h100", "--json", str(file)])
    assert any(
        fault.startswith("rollout: 8") for fault in json.loads(file.read_text())["given"]["faults"]
    )


def test_a_run_file_without_gpus_is_a_cpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder_of(SMALL | {"dtype": "float32"}, tmp_path / "small")
    path = run_file(tmp_path, model, "  train: {processes: 2}\n  rollout: {replicas: 1, cpus: 2}\n")
    assert main(["estimate", str(path)]) == 0
    assert "on cpu" in capsys.readouterr().out
    assert main(["estimate", str(path), "--gpus", "4", "--chip", "cpu"]) == 2
    # Each role has its own cores.
    path = run_file(tmp_path, model, "  train: {processes: 2, cpus: 6}\n  rollout: {cpus: 1}\n")
    file = tmp_path / "found.json"
    assert main(["estimate", str(path), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["chip"]["flops"] == 3 * chip_of("cpu").flops
    assert [held["room"] for held in found["given"]["memory"]] == [
        3 * chip_of("cpu").memory,
        chip_of("cpu").memory,
    ]


def test_flags_alone(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "estimate",
        "--model",
        str(model_folder),
        "--nproc_per_node",
        "8",
        "--deepspeed",
        "zero2",
    ]
    assert main([*words, "--use_vllm", "true", "--vllm_server_host", "a", "b"]) == 0
    assert "train 8 (ZeRO-2) + rollout 2, on h100" in capsys.readouterr().out
    servers = model_folder / "servers.txt"
    servers.write_text("http://a:1\nhttp://b:1\nhttp://c:1\n")
    assert main([*words, "--use_vllm", "true", "--vllm_server_file", str(servers)]) == 0
    assert "rollout 3" in capsys.readouterr().out
    assert main([*words, "--use_vllm", "true", "--vllm_mode", "colocate"]) == 0
    assert "taking turns" in capsys.readouterr().out
    assert (
        main([*words, "--rlhf_type", "ppo", "--num_generations", "1", "--use_vllm", "false"]) == 0
    )
    assert "critic's optimizer" in capsys.readouterr().out
    assert main([*words, "--use_vllm", "false"]) == 0
    assert "several turns, agents and environments" not in capsys.readouterr().out
    assert main([*words, "--use_vllm", "false", "--env", "gymnasium:FrozenLake-v1"]) == 0
    assert "not estimated: several turns, agents and environments" in capsys.readouterr().out


def test_images_of_prompts_are_looked_at(model_folder: Path, tmp_path: Path) -> None:
    """By a tower whose 2 FLOP per weight and patch come once per prompt, and thrice in training where it is trained."""
    sees = write_tiny("qwen2_5_vl", tmp_path / "sees")

    def estimated(*words: str) -> dict[str, Any]:
        file = tmp_path / "found.json"
        flags = ["--model", str(sees), "--chip", "cpu", "--json", str(file), *words]
        assert main(["estimate", *flags]) == 0
        found: dict[str, Any] = json.loads(file.read_text())["given"]
        return found

    text = estimated()
    pixels = ("--mean_image_pixels", str(10**9))
    frozen = estimated(*pixels)
    trained = estimated(*pixels, "--freeze_vit", "false", "--freeze_aligner", "false")
    for phase in ("generate", "train"):
        assert frozen["seconds"][phase] > text["seconds"][phase]
    more = [one["seconds"]["train"] - text["seconds"]["train"] for one in (frozen, trained)]
    assert more[1] == pytest.approx(3 * more[0], rel=0.05)
    assert frozen["memory"][0]["bytes"]["weights"] > text["memory"][0]["bytes"]["weights"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--chip", "h10"), "did you mean h100?"),
        (("--model", "/nowhere"), "config.json, no more"),
        (("--gpus", "1", "--use_vllm", "true"), "at least 3, or 2 that take turns"),
        (
            ("--mean_completion_length", "1000", "--max_completion_length", "10"),
            "is above --max_completion_length",
        ),
        (("--mean_prompt_length", "1000", "--max_length", "10"), "is above --max_length"),
        (("--mean_image_pixels", "1000"), "reads texts alone"),
        (
            ("--use_vllm", "true", "--vllm_server_file", "/nowhere"),
            "--vllm_server_file /nowhere cannot be read",
        ),
        (("--measured", "/nowhere"), "--measured /nowhere: args.json"),
        (("--json", "/nowhere/a.json"), "there is no folder"),
        (("--estimate", "true"), "belongs to swift rlhf"),
        (("--gpuss", "8"), "--gpus"),
    ],
)
def test_bad_input(
    words: tuple[str, ...], says: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = () if "--model" in words else ("--model", str(model_folder))
    assert main(["estimate", *model, *words]) == 2
    assert says in capsys.readouterr().err


def test_it_answers_at_once_without_torch(model_folder: Path, tmp_path: Path) -> None:
    path = run_file(
        tmp_path, model_folder, "  train: {gpus: 8}\n  rollout: {replicas: 4, gpus: 1}\n"
    )
    words = ["estimate", str(path), "--gpus", "64"]
    code = "import sys; from swift_r1.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit(code)", *words], check=True, timeout=120
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # of this process, not of the wall
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def recorded(folder: Path, model: Path, server: bool, factors: dict[str, float]) -> Path:
    """A run folder whose times are those of the formulas times `factors`."""
    folder.mkdir()
    args = RlhfArguments(
        rlhf_type="grpo",
        model=str(model),
        per_device_train_batch_size=32,
        generation_batch_size=64,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
        max_completion_length=100,
        use_vllm=server,
        vllm_server_base_url=["http://127.0.0.1:8000"] if server else [],
        torch_dtype="float32",
    )
    content: dict[str, Any] = {
        "args": args.to_dict(),
        "command": ["swift", "rlhf"],
        "world_size": 1,
    }
    content["hardware"] = {"cores": 2, "gpus": []}
    (folder / "args.json").write_text(json.dumps(content))
    row = {"prompt": "p" * 60, "completion": "c" * 250, "tokens": 50}  # 5 characters a token
    (folder / "completions.jsonl").write_text(json.dumps(row) + "\n")
    # 64 completions of 50 tokens, 8 to a prompt; a prompt of 10 tokens with each: 3,840 tokens computed.
    line = {"step": 1, "completions/mean_length": 50.0, "tokens_computed": 3840.0, "time/step": 1.0}
    write_lines(folder, [line] * 3)
    chip = chip_of("cpu")
    job, layout = of_run(folder, chip, assumed(chip))
    phases = estimate_layout(job, layout).phases
    line["time/generate"] = phases["generate"] * factors["generate"]
    line["time/train"] = (phases["train"] + phases["log-probs"]) * factors["train"]
    line["time/sync"] = phases.get("push", 0.0) * factors["push"]
    line["time/reward"] = 0.64
    first = {**line, "time/generate": 1e6}  # warms up
    write_lines(folder, [first, line, line])
    return folder


def write_lines(folder: Path, lines: list[dict[str, float]]) -> None:
    (folder / "logging.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("server", [False, True])
def test_a_recorded_run_calibrates(
    server: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder_of(SMALL | {"dtype": "float32"}, tmp_path / "small")
    folder = recorded(tmp_path / "run", model, server, {"generate": 3.0, "train": 0.5, "push": 7.0})
    chip = chip_of("cpu")
    found_lengths = lengths_of(folder, chip)
    assert (found_lengths.prompt, found_lengths.completion) == (10.0, 50.0)
    use = read_measured(folder, chip)
    assert (use.generate_factor, use.train_factor) == (pytest.approx(3.0), pytest.approx(0.5))
    assert use.push_factor == pytest.approx(7.0 if server else 1.0)
    assert use.reward_seconds == pytest.approx(0.01)
    job, layout = of_run(folder, chip, use)
    found, measured = estimate_layout(job, layout), seconds_of(folder)
    assert found.phases["generate"] == pytest.approx(measured["generate"])
    assert found.phases["reward"] == pytest.approx(0.64)
    # On another kind of device only the lengths count.
    words = [
        "estimate",
        "--model",
        str(model),
        "--max_completion_length",
        "100",
        "--measured",
        str(folder),
    ]
    assert main([*words, "--chip", "h100"]) == 0
    said = capsys.readouterr().out
    assert (
        "only its lengths are taken" in said
        and "completions of 50 (at most 100; lengths as recorded)" in said
    )
    assert main([*words, "--chip", "cpu"]) == 0
    assert "generate x 3.00, train x 0.50" in " ".join(capsys.readouterr().out.split())


def test_a_recorded_run_of_other_ranks_and_servers_than_its_flags(tmp_path: Path) -> None:
    """Flags of the batch are counted for the processes that the run began with; servers come and go."""
    model = folder_of(SMALL | {"dtype": "float32"}, tmp_path / "small")
    folder = recorded(tmp_path / "run", model, True, {"generate": 1.0, "train": 1.0, "push": 1.0})
    args = json.loads((folder / "args.json").read_text())
    args["world_size"] = 2
    args["args"] |= {"vllm_server_base_url": None, "vllm_server_file": "/gone"}
    (folder / "args.json").write_text(json.dumps(args))
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    servers = (1, 2, 4)
    write_lines(
        folder,
        [line | {"rollout/servers": count} for line, count in zip(lines, servers, strict=True)],
    )
    job, layout = of_run(folder, chip_of("cpu"), assumed(chip_of("cpu")))
    assert (job.updated, job.round.updates) == (64, 1)
    assert (layout.ranks, layout.replicas) == (2, 3)


def test_recorded_episodes_are_longer_than_a_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--max_completion_length` is each turn's: the recorded 50 tokens are not cut to 8."""
    model = folder_of(SMALL | {"dtype": "float32"}, tmp_path / "small")
    folder = recorded(tmp_path / "run", model, False, {"generate": 1.0, "train": 1.0, "push": 1.0})
    words = [
        "estimate",
        "--model",
        str(model),
        "--max_completion_length",
        "8",
        "--measured",
        str(folder),
    ]
    assert main([*words, "--env", "gymnasium:Taxi-v4"]) == 0
    said = capsys.readouterr().out
    assert "completions of 50 (at most 50; lengths as recorded)" in said
    assert "not estimated: several turns" in said and "what tools and environments wrote" in said
    assert main(words) == 0
    said = capsys.readouterr().out
    assert (
        "completions of 8 (at most 8; lengths as recorded)" in said and "several turns" not in said
    )


def test_a_run_that_was_too_short(tmp_path: Path) -> None:
    model = folder_of(SMALL | {"dtype": "float32"}, tmp_path / "small")
    folder = recorded(tmp_path / "run", model, False, {"generate": 1.0, "train": 1.0, "push": 1.0})
    write_lines(folder, [{"step": 1, "time/step": 1.0}])
    assert (
        main(["estimate", "--model", str(model), "--chip", "cpu", "--measured", str(folder)]) == 2
    )
