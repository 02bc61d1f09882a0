"""Writes docs/flags.md from the flags themselves: `python scripts/flags_doc.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from swift_r1.arguments import RlhfArguments, RolloutArguments
from swift_r1.arguments.evaluation import EvalArguments
from swift_r1.arguments.fields import FlagSpec, flag_specs
from swift_r1.arguments.rlhf import CheckArguments
from swift_r1.cli.help import shown
from swift_r1.cli.merge_lora import MergeArguments

PAGE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
INTRODUCTION = """# Flags

Made by `python scripts/flags_doc.py` from the flags' own descriptions; a test keeps it current. Names and meaning are
ms-swift's. Where a default is not ms-swift's, the last column says what that is. Lists are written `--flag a b`,
booleans `--flag true`. A YAML file of flags may come first; the command line wins over it.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    commands = (("swift rlhf", RlhfArguments), ("swift rollout", RolloutArguments), ("swift eval", EvalArguments))
    for command, cls in commands:
        parts.append(f"## `{command}`\n")
        for group, members in groupby(flag_specs(cls).values(), key=lambda spec: spec.group):
            parts.append(f"### {group}\n\n| flag | default | what it does | ms-swift's default |\n|---|---|---|---|")
            parts += [_row(spec) for spec in members]
            parts.append("")
    parts.append("## `swift merge-lora`\n")
    parts.append("| flag | default | what it does | ms-swift's default |\n|---|---|---|---|")
    parts += [*(_row(spec) for spec in flag_specs(MergeArguments).values()), ""]
    parts.append("## `swift check`\n\nThe flags of `swift rlhf`, none of them required, and:\n")
    parts.append("| flag | default | what it does | ms-swift's default |\n|---|---|---|---|")
    parts += [_row(spec) for spec in flag_specs(CheckArguments).values() if spec.group == "Check"]
    return "\n".join([*parts, ""])


def _row(spec: FlagSpec) -> str:
    names = ", ".join(f"`--{name}`" for name in (spec.name, *spec.info.aliases))
    default = (
        "required" if spec.info.required else "" if spec.default in (None, "", [], {}) else f"`{shown(spec.default)}`"
    )
    text = spec.info.help + (f"; one of {', '.join(spec.info.choices)}" if spec.info.choices else "")
    return f"| {names} | {default} | {text.replace('|', chr(92) + '|')} | {spec.info.ms_swift or ''} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
