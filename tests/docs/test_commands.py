"""Every command that a page shows: it runs, or what it names is there; `ways.py` says which, and why.

The other fences: Python compiles and its imports of ours are there, JSON and YAML can be read.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from _pytest.mark.structures import ParameterSet

from swift_r1.cli.main import main
from tests.conftest import ServerProcess, save_tiny_model, start_tiny_server, wait_until_serving
from tests.docs.lookup import filled, look_up
from tests.docs.shown import ROOT, Fence, Shown, commands, fences, files, pages
from tests.docs.ways import DRY, Way, way_of
from tests.lab.runs.made import make_run
from tests.ms_swift.scripts import ScriptCommand
from tests.ms_swift.test_scripts import hub, run_commands  # noqa: F401  a fixture

SHELLS = ("bash", "sh", "shell", "console")
READ = {
    "json": json.loads,
    "yaml": yaml.safe_load,
    "jsonl": lambda text: [json.loads(x) for x in text.splitlines()],
}
RUN = "v0-20261122-120000"
ROWS = {
    "rows.jsonl": [{"question": f"What is {n} + 1?", "solution": str(n + 1)} for n in range(16)],
    "numbers.jsonl": [
        {"query": "Guess my number from 1 to 9.", "secret": n % 9 + 1} for n in range(16)
    ],
    "sums.jsonl": [{"question": f"What is {n} + {n}?", "total": str(2 * n)} for n in range(16)],
    "problems.jsonl": [
        {
            "question": "Read n, print n + 1.",
            "verification_info": {
                "language": "python",
                "test_cases": [{"input": f"{n}", "output": f"{n + 1}"}],
            },
        }
        for n in range(16)
    ],
}
FROM_PAGES = {  # a file that commands name, and the fence of another page that shows it
    "my_plugin.py": ("docs/plugins.md", "python", 0),
    "sums.py": ("README.md", "python", 0),
}


def shell_blocks(page: str) -> list[Fence]:
    return [fence for fence in fences(page) if fence.language in SHELLS]


@cache
def shown_on(page: str) -> list[Shown]:
    return [command for fence in shell_blocks(page) for command in commands(fence)]


WITH_COMMANDS = [page for page in pages() if shell_blocks(page)]


def in_time(page: str, *values: object) -> ParameterSet:
    """README.md alone is for `make test`."""
    return pytest.param(*(values or [page]), marks=() if page == "README.md" else pytest.mark.long)


EVERY_PAGE = pytest.mark.parametrize("page", [in_time(page) for page in WITH_COMMANDS])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", kind="qwen2", max_position_embeddings=4096
    )


@pytest.fixture
def folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    fill(tmp_path, model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fill(tmp_path: Path, model: Path) -> None:
    """As a checkout, with a model, a few runs and the files that the pages name."""
    for name in ("benchmarks", "docs", "examples", "plugins", "scripts", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("models/smollm2-135m", "models/mini/countdown", "M"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(model)
    for name in (
        f"output/my-run/{RUN}",
        f"output/my-run/{RUN}-replay",
        "output/model/v0-20261123-101500",
        "output/GRPO_COUNTDOWN/v0-...",
        "RUN",
    ):
        make_run(tmp_path / name)
    for name, rows in ROWS.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (page, language, number) in FROM_PAGES.items():
        shown = [fence.text for fence in fences(page) if fence.language == language]
        (tmp_path / name).write_text(shown[number])
    flags = {
        "rlhf_type": "grpo",
        "model": "M",
        "dataset": "countdown#16",
        "external_plugins": "plugins/countdown.py",
    }
    flags |= {"reward_funcs": ["external_countdown", "format"], "per_device_train_batch_size": 8}
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(flags | {"max_completion_length": 2048}))
    run = yaml.safe_load((ROOT / "examples/smollm2_countdown/run.yaml").read_text())
    run |= {
        "ssh": {"hosts": ["gen1", "gen2"]},
        "kubernetes": {"image": "swift-r1", "claim": "runs"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(flags))
    (tmp_path / "servers.txt").write_text("http://127.0.0.1:8000\n")


@EVERY_PAGE
def test_every_command_is_known(page: str) -> None:
    unknown = [str(command) for command in shown_on(page) if way_of(command) is None]
    assert unknown == [], "tests/docs/ways.py says of each command whether it runs"


@EVERY_PAGE
def test_commands(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One after another, as a reader would type them, with the page's files in each folder; a training leaves a run."""
    write_files(page)
    for command in shown_on(page):
        if command.words[0] == "cd":
            monkeypatch.chdir(command.words[1])
            write_files(page)
        elif way_of(command) is Way.SMALL and not Path("output").exists():
            make_run(Path("output") / RUN)
        elif way_of(command) is Way.RUN:
            run(command, capfd)
        elif way_of(command) is not Way.SERVED:
            try:
                look_up(command)
            except Exception as error:
                raise AssertionError(f"{command}: {error}") from error


def write_files(page: str) -> None:
    for name, text in files(page).items():
        Path(name).write_text(text)


