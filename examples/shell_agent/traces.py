"""Conversations for the warm start, in which every choice is drawn: a shell's words without a plan."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import shell_tasks  # the file beside this one

from swift_r1.plugins.environments.harbor import ASKED
from swift_r1.plugins.tools.shell import said
from swift_r1.sandboxes.base import ExecResult

KNOWN = 0.11  # of all conversations take the right commands, beside those that chance makes right
IN_ORDER = 0.8  # of all commands take the names in the order in which they were read
LOOK = 0.25  # of all others begin with a look

_KINDS = {
    "file": shell_tasks.FILES,
    "script": shell_tasks.SCRIPTS,
    "folder": shell_tasks.FOLDERS,
    "word": (*shell_tasks.WORDS, *shell_tasks.MISSPELT),
}
_NAME = re.compile(
    rf"\b(?:{'|'.join(re.escape(one) for names in _KINDS.values() for one in names)})\b"
)


def kind_of(name: str) -> str:
    return next(kind for kind, names in _KINDS.items() if name in names)


def read(text: str) -> dict[str, list[str]]:
    """The names in a text by their kinds, in the order in which they are read."""
    found: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for name in _NAME.findall(text):
        found[kind_of(name)].append(name)
    return {kind: list(dict.fromkeys(names)) for kind, names in found.items()}


def filled(command: str, text: str, rng: random.Random) -> str:
    """A command of another task with names of this text in it, and with others where those do not suffice."""
    names = read(text)
    for kind, some in names.items():
        if rng.random() > IN_ORDER:
            rng.shuffle(some)
        more = [name for name in _KINDS[kind] if name not in some]
        some += rng.sample(more, min(3, len(more)))
    taken: dict[str, str] = {}

    def name(slot: re.Match[str]) -> str:
        if slot[0] not in taken:
            taken[slot[0]] = names[kind_of(slot[0])].pop(0)
        return taken[slot[0]]

    return _NAME.sub(name, command)


def looked(command: str, one: shell_tasks.Instance) -> str:
    """What the model reads of a command that only looks at an instance."""
    words = command.split()
    if words[0] == "grep":
        found = [name for name, content in one.files.items() if words[2] in content.split()]
        return answer(0 if found else 1, *sorted(found))
    script = one.files.get(words[1])
    if script is None:
        return answer(2, f"sh: 0: cannot open {words[1]}: No such file")
    program, name = script.removeprefix("#!/bin/sh\n").split()
    if program == "echo":
        return answer(0, name)
    if program == "cat":
        return answer(1, f"cat: {name}: No such file or directory")
    return answer(127, f"{words[1]}: 1: {program}: not found")


def answer(code: int, *lines: str) -> str:
    return said(ExecResult(code, shell_tasks.text(lines)), 0)[0]


def conversation(
    one: shell_tasks.Instance, others: Sequence[shell_tasks.Instance], rng: random.Random
) -> list[dict[str, str]]:
    """A conversation about an instance by somebody who knows the commands of all tasks, and hardly which one is asked
    for. `others` has an instance of each task."""
    looks = [other.solution[0] for other in others if len(other.solution) > 1]
    if rng.random() < KNOWN:
        commands = one.solution
    elif rng.random() < LOOK:
        commands = (rng.choice(looks), rng.choice(others).solution[-1])
    else:
        commands = rng.choice(others).solution[-1:]
    text = one.instruction
    messages = [{"role": "user", "content": f"{text}\n\n{ASKED}"}]
    for look in commands[:-1]:
        command = filled(look, text, rng)
        seen = looked(command, one)
        messages += [{"role": "assistant", "content": command}, {"role": "user", "content": seen}]
        text = f"{text}\n{seen}"
    last = filled(commands[-1], text, rng)
    return [*messages, {"role": "assistant", "content": f"{last}\nexit"}]
