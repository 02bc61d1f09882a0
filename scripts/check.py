"""`make check`: ruff, mypy, and the tests of what has changed since the branch left `main`, side by side.

Which tests those are: changed test files, a few whole runs, and for each changed module the test files that import it;
where none does, those that import what imports it, and so on. They may take two minutes by the table in
`tests/scheduling.py`, the shortest first; what that leaves out is named. `make test` runs everything.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.scheduling import SECONDS, SHORT_S  # noqa: E402

BIN = ROOT / ".venv" / "bin"
BUDGET_S = 120.0  # of tests; two or three processes run them
WHOLE_RUNS = "tests/e2e/test_embedded.py"
BESIDE_CODE = {  # what is no module, and the tests that read it
    "docs": "tests/packaging tests/docs",
    "README.md": "tests/packaging tests/docs",
    "mkdocs.yml": "tests/packaging",
    "requirements": "tests/packaging",
    "scripts": "tests/packaging",
    "Makefile": "tests/packaging",
    "setup.py": "tests/packaging",
    "examples": "tests/examples",
    "plugins": "tests/plugins",
}


def main() -> int:
    tests, left_out = within_budget(tests_of(changed_files()))
    pytest = [
        str(BIN / "python"),
        "-m",
        "pytest",
        "-q",
        "-n",
        "auto",
        "-m",
        "not long and not gpu and not cluster",
        *tests,
    ]
    commands = {
        "ruff check": [str(BIN / "ruff"), "check", "."],
        "ruff format": [str(BIN / "ruff"), "format", "--check", "."],
        "mypy": [str(BIN / "mypy")],
        f"tests: {' '.join(tests)}": pytest if tests else ["true"],
    }
    failed = 0
    running = []
    for name, command in commands.items():
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115  read when the command has ended
        running.append(
            (name, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output), output)
        )
    for name, process, output in running:
        code = process.wait()
        failed += code not in (0, 5)  # pytest: all of them are long
        output.seek(0)
        print(f"--- {name}\n{output.read().rstrip()}", flush=True)
        output.close()
    if left_out:
        print(f"--- left to `make test`: {' '.join(left_out)}")
    return min(failed, 1)


def changed_files() -> list[str]:
    """Against the commit at which the branch left `main`, with what is not committed."""
    base = git("merge-base", "main", "HEAD")[0]
    return sorted(
        {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}
    )


def git(*words: str) -> list[str]:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def tests_of(changed: Collection[str]) -> list[str]:
    """Test files; first the whole runs and those that have changed themselves."""
    own, others = [], set()
    if any(name.startswith("swift_r1/") for name in changed):
        own.append(WHOLE_RUNS)
    for name in changed:
        path = ROOT / name
        top = name.partition("/")[0]
        if is_test(name):
            own += [name] if path.exists() and name not in own else []
        elif name.endswith(".py") and top in ("swift_r1", "tests"):
            others |= nearest_tests(name)
        elif top in BESIDE_CODE:
            folders = BESIDE_CODE[top].split()
            others |= {
                str(one.relative_to(ROOT))
                for folder in folders
                for one in (ROOT / folder).glob("test_*.py")
            }
    return [*own, *sorted(others - set(own), key=lambda file: (seconds_of(file), file))]


def nearest_tests(changed: str) -> set[str]:
    """The test files that import a file by the shortest way."""
    seen, level = {changed}, {changed}
    while level:
        level = {file for file in importers() if file not in seen and importers()[file] & level}
        if found := {file for file in level if is_test(file)}:
            return found
        seen |= level
    return set()


def is_test(name: str) -> bool:
    return (
        name.startswith("tests/") and Path(name).name.startswith("test_") and name.endswith(".py")
    )


@cache
def importers() -> dict[str, set[str]]:
    """What each Python file of the package and the tests imports of them; a test file its folder's conftest too."""
    files = [path for top in ("swift_r1", "tests") for path in (ROOT / top).rglob("*.py")]
    return {str(path.relative_to(ROOT)): imports_of(path) for path in files}


def imports_of(path: Path) -> set[str]:
    fixtures = path.with_name("conftest.py")
    found = (
        {str(fixtures.relative_to(ROOT))}
        if path.name.startswith("test_") and fixtures.exists()
        else set()
    )
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {file for alias in node.names if (file := file_of(alias.name))}
        elif isinstance(node, ast.ImportFrom):
            parent = list(path.relative_to(ROOT).parts[: -node.level]) if node.level else []
            module = ".".join([*parent, *(node.module or "").split(".")]).rstrip(".")
            for alias in node.names:
                file = file_of(f"{module}.{alias.name}") or origin(module, alias.name)
                found |= {file} if file else set()
    return found


def file_of(module: str) -> str | None:
    base = ROOT / module.replace(".", "/")
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return str(path.relative_to(ROOT))
    return None


@cache
def origin(module: str, name: str) -> str | None:
    """The file that a name of a module comes from: where a package only passes it on, the module that has it."""
    file = file_of(module)
    if file is None or not file.endswith("__init__.py"):
        return file
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and any(
            (one.asname or one.name) == name for one in node.names
        ):
            return origin(node.module or "", name) or file
    return file


def within_budget(tests: Iterable[str]) -> tuple[list[str], list[str]]:
    taken, left_out, total = [], [], 0.0
    for file in tests:
        total += seconds_of(file)
        (taken if total <= BUDGET_S else left_out).append(file)
    return taken, left_out


def seconds_of(file: str) -> float:
    return SECONDS.get(file, SHORT_S)


if __name__ == "__main__":
    sys.exit(main())
