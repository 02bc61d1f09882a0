"""`make gpu` on a machine without one: what happens to parts that fail, and a rehearsal of real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from swift_r1.flags import RlhfArguments, RolloutArguments, parse_arguments
from swift_r1.flags.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "scripts" / "gpu"
SCRIPTS = {
    "passes": "print('RESULT {\"TFLOP/s\": 788.5}')",
    "raises": "print('first'); raise RuntimeError('no kernel image | is available')",
    "hangs": (
        "import subprocess, sys, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True)\n"
        "time.sleep(1000)"
    ),
    "dies": "import os, signal; print('RESULT {\"half', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "declines": "import sys; print('this chip has no fp8'); sys.exit(77)",
    "last": "print('RESULT {\"GB/s\": 1}')",
}


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The kit's modules, which import each other as files of one folder."""
    monkeypatch.syspath_prepend(str(KIT))
    names = ("parts", "runner", "report")
    yield {name: __import__(name) for name in names}
    for name in names:
        del sys.modules[name]


def run(
    kit: dict[str, ModuleType], folder: Path, budget_s: float, hangs_s: float = 5.0, **times: float
) -> dict[str, Any]:
    """All of SCRIPTS, and a part for which a package is missing and one that needs two GPUs; seconds by name."""
    part = kit["parts"].Part
    parts = []
    for name, text in SCRIPTS.items():
        (folder / f"{name}.py").write_text(text)
        limit = hangs_s if name == "hangs" else 60.0
        parts.append(
            part(name, f"it {name}", (f"{name}.py",), times.get(name, 0.1), limit, ("json",))
        )
    parts.insert(2, part("lacks", "", ("passes.py",), 0.1, 60, ("json", "no_such_package")))
    parts.insert(3, part("pair", "", ("passes.py",), 0.1, 60, (), 2))
    machine = kit["runner"].Machine(sys.executable, folder, dict(os.environ), 1)
    report = kit["report"].Report.open(folder / "out", "NVIDIA H200", "abc")
    kit["runner"].run_parts(parts, machine, budget_s, report)
    assert report.exit_code == 1
    found: dict[str, Any] = json.loads(report.data.read_text())["parts"]
    return found | {"page": report.page.read_text(), "log": report.log.read_text()}


@pytest.mark.long
def test_a_part_that_does_not_pass_ends_none_of_the_others(
    kit: dict[str, ModuleType], tmp_path: Path
) -> None:
    kit["runner"].GRACE_S = 0.5
    found = run(kit, tmp_path, 120.0)
    states = {name: one["state"] for name, one in found.items() if isinstance(one, dict)}
    assert states == {
        "passes": "passed",
        "raises": "failed",
        "lacks": "skipped",
        "pair": "skipped",
        "hangs": "timed out",
        "dies": "killed",
        "declines": "skipped",
        "last": "passed",
    }
    assert found["passes"]["figures"] == {"TFLOP/s": 788.5} and found["last"]["figures"] == {
        "GB/s": 1
    }
    assert found["raises"]["why"] == "exit code 1: RuntimeError: no kernel image | is available"
    assert found["raises"]["tail"][0] == "first"
    assert found["lacks"]["why"] == "not installed: no_such_package"
    assert found["pair"]["why"] == "it needs 2 GPUs, and this machine has 1"
    assert found["hangs"]["why"].startswith("killed after 5 s") and found["dies"]["why"].startswith(
        "by SIGKILL"
    )
    assert found["declines"]["why"] == "this chip has no fp8"
    child = int(found["log"].partition("===== hangs: timed out")[2].splitlines()[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    page = found["page"]
    assert (
        "# NVIDIA H200" in page and "2 passed, 1 failed, 3 skipped, 1 timed out, 1 killed" in page
    )
    assert (
        "- **passes**: TFLOP/s 788.5" in page
        and "    RuntimeError: no kernel image | is available" in page
    )


def test_a_budget_that_is_too_small_leaves_out_later_parts_and_a_second_run_adds_them(
    kit: dict[str, ModuleType], tmp_path: Path
) -> None:
    kit["runner"].GRACE_S = 0.5
    first = run(kit, tmp_path, 60.0, 0.2, dies=1000, last=1000)
    assert first["passes"]["state"] == "passed"
    assert first["dies"]["state"] == first["last"]["state"] == "not run"
    assert first["last"]["why"].endswith("s of the budget left, and it takes about 1000")
    second = run(kit, tmp_path, 0.05, 0.2)
    assert (
        second["passes"]["figures"] == {"TFLOP/s": 788.5} and second["last"]["state"] == "not run"
    )
    assert run(kit, tmp_path, 60.0, 0.2)["last"]["state"] == "passed"


def test_every_layout_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flags that a GPU gets, which no rehearsal tries."""
    monkeypatch.syspath_prepend(str(KIT))
    monkeypatch.delenv("GPU_REHEARSAL", raising=False)
    monkeypatch.setenv("GPU_WORK", "work")
    names = ("parts", "shapes", "layouts")
    parts, _, layouts = (__import__(name) for name in names)
    for name in names:
        del sys.modules[name]
    ran = {part.command[1] for part in parts.PARTS if part.command[0].endswith("layouts.py")}
    assert ran == layouts.LAYOUTS.keys() | layouts.SERVED.keys()
    model = Path("m")
    runs = {name: layouts.flags_of(name) for name in layouts.LAYOUTS}
    runs |= {
        name: layouts.asking(8000) | more
        for one in layouts.SERVED.values()
        for name, more in one.items()
    }
    for name, flags in runs.items():
        command, *words = map(str, layouts.training_words(name, model, flags))
        args = parse_arguments(RlhfArguments, words, {})
        plan = make_plan(args, 1, 1000)
        assert (
            command == "rlhf"
            and plan.total_steps == layouts.STEPS
            and args.torch_dtype == "bfloat16"
        ), name
    command, *words = map(str, layouts.server_words(model, 8000))
    assert command == "rollout" and parse_arguments(RolloutArguments, words, {}).port == 8000


@pytest.mark.long
def test_a_rehearsal_runs_the_parts_themselves(tmp_path: Path) -> None:
    """Short ones and one that cannot run; `make gpu GPU_ARGS=--rehearse` takes a quarter of an hour."""
    words = [
        sys.executable,
        str(KIT),
        "--rehearse",
        "--python",
        sys.executable,
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*words, "--parts", "rates", "flash", "train-0.5b"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    [data] = tmp_path.glob("rehearsal-*.json")
    found = json.loads(data.read_text())["parts"]
    logs = "".join(file.read_text()[-2000:] for file in tmp_path.rglob("*.log"))
    assert done.returncode == 0, done.stdout + logs
    assert found["rates"]["state"] == "passed" and found["rates"]["figures"]["bf16 TFLOP/s"] > 0
    assert found["train-0.5b"]["state"] == "passed" and found["train-0.5b"]["figures"]["MFU"] > 0
    [page] = tmp_path.glob("rehearsal-*.md")
    assert "**train-0.5b**" in page.read_text()
    if find_spec("flash_attn") is None:
        assert found["flash"] == found["flash"] | {
            "state": "skipped",
            "why": "not installed: flash_attn",
        }