def run(command: Shown, capfd: pytest.CaptureFixture[str]) -> None:
    words = [word for word in command.words[1:] if word != "..."]
    if words[0] in DRY and "--dry_run" not in words:
        words.append("--dry_run")
    # It imports torch, DeepSpeed and vLLM in new processes, and says the same on every page.
    code = once(tuple(words)) if words[0] == "doctor" else main(words)
    assert code == 0, f"{command}: exit code {code}: {capfd.readouterr().err}"


@cache
def once(words: tuple[str, ...]) -> int:
    return main(words)


@pytest.fixture(scope="module")
def named_server(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], ServerProcess]]:
    """`named_server(name)` serves the tiny model as `name`."""
    running: dict[str, ServerProcess] = {}

    def serve(name: str) -> ServerProcess:
        if name not in running:
            running[name] = start_tiny_server(
                tmp_path_factory.mktemp("server"), model, served_model_name=name
            )
            wait_until_serving(running[name])
        return running[name]

    yield serve
    for server in running.values():
        server.stop()


@pytest.mark.long
@pytest.mark.parametrize(
    "page", [p for p in WITH_COMMANDS if any("curl " in one.text for one in shell_blocks(p))]
)
def test_a_server_answers(page: str, named_server: Callable[[str], ServerProcess]) -> None:
    """The server is the one that the page has started last; a request gets at most 8 tokens."""
    name = "models/smollm2-135m"
    key = None
    for command in shown_on(page):
        if command.words[:2] == ("swift", "rollout"):
            given = dict(pairwise(command.words))
            name = given.get("--served_model_name") or given["--model"]
        if command.words[0] != "curl":
            continue
        server = named_server(name)
        words = [re.sub("(http://)?localhost:8000", server.url, word) for word in command.words]
        words = [re.sub(r'"max_tokens": \d+', '"max_tokens": 8', word) for word in words]
        words = [word.replace("swift-session-...", key or "-") for word in words]
        words += ["--fail-with-body", "--noproxy", "*"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        with_key = re.search(r'"api_key": ?"(.*?)"', done.stdout)
        key = with_key[1] if with_key else key


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    "page", [p for p in WITH_COMMANDS if any("swift rlhf" in one.text for one in shell_blocks(p))]
)
def test_trainings_run(
    page: str,
    model: Path,
    hub: dict[str, str],  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps of each with small sizes, to exit code 0 and a checkpoint; its server too, where it has one."""
    trainings = [one for one in shown_on(page) if way_of(one) is Way.SMALL]
    for number, command in enumerate(trainings):
        folder = tmp_path / str(number)
        folder.mkdir()
        fill(folder, model)
        monkeypatch.chdir(folder)
        train(command, folder, model, hub, capfd, monkeypatch)


def train(
    command: Shown,
    folder: Path,
    model: Path,
    hub: dict[str, str],  # noqa: F811
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_files(command.page)
    if command.words[2] == "run.yaml":  # of `swift init`
        written = next(one for one in shown_on(command.page) if one.words[:2] == ("swift", "init"))
        run(written, capfd)
        monkeypatch.chdir(written.words[3])
        write_files(command.page)
        words = [sys.executable, "-m", "swift_r1", *command.words[1:]]
        for flag, value in (
            ("--model", str(model)),
            ("--max_steps", "2"),
            ("--max_completion_length", "16"),
        ):
            if flag in words:
                words[words.index(flag) + 1] = value
            else:
                words += (flag, value)
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            words, env=environ, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stderr
        return
    words = [str(model) if re.match("(Qwen|Skywork)/", word) else word for word in filled(command)]
    if "--save_strategy" in words:
        del words[(at := words.index("--save_strategy")) : at + 2]
    called = [ScriptCommand("rlhf", tuple(words), command.environ)]
    if called[0].value("vllm_server_host"):
        called.insert(0, ScriptCommand("rollout", ("--model", "M"), {}))
    (folder / "results").mkdir()
    run_commands(called, folder, model, hub, folder / "results")


OTHERS = [
    in_time(page, fence)
    for page in pages()
    for fence in fences(page)
    if fence.language in ("python", *READ)
]


@pytest.mark.parametrize("fence", OTHERS, ids=lambda fence: f"{fence.page}:{fence.line}")
def test_fences_of_other_languages(fence: Fence) -> None:
    if fence.language != "python":
        READ[fence.language](fence.text)
        return
    tree = _parsed(fence.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "swift_r1":
            module = import_module(node.module or "")
            missing = [one.name for one in node.names if not hasattr(module, one.name)]
            # docs/contributing.md shows files that are to be written
            assert not missing or fence.page == "docs/contributing.md", missing


def _parsed(text: str) -> ast.Module:
    """Also of lines from inside a function, a class or an `if`."""
    try:
        return ast.parse(text)
    except SyntaxError:
        lines = textwrap.indent(textwrap.dedent(text), "        ")
        start = (
            "        if True:\n            pass\n" if re.match(r"\s*(elif|else)\b", text) else ""
        )
        return ast.parse(f"class _:\n    def _():\n{start}{lines}")
