"""The shell commands that the pages show, as bash reads them, and the other fences by their language."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = (
    *(
        "NPROC_PER_NODE",
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
        "SWIFT_API_KEY",
    ),
    *(
        "SWIFT_HUB_TOKEN",
        "SWIFT_R1_STEPS",
        "SWIFT_R1_FAULTS",
        "SEED",
        "WAY",
        "OUTPUT",
        "MODEL",
        "DEMO_ARGS",
    ),
)
# Nothing that a page names is run: each command prints its words and variables instead. What bash does itself it does.
_PRELUDE = (
    r"""said() { local v all=("$@" --); for v in """
    + " ".join(VARIABLES)
    + r"""; do [ -z "${!v}" ] || all+=("$v=${!v}"); done; printf '%s\0' "${all[@]}" --- >&3; }
command_not_found_handle() { said "$@"; }
source() { said source "$@"; }
cd() { said cd "$@"; }
"""
)
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_COMMAND = re.compile(
    r"(?:[A-Z_0-9]+=\S* +)*(swift|make|python|pip|curl|pytest|npm|git|sudo|examples/|scripts/|\.ci/)\b"
)


@dataclass(frozen=True)
class Fence:
    """A block of a page: its language (of an indented one: bash, or nothing), its text and its first line's number."""

    page: str
    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Shown:
    """One command: its words, and those of VARIABLES that are set for it."""

    page: str
    words: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join((*(f"{name}={value}" for name, value in self.environ.items()), *self.words))


def pages() -> list[str]:
    """The Markdown files of the repository, but of the tracker's templates."""
    listed = subprocess.check_output(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        text=True,
    )
    return [
        name for name in listed.splitlines() if not name.startswith(".") and (ROOT / name).exists()
    ]


@cache
def fences(page: str) -> tuple[Fence, ...]:
    text = (ROOT / page).read_text()
    found = []
    for one in _FENCE.finditer(text):
        shown = re.sub(rf"^{one['indent']}", "", one["text"], flags=re.MULTILINE)
        found.append(Fence(page, one["language"], shown, text.count("\n", 0, one.start()) + 1))
    without = _FENCE.sub(lambda one: "\n" * one[0].count("\n"), text)
    return (*found, *_indented(page, without))


def files(page: str) -> dict[str, str]:
    """The files that a page shows, by name: a fence whose first line is `# plugin.py`, or one below a line that ends
    with "`rows.jsonl`:". A page for another project's users shows one row as JSON: `rows.jsonl` has it 16 times."""
    lines = (ROOT / page).read_text().splitlines()
    found = {}
    for fence in fences(page):
        above = " ".join(lines[max(fence.line - 3, 0) : fence.line - 1])
        if named := re.match(r"# ([\w.-]+\.py)\b", fence.text) or re.search(
            r"`([\w.-]+\.\w+)`: *$", above
        ):
            found[named[1]] = fence.text
        elif fence.language == "json" and page.startswith("docs/from-"):
            found["rows.jsonl"] = fence.text * 16
    return found


def _indented(page: str, text: str) -> Iterator[Fence]:
    """The blocks that four spaces make code: after a blank line or a heading, outside of lists."""
    block: list[str] = []
    before, listed = "", False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.startswith("    ") and (
            block or (not listed and (not before or before.startswith("#")))
        ):
            block.append(line[4:])
        elif block:
            language = "bash" if _COMMAND.match(block[0]) else ""
            yield Fence(page, language, "\n".join(block) + "\n", number - len(block))
            block = []
        if line and not line.startswith(" "):
            listed = bool(re.match(r"([-*]|\d+\.) ", line))
        before = line


def commands(fence: Fence) -> list[Shown]:
    """What a block calls. Bash expands it, in an empty folder and with nothing to call."""
    # Bash looks for no function of a name with a slash unless there is one.
    paths = sorted(set(re.findall(r"(?<!\S)(?:[\w.-]+/)+[\w.-]+(?![^\s;)|&])", fence.text)))
    named = "".join(f'function {path} {{ said {path} "$@"; }}\n' for path in paths)
    with tempfile.TemporaryDirectory() as folder:
        for file in re.findall(r"(?<!<)[<>] *([\w.-][\w./-]*)", fence.text):
            (Path(folder) / file).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / file).touch()
        done = subprocess.run(
            ["/bin/bash", "-c", f"exec 3>&1 1>/dev/null\n{_PRELUDE}{named}{fence.text}"],
            env={"PATH": "/nonexistent"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    if done.stderr:
        raise ValueError(f"{fence.page}, line {fence.line}: bash says {done.stderr.strip()}")
    found = []
    for printed in done.stdout.split("\0---\0")[:-1]:
        before, _, after = printed.rpartition("\0--")
        variables = dict(pair.split("=", 1) for pair in after.split("\0")[1:])
        program, *words = before.split("\0")
        installed = program.rpartition("/bin/")[2]  # of a virtual environment
        found.append(Shown(fence.page, (installed, *words), variables))
    return found
