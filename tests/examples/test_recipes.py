"""Every recipe's scripts as the shell runs them, with a `swift` that only writes down how it was called.

The flags parse, they come to the original's numbers, `swift check` passes, and run.sh and mini.sh differ by sizes and
places alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from swift_r1.flags import RlhfArguments, RolloutArguments, parse_arguments
from swift_r1.flags.fields import as_words, spellings
from swift_r1.flags.plan import Plan, make_plan
from swift_r1.flags.rlhf import CheckArguments
from swift_r1.fleet.run_file import read_run_file

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = (
    "countdown_grpo_server",
    "gsm8k_ppo",
    "countdown_grpo_zero",
    "gsm8k_single_gpu",
    "math_dr_grpo",
)
SCRIPTS = [(recipe, script) for recipe in RECIPES for script in ("run.sh", "mini.sh")]
SCRIPTS.append(("smollm2_countdown", "run.sh"))
CHECKED = [(recipe, "run.sh") for recipe in ("countdown_grpo_server", "gsm8k_ppo", "math_dr_grpo")]
VARIANTS = [
    (size, template) for size in ("1.5b", "7b", "llama") for template in ("r1", "qwen_math", "no")
]

# What a small model on a CPU has otherwise: sizes, places, and how numbers are kept.
SIZES = set(
    re.findall(
        r"\w+",
        """
        model dataset max_length max_completion_length max_steps num_train_epochs per_device_train_batch_size
        gradient_accumulation_steps generation_batch_size learning_rate critic_learning_rate adam_beta2 warmup_ratio
        torch_dtype seed
        gradient_checkpointing eval_on_start eval_steps eval_limit num_generations_eval per_device_eval_batch_size
        eval_max_completion_length eval_datasets eval_temperature val_dataset split_dataset_ratio save_steps
        save_total_limit log_completions report_to output_dir vllm_server_timeout system
        prompt_template external_plugins use_vllm vllm_mode vllm_server_host vllm_server_port deepspeed stop_words
        response_prefix reward_funcs
        """,
    )
)
# The trainer waits for its server, as the real one does: the script ends the server when the trainer ends.
RECORDER = """#!{python}
import json, os, sys, time
line = json.dumps([sys.argv[1:], os.environ.get("NPROC_PER_NODE")]) + "\\n"
file = os.open(os.environ["CALLS"], os.O_RDWR | os.O_APPEND)
end = time.monotonic() + 30
while sys.argv[1] == "rlhf" and "--use_vllm" in sys.argv and b"rollout" not in os.pread(file, 1 << 16, 0):
    if time.monotonic() > end:
        sys.exit("no swift rollout within 30 s")
    time.sleep(0.01)
