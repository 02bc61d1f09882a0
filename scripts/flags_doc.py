"""Writes docs/flags.md from the flags themselves: `python scripts/flags_doc.py`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from swift_r1.arguments import RlhfArguments, RolloutArguments
from swift_r1.arguments.estimate import EstimateArguments
from swift_r1.arguments.evaluation import EvalArguments
from swift_r1.arguments.fields import FlagSpec, flag_specs
from swift_r1.arguments.forecast import ForecastArguments
from swift_r1.arguments.launch import LaunchArguments
from swift_r1.arguments.meanings import MEANINGS
from swift_r1.arguments.report import ReportArguments
from swift_r1.arguments.rlhf import CheckArguments
from swift_r1.arguments.sweep import SweepArguments
from swift_r1.arguments.view import ViewArguments
from swift_r1.arguments.why import WhyArguments
from swift_r1.cli.help import shown
from swift_r1.cli.merge_lora import MergeArguments

PAGE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
INTRODUCTION = """# Flags

Made by `python scripts/flags_doc.py` from the flags' own descriptions; a test keeps it current. Names and meaning are
ms-swift's. Brackets hold the default, and ms-swift's where it differs. Lists are written `--flag a b`, booleans
`--flag true`. A YAML file of flags may come first; the command line wins over it.
"""

_OTHERS = """## The other flags of ms-swift

The flags above act. Those that follow do not exist here, and each is either always so (it is accepted at the values
shown (`*`: any), one line at the start lists it, and another value is refused) or refused, with the reason in front.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    commands = (("swift rlhf", RlhfArguments), ("swift rollout", RolloutArguments), ("swift eval", EvalArguments))
    for command, cls in commands:
        parts.append(f"## `{command}`\n")
        for group, members in groupby(flag_specs(cls).values(), key=lambda spec: spec.group):
            parts += [f"### {group}\n", *map(_entry, members), ""]
    for command, cls in (
        ("swift launch", LaunchArguments),
        ("swift sweep", SweepArguments),
        ("swift view", ViewArguments),
        ("swift why", WhyArguments),
        ("swift report", ReportArguments),
    ):
        parts += [f"## `{command}`\n", *map(_entry, flag_specs(cls).values()), ""]
    parts += ["## `swift merge-lora`\n", *map(_entry, flag_specs(MergeArguments).values()), ""]
    parts.append(
        "## `swift replay`\n\nThe flags of `swift rlhf` but for data, rollouts, turns and evaluation (replay.md).\n"
    )
    parts.append("## `swift check`\n\nThe flags of `swift rlhf`, none of them required, and:\n")
    parts += [_entry(spec) for spec in flag_specs(CheckArguments).values() if spec.group == "Check"]
    parts.append("\n## `swift forecast`\n\nThe flags of `swift rlhf`, and:\n")
    parts += [_entry(spec) for spec in flag_specs(ForecastArguments).values() if spec.group == "Forecast"]
    parts.append("\n## `swift estimate`\n\nThe flags of `swift rlhf`, of which only `--model` is required, and:\n")
    parts += [_entry(spec) for spec in flag_specs(EstimateArguments).values() if spec.group == "Estimate"]
    parts += ["", _OTHERS, *_others()]
    return "\n".join([*parts, ""])


def _others() -> Iterator[str]:
    """The flags of ms-swift that are no fields, under the reason that they share."""
    for reason, members in groupby(MEANINGS.items(), key=lambda item: item[1].reason):
        flags = list(members)
        so = [f"`--{name} {'`, `'.join(one.so)}`" for name, one in flags if one.so]
        refused = [f"`--{name}`" for name, one in flags if not one.so]
        lists = [f"always {', '.join(so)}"] * bool(so) + [f"refused: {', '.join(refused)}"] * bool(refused)
        yield _filled(f"- {'; '.join(lists)} ({reason})")


def _entry(spec: FlagSpec) -> str:
    names = ", ".join(f"`--{name}`" for name in (spec.name, *spec.info.aliases))
    notes = ["required"] if spec.info.required else []
    if not spec.info.required and spec.default not in (None, "", [], {}):
        notes.append(f"`{shown(spec.default)}`")
    if spec.info.ms_swift is not None:
        notes.append(f"ms-swift: {spec.info.ms_swift}")
    text = spec.info.help + (f"; one of {', '.join(map(str, spec.info.choices))}" if spec.info.choices else "")
    bracket = f" [{'; '.join(notes)}]" if notes else ""
    return _filled(f"- {names}{bracket}: {text}")


def _filled(line: str) -> str:
    return textwrap.fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
