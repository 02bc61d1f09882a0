"""The rewards `code` and `binary_code`: shares of tests passed, cheats that pass none, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from swift_r1.rewards import orms
from swift_r1.rewards.code import CodeReward
from swift_r1.workers.sandbox import box, start
from swift_r1.workers.sandbox.box import Run, Sandbox, SandboxError

FOLDER = Path(__file__).parents[1] / "workers" / "escapes"
REPOSITORY = Path(__file__).parents[2]
HIDDEN = "right-only-outside"


def fenced(program: str) -> str:
    return f"<think>so</think>\n<answer>```python\n{program}\n```</answer>"


def scripts(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {
        "language": "python",
        "test_cases": [{"input": one, "output": other} for one, other in pairs],
    }


@pytest.fixture(scope="module")
def code(allows_sandbox: None) -> Iterator[CodeReward]:
    reward = CodeReward(SimpleNamespace(reward_timeout=5.0, reward_memory_limit=0.25))
    yield reward
    reward.sandbox.close()


def test_the_reward_is_the_share_of_tests_passed(code: CodeReward) -> None:
    tests = scripts(("1 2", "3"), ("2 2", "4"), ("0 5", "5"), ("1 1", "2"))
    texts = [
        fenced("print(sum(map(int, input().split())))"),
        fenced("a, b = map(int, input().split())\nprint(a + b if a else 0)"),
        fenced("print(3)\nimport sys\nsys.exit(1)"),
        fenced("print("),
        "no program",
    ]
    assert code(texts, verification_info=[tests] * 5) == [1.0, 0.75, 0.0, 0.0, 0.0]
    binary = orms["binary_code"](code.args)
    assert binary(texts, verification_info=[tests] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]
    binary.sandbox.close()


def test_functions_are_called_as_public_sets_do(code: CodeReward) -> None:
    tests = {
        "inputs": [[[3, 1, 2], 2], [[5], 1]],
        "outputs": [[[1, 2]], [[5]]],
        "fn_name": "smallest",
    }
    method = "class Solution:\n    def smallest(self, n: List[int], k: int) -> List[int]:\n        return nsmallest(k, n)"
    plain = "def smallest(n, k):\n    print('noise')\n    return tuple(sorted(n)[:k])\nif __name__ == '__main__': 1 / 0"
    other = "def largest(n, k):\n    return n"
    assert code([fenced(method), fenced(plain), fenced(other)], input_output=[tests] * 3) == [
        1.0,
        1.0,
        0.0,
    ]


def cheats(kind: str) -> list[Any]:
    parts = re.split(
        r"^### ", (FOLDER / f"verdicts_of_{kind}.cheats").read_text(), flags=re.MULTILINE
    )[1:]
    return [pytest.param(part.partition("\n")[2], id=part.partition("\n")[0]) for part in parts]


@pytest.mark.parametrize("program", cheats("scripts"))
def test_no_script_gets_a_verdict_by_cheating(program: str, code: CodeReward) -> None:
    # Some look for what they should print, which is nowhere in there; the pattern does not match itself.
    program = 'import os, re, sys\nLOOK = re.compile("righ[t]-onl[y]-outsid[e]")\n' + program
    assert code([fenced(program)], verification_info=[scripts(("1", HIDDEN), ("1", "42"))]) == [0.0]


@pytest.mark.parametrize("program", cheats("functions"))
def test_no_function_gets_a_verdict_by_cheating(program: str, code: CodeReward) -> None:
    tests = {
        "test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": [42]}]
    }
    assert code([fenced(program)], verification_info=[tests]) == [0.0]


def test_nothing_leaks_to_the_next_program(code: CodeReward) -> None:
    leave = (
        "import builtins, os, sys, threading, time\nbuiltins.print2 = print\nsys.modules['evil'] = sys\n"
        "os.environ['EVIL'] = '1'\nopen('/tmp/evil', 'w').write('x')\nsys.path.append('/evil')\n"
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nprint('done')"
    )
    look = (
        "import builtins, os, sys, threading\nprint(hasattr(builtins, 'print2'), 'evil' in sys.modules, "
        "'EVIL' in os.environ, os.listdir('/tmp'), '/evil' in sys.path, threading.active_count())"
    )
    clean = scripts(("", "False False False [] False 1"))
    for _ in range(3):
        assert code(
            [fenced(leave), fenced(look)], verification_info=[scripts(("", "done")), clean]
        ) == [1.0, 1.0]


def test_a_program_that_hangs_is_wrong_and_not_late(code: CodeReward) -> None:
    started = time.monotonic()
    tests = scripts(*[("", "1")] * 10)
    assert code([fenced("while True: pass")], verification_info=[tests]) == [0.0]
    assert time.monotonic() - started < 20.0  # 4 s for all ten together; 40 s for one after another


def test_processor_time_ends_a_program_before_wall_time_does(code: CodeReward) -> None:
    assert code.sandbox.run(Run("while True: pass", seconds=60, cpu_seconds=1)).status == -9


def test_memory_is_limited_by_the_flag(code: CodeReward) -> None:
    tests = scripts(("", "1"))
    small, large = (
        fenced("x = bytearray(100 << 20)\nprint(1)"),
        fenced("x = bytearray(300 << 20)\nprint(1)"),
    )
    assert code([small, large], verification_info=[tests] * 2) == [1.0, 0.0]


def test_rows_without_tests_get_no_opinion(code: CodeReward) -> None:
    assert code([fenced("1")], verification_info=[None], input_output=[None]) == [None]
    with pytest.raises(ValueError, match="no column verification_info or input_output"):
        code([fenced("1")], solution=["1"])


def test_a_sandbox_that_is_killed_is_no_verdict_and_comes_back(code: CodeReward) -> None:
    [first] = psutil.Process(code.sandbox._inner.pid).children()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            code, [fenced("while True: pass")], verification_info=[scripts(("", "1"))]
        )
        deadline = time.monotonic() + 20
        while len(first.children(recursive=True)) < 3:  # two supervisors, and the program
            assert time.monotonic() < deadline
        first.kill()
        with pytest.raises(SandboxError, match="broke"):
            running.result(20)
    assert code([fenced("print(1)")], verification_info=[scripts(("", "1"))]) == [1.0]


def test_files_that_the_trainer_makes_for_itself_alone_hide_nothing(allows_sandbox: None) -> None:
    before = os.umask(0o077)
    try:
        sandbox = Sandbox()
    finally:
        os.umask(before)
    assert sandbox.run(Run("import this, os\nopen('/dev/null')\nos.listdir('/')")).status == 0
    sandbox.close()


def test_a_sandbox_in_which_no_program_runs_is_refused(
    allows_sandbox: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "_TRIAL", "open('/missing')")
    with pytest.raises(SandboxError, match="cannot read Python's library"):
        Sandbox()


def in_a_process_of_its_own(
    first: str, run: str, python: str = sys.executable, **others: Any
) -> Any:
    """A sandbox without what importing all of `swift_r1` takes: `first`, then prints how the program `run` ended."""
    package = REPOSITORY / "swift_r1"
    script = (
        start._BOOT.rpartition("importlib")[0]
        + "from swift_r1.workers.sandbox.box import Run, Sandbox\n"
    )
    command = [
        python,
        "-c",
        f"{script}{first}\nprint(Sandbox().run(Run({run!r})))",
        "",
        package,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **others)


def test_lower_limits_of_the_trainer_stay(allows_sandbox: None) -> None:
    lower = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    ran = in_a_process_of_its_own(
        lower, "import resource; print(resource.getrlimit(resource.RLIMIT_FSIZE))"
    )
    assert ran.stdout == f"RunExit(status=0, output=b'({1 << 20}, {1 << 20})\\n')\n", ran


@pytest.mark.long
def test_it_ends_with_its_process(allows_sandbox: None) -> None:
    script = "from swift_r1.workers.sandbox.box import *; s = Sandbox(); print(s._inner.pid, flush=True); input()"
    outer = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, cwd=REPOSITORY)
    assert outer.stdout is not None
    first = psutil.Process(int(outer.stdout.readline()))
    processes = [first, *first.children(recursive=True)]
    assert len(processes) >= 2
    outer.kill()
    outer.communicate()
    assert psutil.wait_procs(processes, timeout=30)[1] == []


def test_any_user_gets_a_sandbox(allows_sandbox: None) -> None:
    """Not root's: its threads are counted, too. It takes an interpreter and a checkout that others may read."""
    python = shutil.which("python3", path="/usr/bin")
    others: dict[str, Any] = {"cwd": "/"}
    others |= {"user": 65532, "group": 65532, "extra_groups": []} if os.geteuid() == 0 else {}
    look = "import sys; sys.exit(sys.version_info < (3, 11) or not __import__('os').access(sys.argv[1], 4))"
    if python is None or subprocess.run([python, "-c", look, box.__file__], **others).returncode:
        pytest.skip("no such interpreter or checkout")
    threads = (
        (FOLDER / "resources.txt")
        .read_text()
        .partition("### many_threads\n")[2]
        .partition("### ")[0]
    )
    run = f"import os, sys\nsay = print\nprint(os.getuid(), os.listdir('/dev'), flush=True)\n{threads}"
    ran = in_a_process_of_its_own("", run, python, **others)
    if "no sandbox for programs can be made here" in ran.stderr:
        pytest.skip(ran.stderr.splitlines()[-1])
    assert (
        ran.stdout.startswith('RunExit(status=1, output=b"0 [') and ran.stdout.count("\\n") == 1
    ), ran