os.write(file, line.encode())
"""


@dataclass(frozen=True)
class Call:
    words: list[str]
    processes: int

    @property
    def flags(self) -> set[str]:
        return {
            word.removeprefix("--") for word in self.words if re.fullmatch(r"--[a-z_0-9]+", word)
        }

    @property
    def args(self) -> RlhfArguments:
        return parse_arguments(RlhfArguments, self.words, {"NPROC_PER_NODE": str(self.processes)})

    @property
    def plan(self) -> Plan:
        return make_plan(self.args, self.processes, 50_000)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`calls(recipe, script, *words) -> {"rlhf": Call, "rollout": Call}`."""
    monkeypatch.chdir(ROOT)
    swift = tmp_path / "bin" / "swift"
    swift.parent.mkdir()
    swift.write_text(RECORDER.format(python=sys.executable))
    swift.chmod(0o755)

    def called(recipe: str, script: str, *words: str) -> dict[str, Call]:
        record = tmp_path / "calls"
        record.write_text("")
        environment = os.environ | {
            "PATH": f"{swift.parent}:{os.environ['PATH']}",
            "CALLS": str(record),
        }
        environment |= {"MODEL": str(tmp_path)} if script == "mini.sh" else {}  # made already
        for name in ("NPROC_PER_NODE", "OUTPUT", "SEED", "PORT", "TEMPERATURE", "STEPS", "BATCH"):
            environment.pop(name, None)
        path = EXAMPLES / recipe / script
        done = subprocess.run(
            [path, *words], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        found = {}
        for line in record.read_text().splitlines():
            (command, *rest), processes = json.loads(line)
            found[command] = Call(rest, int(processes or 1))
        return found

    return called


@pytest.mark.parametrize(("recipe", "script"), SCRIPTS)
def test_flags_parse(calls, recipe: str, script: str) -> None:
    found = calls(recipe, script)
    assert found["rlhf"].args.rlhf_type == ("ppo" if recipe == "gsm8k_ppo" else "grpo")
    assert found["rlhf"].plan.total_steps > 0
    if found["rlhf"].args.use_vllm:
        server = parse_arguments(RolloutArguments, found["rollout"].words)
        assert (server.model, [server.port]) == (
            found["rlhf"].args.model,
            found["rlhf"].args.vllm_server_port,
        )
    else:
        assert set(found) == {"rlhf"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_miniature_differs_by_sizes_and_places(calls, recipe: str) -> None:
    run, mini = (calls(recipe, script)["rlhf"] for script in ("run.sh", "mini.sh"))
    known = spellings(RlhfArguments)
    for name in sorted({known[flag].name for flag in run.flags | mini.flags} - SIZES):
        assert getattr(run.args, name) == getattr(mini.args, name), name


@pytest.mark.parametrize("recipe", ["countdown_grpo_server", "smollm2_countdown"])
def test_one_command_is_the_same_run(calls, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script, run = calls(recipe, "run.sh"), read_run_file(EXAMPLES / recipe / "run.yaml")
    places = {
        "output_dir",
        "add_version",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_file",
    }
    for name in spellings(RlhfArguments).keys() - places - {"vllm_server_base_url"}:
        if hasattr(run.args, name):
            assert getattr(run.args, name) == getattr(script["rlhf"].args, name), name
    assert run.roles["train"].processes == script["rlhf"].processes
    served = parse_arguments(RolloutArguments, as_words(run.rollout), {})
    of_script = parse_arguments(RolloutArguments, script["rollout"].words, {})
    assert replace(served, port=0, torch_dtype=None) == replace(of_script, port=0, torch_dtype=None)


@pytest.mark.parametrize(("size", "template"), VARIANTS)
def test_dr_grpo(calls, size: str, template: str) -> None:
    found = calls("math_dr_grpo", "run.sh", size, template, "--seed", "3")
    args = found["rlhf"].args
    assert args.seed == 3 and args.prompt_template == template
    assert args.stop_words == (["</answer>"] if template == "r1" else [])
    assert args.verifier == ("math_verify" if size == "7b" else "fast")
    parse_arguments(RolloutArguments, found["rollout"].words)


def test_the_exploration_study(calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each temperature once, a finished one not again, a table with the best, and a plot."""
    monkeypatch.syspath_prepend(EXAMPLES / "gsm8k_ppo")
    import exploration

    asked = []

    def run(words, env, check):
        asked.append((Path(words[0]).name, env["TEMPERATURE"], env["SEED"], words[1:]))
        folder = Path(env["OUTPUT"])
        folder.mkdir(parents=True)
        after = {"0.6": 0.4, "1.2": 0.6, "1.4": 0.5}[env["TEMPERATURE"]] + int(env["SEED"]) / 100
        (folder / "summary.json").write_text(
            json.dumps({"exit_code": 0, "eval_before": 0.3, "eval_after": after})
        )
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(exploration.subprocess, "run", run)
    words = [
        "exploration.py",
        "--mini",
        "--output_dir",
        str(tmp_path / "study"),
        "--seeds",
        "0",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", [*words, "--temperatures", "0.6", "1.2"])
    assert exploration.main() == 0
    assert [one[:3] for one in asked] == [
        ("mini.sh", t, s) for s in ("0", "2") for t in ("0.6", "1.2")
    ]
    assert asked[0][3] == ["--add_version", "false", "--resume_from_checkpoint", "last"]
    monkeypatch.setattr(sys, "argv", [*words, "--temperatures", "0.6", "1.2", "1.4"])
    assert exploration.main() == 0
    assert [one[:3] for one in asked[4:]] == [("mini.sh", "1.4", "0"), ("mini.sh", "1.4", "2")]
    scores = exploration.scores_in(tmp_path / "study")
    assert "| 1.2 (best) | 0.300 | 0.610 | 0.600, 0.620 |" in exploration.table(scores)
    assert (tmp_path / "study" / "exploration.png").stat().st_size > 0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for SWIFT_R1_DATA with a few rows of each set that the recipes train on."""
    folder = tmp_path_factory.mktemp("data")
    gsm8k = [
        {"question": f"What is {n} + 1000?", "answer": f"I add.\n#### {n + 1000:,}"}
        for n in range(6)
    ]
    math = [
        {
            "problem": f"Find ${n}^2$.",
            "level": f"Level {n}",
            "solution": f"It is $\\boxed{{{n * n}}}$.",
        }
        for n in range(1, 6)
    ]
    for name, rows in {
        "gsm8k_train": gsm8k,
        "gsm8k_test": gsm8k,
        "math_train": math,
        "math_test": math,
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("recipe", "script"),
    [pytest.param(*one, marks=() if one in CHECKED else pytest.mark.long) for one in SCRIPTS],
)
def test_swift_check_passes(
    calls, data: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, script: str
) -> None:
    from swift_r1.launch.checks.run import run_checks

    monkeypatch.setenv("SWIFT_R1_DATA", str(data))
    call = calls(
        recipe, script, *(["7b", "r1"] if (recipe, script) == ("math_dr_grpo", "run.sh") else [])
    )["rlhf"]
    args = parse_arguments(CheckArguments, call.words, {"NPROC_PER_NODE": str(call.processes)})
    report = run_checks(replace(args, model="", reward_num_workers=1, num_rows=2))
    assert report.ok, report.faults + [
        problem for one in report.rewards for problem in one.problems
    ]
    assert all(one.rows == 2 for one in report.datasets) and report.rewards
    if "gsm8k" in recipe or (recipe, script) == ("math_dr_grpo", "run.sh"):
        assert all(one.tells_right for one in report.rewards)
