"""ms-swift's own GRPO scripts: their commands as bash reads them, and the same commands cut down to a laptop.

    python -m tests.ms_swift.scripts 4=FOLDER 3=FOLDER

prints what becomes of each script; `--write` puts it into docs/migrating.md. A folder has ms-swift's sources, with
`examples/train`, of the version in front.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments, RolloutArguments
from swift_r1.flags.parser import Command, parse_arguments

SOURCES = [
    Path(name).resolve() for name in os.environ.get("MS_SWIFT_SOURCE", "").split(":") if name
]
NO_SOURCE = "MS_SWIFT_SOURCE does not name a checkout of ms-swift's sources"
PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
_BEGIN, _END = "<!-- scripts -->", "<!-- end of scripts -->"
NODES_OF = {
    "colocate_multi_node2.sh": Path("examples/train/grpo/multi_node/colocate_multi_node1.sh"),
}
"""The second script of a run, and the first, which is tested with it."""
FOLDERS = ("examples/train/grpo", "examples/train")
VARIABLES = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_CLASSES: dict[str, type[Command]] = {"rlhf": RlhfArguments, "rollout": RolloutArguments}
_TORCHRUN_SCRIPT = "swift/cli/rlhf.py"
# Nothing that a script names is run: each command prints its words and variables instead.
_PRELUDE = (
    r"""print_command() { printf '%s\0' "$@" --; for v in """
    + " ".join(VARIABLES)
    + r"""; do [ -z "${!v}" ] || printf '%s\0' "$v=${!v}"; done; printf '%s\0' ---; }
command_not_found_handle() { print_command "$@"; }
"""
)
_STARTS = re.compile(r"(swift (rollout|rlhf)\b|[A-Z_]+=\S+ *\\$)")


@dataclass(frozen=True)
class ScriptCommand:
    """One `swift rlhf` or `swift rollout` of a script: its words after that, and the variables in front of it."""

    name: str
    words: tuple[str, ...]
    environ: Mapping[str, str]

    def value(self, flag: str) -> str | None:
        """The first word behind `--flag`."""
        return next(
            (b for a, b in zip(self.words, self.words[1:], strict=False) if a == f"--{flag}"), None
        )


def scripts(checkout: Path) -> list[Path]:
    """The scripts about GRPO, relative to the checkout, that have a command of ours."""
    found = {path for path in (checkout / FOLDERS[0]).rglob("*.sh")} | {
        path for path in (checkout / FOLDERS[1]).rglob("*grpo*.sh") if "megatron" not in path.parts
    }
    return [path.relative_to(checkout) for path in sorted(found) if commands(path)]


def commands(script: Path) -> list[ScriptCommand]:
    """What a script calls of ours, also in comments, where they put the command of another machine.

    Bash expands it, restricted (no folders, no redirections) and with nothing to call; `<node1_ip>` and the like become
    addresses.
    """
    text = re.sub(r"<node(\d)_ip>", r"10.0.0.\1", _uncommented(script.read_text()))
    text = re.sub(r"<node(\d)_port>", r"800\1", text)
    environ = {"PATH": "/nonexistent", "WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        ["/bin/bash", "--restricted", "-c", _PRELUDE + text],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = []
    for printed in done.stdout.split("\0---\0")[:-1]:
        before, _, after = printed.rpartition("\0--")
        words, variables = (
            before.split("\0"),
            dict(pair.split("=", 1) for pair in after.split("\0")[1:]),
        )
        if words[0] == "torchrun" and _TORCHRUN_SCRIPT in words:
            words.remove(_TORCHRUN_SCRIPT)
            words[:1] = ["swift", "rlhf"]
        if words[0] == "swift" and words[1] in _CLASSES:
            found.append(ScriptCommand(words[1], tuple(words[2:]), variables))
    return found


def _uncommented(text: str) -> str:
    """The script with the commands that it has in comments."""
    lines, inside = [], False
    for line in text.splitlines():
        comment = re.match(r"#\s*(.*)", line)
        if comment and (inside or _STARTS.match(comment[1])):
            lines.append(line[1:])  # its spaces too: a word may end in a backslash
            inside = comment[1].rstrip().endswith("\\")
        else:
            lines.append(line)
            inside = False
    return "\n".join(lines) + "\n"


def faults(command: ScriptCommand) -> tuple[str, ...]:
    """Why we refuse a command; nothing where it is good."""
    try:
        parse_arguments(_CLASSES[command.name], command.words, command.environ)
    except UsageError as error:
        return error.faults
    return ()


_STOPS = {
    "deepeyes_scheduler": "its scheduler, whose tools show the model new images",
    "sudoku_scheduler": "its scheduler, of a class that only ms-swift has (an Env and --use_gym_env true do without)",
    "tree_rollout_scheduler": "its scheduler, which generates by itself (trees of completions are not done here)",
}


def stops_at(command: ScriptCommand) -> str | None:
    """What a run of accepted flags is refused for when it starts, with a line of its own; None: nothing."""
    if "-Omni-" in (command.value("model") or ""):
        return "the model, which hears and speaks"
    if "internlm2" in " ".join(command.words):
        return "its second reward model, whose code is its own"
    return _STOPS.get(command.value("multi_turn_scheduler") or "")


def sees(command: ScriptCommand) -> bool:
    """Whether the command's model reads images."""
    return "-VL-" in (command.value("model") or "")


