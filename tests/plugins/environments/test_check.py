"""`swift check --env`: what it shows, and what it says about environments that cannot be played."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_r1.errors import UsageError
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import CheckArguments, RlhfArguments
from swift_r1.launch.checks.environments import EnvironmentReport, Episode, show_environment
from swift_r1.plugins.environments.process import try_environment
from swift_r1.runtime.terminal import Terminal
from tests import forks
from tests.conftest import until
from tests.plugins.environments.conftest import FILES

SCRIPT = f"trl:{FILES / 'counter_script.py'}"


def check(*words: str) -> tuple[int, str, str]:
    done = forks.run(["-m", "swift_r1", "check", *words], timeout=200)
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout, done.stderr


def test_an_environment_is_played_and_shown() -> None:
    code, said, _ = check("--env", SCRIPT, "--env_args", '{"argv": ["--most", 2]}', "--json")
    found = json.loads(said)
    assert code == 0 and found["ok"], said
    report = found["environment"]
    assert [row["env_row"]["wanted"] for row in report["rows"]] == [1, 2]
    calls, silent = report["episodes"]
    assert (calls["script"], silent["script"]) == ("random calls", "made up")
    assert calls["turns"] == 3 and calls["result"]["tool_calls_made"] == 2.0
    assert (
        silent["turns"] == 1
        and silent["result"]["reward"] == 0.5
        and silent["result"]["CounterEnv"] == 0.0
    )
    assert [one["name"] for one in found["datasets"]] == ["env"]
    out = io.StringIO()
    report["episodes"] = [Episode(**one) for one in report["episodes"]]
    show_environment(EnvironmentReport(**report), Terminal(file=out, width=100))
    text = out.getvalue()
    for part in (
        "counter_script.py",
        "Make it show 1. It shows 0.",
        "amount: integer",
        "Adds to the counter.",
        "brief",
    ):
        assert part in text
    assert "none" in text  # no_opinion


def test_names_and_arguments() -> None:
    def faults(*words: str, cls: Any = CheckArguments) -> str:
        with pytest.raises(UsageError) as caught:
            parse_arguments(cls, list(words), {})
        return "\n".join(caught.value.faults)

    assert "there is no kind of environment gymnasum: did you mean gymnasium?" in faults(
        "--env", "gymnasum:x"
    )
    assert "known are gymnasium, harbor, openenv, trl, verifiers" in faults("--env", "x")
    assert "write KIND:NAME, for example verifiers:reverse-text" in faults("--env", "verifiers:")
    assert "--env_args has no effect without --env" in faults(
        *(
            "--rlhf_type",
            "grpo",
            "--model",
            "m",
            "--dataset",
            "d",
            "--reward_funcs",
            "a",
            "--env_args",
            '{"a": 1}',
        ),
        cls=RlhfArguments,
    )
    base = ["--rlhf_type", "grpo", "--model", "m", "--per_device_train_batch_size", "8"]
    assert "--dataset is missing" in faults(*base, cls=RlhfArguments)
    args = parse_arguments(RlhfArguments, [*base, "--env", SCRIPT], {})
    assert (args.dataset, args.agent, args.reward_funcs) == (["env"], SCRIPT, ["agent_reward"])
    assert parse_arguments(
        RlhfArguments, [*base, "--env", SCRIPT, "--dataset", "d"], {}
    ).dataset == ["d"]
    assert "not both" in faults(*base, "--env", SCRIPT, "--agent", "a", cls=RlhfArguments)


@pytest.mark.skipif(
    importlib.util.find_spec("gymnasium") is not None, reason="gymnasium is installed"
)
def test_a_package_that_is_missing() -> None:
    code, said, _ = check("--env", "gymnasium:FrozenLake-v1")
    assert code == 2 and "needs the package gymnasium: pip install 'swift-r1[gymnasium]'" in said


def written(folder: Path, body: str) -> str:
    (folder / "own.py").write_text(f"class Env:\n    def reset(self, **row):\n        {body}\n")
    return f"trl:{folder / 'own.py'}:Env"


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "raise OSError('the disk is gone')",
            r"an episode (made up) raises OSError: the disk is gone (",
        ),
        ("pass", "an episode (made up) has no reward"),
        (
            "import os; os._exit(7)",
            "its process ended with code 7; its last line: it wrote nothing",
        ),
    ],
)
def test_environments_that_fail(body: str, said: str, tmp_path: Path) -> None:
    code, shown, errors = check("--env", written(tmp_path, body))
    assert code == 2 and said in shown and "Traceback" not in shown + errors


@pytest.mark.long
def test_one_that_hangs_is_killed(tmp_path: Path) -> None:
    spec = written(tmp_path, "import sys, time; print('I wait', file=sys.stderr); time.sleep(600)")
    lines, fault = try_environment(spec, {}, [], 1, 8.0)
    assert len(lines) == 1 and lines[0]["rows"]  # what came before
    assert (
        fault is not None and "its process did not end within 8 s; its last line: I wait" in fault
    )


def test_what_it_prints_is_not_between_the_lines(tmp_path: Path) -> None:
    spec = written(tmp_path, 'print(\'{"fault": "mine"}\')')
    lines, fault = try_environment(spec, {}, [], 1, 60.0)
    assert fault is None and len(lines) == 2 and lines[1]["turns"] == 1


@pytest.mark.long
def test_what_it_leaves_behind_holds_nothing_up_and_ends(tmp_path: Path) -> None:
    left = "import subprocess, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
    spec = written(
        tmp_path,
        left + "return str(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)",
    )
    lines, fault = try_environment(spec, {}, [], 1, 60.0)
    assert fault is None and lines[1]["turns"] == 1
    until(lambda: not psutil.pid_exists(int(lines[1]["first"][0]["content"])), 10)


def test_secrets_are_hidden_as_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_API_KEY", "sesame")
    spec = written(tmp_path, "import os; return os.environ.get('SHOP_API_KEY', 'hidden')")
    for kept, shown in (([], "hidden"), (["SHOP_API_KEY"], "sesame")):
        lines, fault = try_environment(spec, {}, kept, 1, 60.0)
        assert fault is None and lines[1]["first"] == [{"role": "user", "content": shown}]
