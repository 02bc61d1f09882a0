"""What the newest version of each dependency breaks: each, with what it asks for itself, over a .venv with everything
else as it is locked.

    python scripts/newest.py                  # those of core, train, cpu, view and agents; hours
    python scripts/newest.py httpx pyarrow    # these
    python scripts/newest.py --markdown       # the table as Markdown, for a page of continuous integration

A version beyond the range in `requirements/*.in` is tried too, and the table says that it is. Exit code 1: one that the
ranges allow breaks something. Cap it there, or mend the code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
DIRECT = ("core", "train", "cpu", "view", "agents")
TESTS = (  # a minute on two quiet cores: a whole run, the page, the check, data, rewards, the wire
    "tests/packaging/test_private_interfaces.py",
    "tests/cli/test_help.py",
    "tests/cli/test_check.py",
    "tests/data/test_files.py",
    "tests/data/test_loading.py",
    "tests/rewards/test_graders.py",
    "tests/serving/test_session_routes.py",
    "tests/lab/view/test_overview.py",
    "tests/e2e/test_embedded.py",
)
TESTS_S, INSTALL_S = 1800, 1800


@dataclass(frozen=True)
class Outcome:
    """One line of the table. `broken` is a reason, or empty; `also` is what else came along, and which of the locked
    packages ask for another version."""

    name: str
    locked: Version
    newest: Version
    allowed: bool
    broken: str
    also: tuple[str, ...] = ()


def lines(name: str) -> list[str]:
    text = (ROOT / "requirements" / name).read_text()
    return [line for raw in text.splitlines() if (line := raw.split("#")[0].strip())]


def direct() -> dict[str, Requirement]:
    found = [Requirement(line) for name in DIRECT for line in lines(f"{name}.in")]
    return {
        canonicalize_name(one.name): one
        for one in found
        if one.marker is None or one.marker.evaluate()
    }


def locked() -> dict[str, Version]:
    pins = (line.partition("==") for name in ("cpu.txt", "dev.txt") for line in lines(name))
    return {canonicalize_name(name): Version(version) for name, _, version in pins}


def pip(python: Path | str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)


def newest_of(name: str) -> Version:
    """The newest that this Python can have, whatever the ranges say. Raises ValueError: pip cannot tell."""
    asked = (
        "install",
        "-q",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--no-build-isolation",
        "--report",
        "-",
    )
    done = pip(sys.executable, *asked, name)
    if done.returncode:
        raise ValueError(last_error(done.stderr))
    report: Mapping[str, Any] = json.loads(done.stdout)
    return Version(report["install"][0]["metadata"]["version"])


def last_error(text: str) -> str:
    """pip's first line that begins with ERROR, else its last one."""
    every = [line for line in text.splitlines() if line.strip()]
    return next(
        (line for line in every if line.startswith("ERROR")), every[-1] if every else "no output"
    )


def broken_by(name: str, version: Version, folder: Path) -> tuple[str, tuple[str, ...]]:
    """What breaks with this version of a package in the place of the locked one, empty if nothing does; and `also` of
    its outcome."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=INSTALL_S
    )
    python = folder / "bin" / "python"
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(purelib, "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # pip leaves what is locked where it is, unless this version asks for another one.
    done = pip(python, "install", "-q", "--no-build-isolation", f"{name}=={version}")
    if done.returncode:
        return f"cannot be installed: {last_error(done.stderr)}", ()
    came = [
        f"with {one.name} {one.version}"
        for one in distributions(path=[purelib])
        if canonicalize_name(one.name) != name
    ]
    also = (*came, *objections(done.stderr))
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-m",
        "not long and not gpu",
        "-p",
        "no:cacheprovider",
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        ran = subprocess.run(
            [*command, *TESTS],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=TESTS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the tests did not end within {TESTS_S} s", also
    if ran.returncode == 0:
        return "", also
    failed = [line for line in ran.stdout.splitlines() if re.match(r"(FAILED|ERROR) ", line)]
    return failed[0] if failed else last_error(ran.stderr or ran.stdout), also


def objections(text: str) -> list[str]:
    """Which packages that are there ask for another version than pip has installed, as it says itself."""
    return re.findall(r"^(\S+ \S+ requires .+), but you have ", text, re.MULTILINE)


def table(outcomes: list[Outcome], markdown: bool) -> str:
    rows = [("package", "locked", "newest", "in its range", "outcome")]
    for one in outcomes:
        said = one.broken or ("as before" if one.newest > one.locked else "is locked")
        allowed = "yes" if one.allowed else "no"
        rows.append(
            (one.name, str(one.locked), str(one.newest), allowed, "; ".join((said, *one.also)))
        )
    if markdown:
        cells = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
        return "\n".join(
            f"| {row} |" for row in [cells[0], "|".join(["---"] * len(rows[0])), *cells[1:]]
        )
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:4]]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--markdown", action="store_true")
    words = parser.parse_args()
    known, pins = direct(), locked()
    names = [canonicalize_name(name) for name in words.names] or sorted(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no direct dependency: {', '.join(unknown)}")
    outcomes = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                newest = newest_of(name)
                broken, also = (
                    broken_by(name, newest, Path(folder)) if newest > pins[name] else ("", ())
                )
            except (ValueError, subprocess.SubprocessError) as error:
                newest, broken, also = pins[name], str(error), ()
        outcomes.append(
            Outcome(name, pins[name], newest, newest in known[name].specifier, broken, also)
        )
        print(table(outcomes[-1:], False).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(outcomes, words.markdown))
    return int(any(one.broken and one.allowed for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