def verdict(found: Sequence[ScriptCommand]) -> str:
    """What becomes of a script: `as it is`, or why its commands are refused, flags with one reason together."""
    reasons: dict[str, list[str]] = {}
    for fault in (fault for one in found for fault in faults(one)):
        flag, _, reason = fault.partition(": ")
        named = [flag] if flag.startswith("--") and " " not in flag else []
        reasons.setdefault(reason if named else fault, []).extend(named)
    if reasons:
        texts = (
            f"{reason} ({', '.join(dict.fromkeys(flags))})" if flags else reason
            for reason, flags in reasons.items()
        )
        return f"refused: {'; '.join(texts)}"
    stop = next(filter(None, map(stops_at, found)), None)
    return f"as it is, until {stop}" if stop else "as it is"


def table(checkouts: Mapping[str, Path], ran: Container[str] = ()) -> str:
    """The verdicts on all scripts as a Markdown table, under one line of counts per version; `ran` are the names of
    the tests in `test_scripts.py` that have passed."""
    verdicts: dict[str, dict[str, str]] = {}
    counts, ran_as = [], set()
    for version, checkout in checkouts.items():
        with contextlib.chdir(checkout):  # as their users do: paths in the scripts begin there
            called = {path: commands(path) for path in scripts(Path())}
            found = {path: verdict(called[path]) for path in called}
        good = sum(text.startswith("as it is") for text in found.values())
        ran_as |= {
            _in_other_words(called[path])
            for path in called
            if case_of(checkout, NODES_OF.get(path.name, path)) in ran
        }
        runs = {path for path in called if _in_other_words(called[path]) in ran_as}
        counts.append(
            f"Version {version}: {good} of {len(found)} scripts are accepted as they are"
            + (f", {len(runs)} were run with small sizes." if ran else ".")
        )
        for path, text in found.items():
            name = str(path).removeprefix("examples/train/")
            verdicts.setdefault(name, {})[version] = f"{text}; runs" if path in runs else text
    lines = [*counts, "", "| script | version | |", "|---|---|---|"]
    for path, texts in verdicts.items():
        for text in dict.fromkeys(texts.values()):
            lines.append(
                f"| {path} | {', '.join(v for v, one in texts.items() if one == text)} | {text} |"
            )
    return "\n".join(lines)


def _in_other_words(found: Sequence[ScriptCommand]) -> tuple[object, ...]:
    """The commands with the names that version 4 has for flags of version 3: the same run."""
    return tuple(
        (
            one.name,
            tuple(word.replace("--train_type", "--tuner_type") for word in one.words),
            *sorted(one.environ.items()),
        )
        for one in found
    )


def case_of(checkout: Path, script: Path) -> str:
    """What pytest calls the test of a script."""
    return f"{checkout.name}-{script.relative_to(FOLDERS[1]).with_suffix('')}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.ms_swift.scripts", description=__doc__)
    parser.add_argument("checkouts", nargs="+", metavar="VERSION=FOLDER")
    parser.add_argument(
        "--ran",
        nargs="*",
        default=[],
        metavar="FILE",
        help="what pytest --junitxml wrote of the runs",
    )
    parser.add_argument("--write", action="store_true", help="into docs/migrating.md")
    given = parser.parse_args()
    passed = {
        case.get("name", "").partition("[")[2].removesuffix("]")
        for file in given.ran
        for case in ElementTree.parse(file).iter("testcase")
        if not list(case)
    }
    found = table(
        {name: Path(folder) for name, _, folder in (one.partition("=") for one in given.checkouts)},
        passed,
    )
    if not given.write:
        return print(found)
    before, begin, rest = PAGE.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    PAGE.write_text(f"{before}{begin}\n{found}\n{end}{after}")


if __name__ == "__main__":
    main()