# Namespaces of users are counted: in one that may have none below it, the kernel refuses. Where none can be made, it
# refuses anyway.
REFUSING = (
    "import ctypes, os, pathlib\n"
    "if ctypes.CDLL(None).unshare(0x10000000) == 0:\n"
    "    pathlib.Path('/proc/sys/user/max_user_namespaces').write_text('0')\n"
)


def refused(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = REFUSING + f"import sys\nsys.argv = {['swift', command, *arguments]!r}\n"
    script += "from swift_r1.cli.main import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, timeout=120
    )


def test_swift_check_shows_what_the_reward_gives(tmp_path: Path, allows_sandbox: None) -> None:
    data = tmp_path / "rows.jsonl"
    row = {
        "messages": [{"role": "user", "content": "Add."}],
        "verification_info": scripts(("1 2", "3")),
    }
    data.write_text(json.dumps(row) + "\n")
    gold = fenced("print(sum(map(int, input().split())))")
    command = [
        sys.executable,
        "-m",
        "swift_r1",
        "check",
        "--reward_funcs",
        "code",
        "--dataset",
        str(data),
    ]
    ran = subprocess.run(
        [*command, "--gold", gold, "--json"], capture_output=True, text=True, cwd=REPOSITORY
    )
    [report] = json.loads(ran.stdout)["rewards"]
    assert ran.returncode == 0 and report["problems"] == [] and report["tells_right"] is True, ran


@pytest.mark.long
def test_swift_rlhf_refuses_before_any_model_loads(tmp_path: Path, tiny_model: Path) -> None:
    data = tmp_path / "rows.jsonl"
    row = {
        "messages": [{"role": "user", "content": "Add."}],
        "verification_info": scripts(("1 2", "3")),
    }
    data.write_text((json.dumps(row) + "\n") * 8)
    flags = {
        "rlhf_type": "grpo",
        "model": tiny_model,
        "dataset": data,
        "reward_funcs": "code",
        "use_vllm": "false",
    }
    given = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    ran = refused("rlhf", *given, "--output_dir", str(tmp_path / "out"), "--num_generations", "4")
    assert (
        ran.returncode == 2 and "docs/sandbox.md" in ran.stderr and "Traceback" not in ran.stderr
    ), ran.stderr
