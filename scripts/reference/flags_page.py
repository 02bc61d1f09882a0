"""docs/flags.md: the flags of each command, from what its `--help` is made of."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from text import MADE, anchor, link, table

from swift_r1.cli import rlhf
from swift_r1.cli.help import shown
from swift_r1.cli.main import COMMANDS
from swift_r1.flags import RlhfArguments
from swift_r1.flags.fields import FlagSpec, flag_specs
from swift_r1.flags.ms_swift_flags import meanings

_INTRODUCTION = f"""{MADE}
# Flags

Every command with its flags. `swift COMMAND --help` says the same in the terminal. Names and meaning are ms-swift's.

- A list is written `--flag a b`, a boolean `--flag true` (`--flag` alone is true), JSON in single quotes.
- A YAML file of flags may come first, `swift rlhf run.yaml --beta 0.01`; the command line wins over
  it. Of a flag given twice the last one counts, as in a script that ends with `"$@"`.
- All errors are reported at once. An unknown flag comes with a suggestion, and a flag that would have no effect is
  refused.
- Each flag has an address: `flags.md#--beta` for `swift rlhf`, `flags.md#eval--model` for the other commands.
- A resumed run keeps its flags, except those that "may change on resume".
- The column "default" also shows ms-swift's default where it differs. Empty means there is none.
"""

_PAGES = {
    "Processes": "scaling.md",
    "Model": "models.md",
    "Adapters": "backends.md",
    "Plugins and rewards": "plugins.md",
    "Built-in rewards": "rewards.md",
    "Data": "datasets.md",
    "Several tasks": "mixture.md",
    "Engine (vLLM)": "server.md",
    "Rollouts": "server.md",
    "Several turns": "plugins.md",
    "Several turns: told to the trainer, which runs them": "server.md",
    "Agents": "agents.md",
    "Environments": "environments.md",
    "PPO": "algorithms.md",
    "CHORD": "algorithms.md",
    "Algorithm": "algorithms.md",
    "Distillation": "distillation.md",
    "Training": "backends.md",
    "Hub": "checkpoints.md",
    "Trackers": "seeing-a-run.md",
    "Output and evaluation": "evaluation.md",
    "Server": "server.md",
    "Check": "plugins.md",
    "Forecast": "forecast.md",
    "Supervised training": "sft.md",
    "Preferences": "preferences.md",
}
"""What explains the flags of a group; a new group needs an entry."""
_PREFERENCES = "rlhf --rlhf_type dpo"
_COMMAND_PAGES = {
    **{
        "launch": "launch.md",
        "eval": "evaluation.md",
        "view": "seeing-a-run.md",
        "why": "diagnosis.md",
    },
    **{
        "sft": "sft.md",
        "replay": "replay.md",
        "report": "seeing-a-run.md",
        "examples": "../examples/README.md",
    },
    **{
        "forecast": "forecast.md",
        "check": "plugins.md",
        "rollout": "server.md",
    },
    _PREFERENCES: "preferences.md",
    **{"merge-lora": "backends.md", "init": "plugins.md", "plugins": "plugins.md"},
}

_OTHERS = """## The other flags of ms-swift

The flags above act. Those that follow do not exist here. A flag that is always so is accepted at the values shown (`*`:
any; one line at the start of a run lists them), and refused at others.
"""


def page() -> str:
    parts = [_INTRODUCTION]
    rows = []
    helps = {
        command: importlib.import_module(f"swift_r1.cli.{command.replace('-', '_')}").HELP
        for command in COMMANDS
    }
    about = COMMANDS | {_PREFERENCES: "teach a model which of two answers is better"}
    for command, own in (helps | {_PREFERENCES: rlhf.PREFERENCES}).items():
        parts.append(_command(command, own))
        rows.append((link(f"swift {command}"), about[command]))
    parts.insert(1, table(("command", "what it does"), rows) + "\n")
    rows = [*_others()]
    return "\n".join([*parts, _OTHERS, table(("flag", "always", "reason"), rows), ""])


def _plain(heading: str) -> str:
    return heading.partition(": ")[2]


def _command(command: str, own: Sequence[Any]) -> str:
    usage, *rest = own
    usage, _, examples = usage.partition("\n\nExamples:")
    examples = textwrap.dedent(rest[1] if rest else examples).strip()
    parts = [f"## swift {command}", "", *_fence(usage.strip())]
    if (explained := _COMMAND_PAGES.get(command)) is not None:
        parts += [f"Explained in [{explained.removeprefix('../')}]({explained}).", ""]
    if examples:
        parts += ["Examples:", "", *_fence(examples)]
    if rest:
        groups = list(_groups(command, rest[0], rest[2] if len(rest) > 2 else None))
        names = [one.removeprefix("### ") for one in groups if one.startswith("### ")]
        if names:
            parts += [
                f"Flags: {', '.join(f'[{_plain(one)}]({anchor(one)})' for one in names)}.",
                "",
            ]
        parts += groups
    return "\n".join(parts)


def _fence(text: str) -> list[str]:
    return ["```text", text, "```", ""]


def _groups(command: str, cls: type, only: Sequence[str] | None) -> Iterator[str]:
    """The tables of a command's flags; groups of `swift rlhf` in another command are links."""
    groups: dict[str, list[FlagSpec]] = {}
    for spec in flag_specs(cls).values():
        groups.setdefault(spec.group, []).append(spec)
    shared, trains = set[str](), issubclass(cls, RlhfArguments)
    if cls is not RlhfArguments and trains:
        shared = {spec.group for spec in flag_specs(RlhfArguments).values()}
    for name in only or groups:
        if name in shared:
            continue
        if len(groups) > 1 and not shared:
            yield from (f"### {command}: {name}", "")
            if command in ("rlhf", "rollout"):
                yield from (f"Explained in [{_PAGES[name]}]({_PAGES[name]}).", "")
        yield table(
            ("flag", "value", "default", "meaning"),
            (_row(command, spec, trains) for spec in groups[name]),
        )
        yield ""
    if shared:
        again = ", ".join(
            f"[{name}]({anchor(f'rlhf: {name}')})" for name in only or () if name in shared
        )
        yield f"The flags of `swift rlhf` may be given too{f', above all {again}' if again else ''}."
        yield ""


def _row(command: str, spec: FlagSpec, trains: bool) -> tuple[str, str, str, str]:
    """`trains`: of a command for which scopes and resumed runs mean something."""
    info = spec.info
    names = ", ".join(f"`--{name}`" for name in (spec.name, *info.aliases))
    address = f"{'' if command == 'rlhf' else command}--{spec.name}"
    if info.choices:
        value = ", ".join(f"`{one}`" for one in info.choices)
    else:
        value = {bool: "true, false", int: "integer", float: "number", dict: "JSON"}.get(
            spec.kind, "text"
        )
        value += _range(spec)
    value += " ..." if spec.is_list else ""
    default = "required" if info.required else ""
    if not info.required and spec.default not in (None, "", [], {}):
        default = f"`{shown(spec.default)}`"
    if info.ms_swift is not None:
        default = f"{default or 'none'}; ms-swift: {info.ms_swift}"
    scopes = [one.else_message for one in info.scopes if trains and "{" not in one.else_message]
    meaning = info.help + "".join(f". No effect {one}" for one in scopes)
    meaning += ". On GPUs only" if info.gpu_only else ""
    meaning += ". May change on resume" if info.may_change and trains else ""
    return f'<a id="{address.replace(" ", "-")}"></a>{names}', value, default, meaning


def _range(spec: FlagSpec) -> str:
    signs = {"at_least": "≥", "more_than": ">", "at_most": "≤", "less_than": "<"}
    limits = [
        f"{sign} {value:g}"
        for name, sign in signs.items()
        if (value := getattr(spec.info, name)) is not None
    ]
    return f" {', '.join(limits)}" if limits else ""


def _others() -> Iterator[tuple[str, str, str]]:
    """The flags of ms-swift that are no fields, under the reason that they share."""
    for reason, members in groupby(meanings().items(), key=lambda item: item[1].reason):
        for accepted, some in groupby(members, key=lambda item: item[1].so):
            names = ", ".join(f"`--{name}`" for name, _ in some)
            yield names, ", ".join(f"`{one}`" for one in accepted) or "refused", reason
