"""`results/gpu/<chip>-<date>.json` and the same as a page; written anew after each part, so that a kit that is killed
leaves what it has found. A second run of that day and commit adds its parts."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from parts import PARTS, Part
from runner import Outcome

BAD = ("failed", "timed out", "killed")


@dataclass
class Report:
    """Outcomes by part, and beside the page the log of all parts."""

    stem: Path
    chip: str
    commit: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, chip: str, commit: str) -> Report:
        """Of this day and chip, with what an earlier run of the same commit has found."""
        name = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")
        report = cls(folder / f"{name}-{date.today().isoformat()}", chip, commit)
        folder.mkdir(parents=True, exist_ok=True)
        if report.data.exists():
            known = json.loads(report.data.read_text(encoding="utf-8"))
            if known["commit"] == commit:
                report.outcomes = {name: Outcome(**one) for name, one in known["parts"].items()}
        return report

    @property
    def data(self) -> Path:
        return Path(f"{self.stem}.json")

    @property
    def page(self) -> Path:
        return Path(f"{self.stem}.md")

    @property
    def exit_code(self) -> int:
        return int(any(one.state in BAD for one in self.outcomes.values()))

    @property
    def log(self) -> Path:
        return Path(f"{self.stem}.log")

    def add(self, part: Part, outcome: Outcome, log: str = "") -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"\n===== {part.name}: {outcome.state} {outcome.why}\n{log}")
        if outcome.state != "not run" or part.name not in self.outcomes:
            self.outcomes[part.name] = outcome
        content = {"chip": self.chip, "commit": self.commit, "date": date.today().isoformat()}
        parts = {name: asdict(one) for name, one in self.outcomes.items()}
        self.data.write_text(
            json.dumps(content | {"parts": parts}, indent=1) + "\n", encoding="utf-8"
        )
        self.page.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """The page, in Markdown."""
        counts = [one.state for one in self.outcomes.values()]
        summary = ", ".join(f"{counts.count(state)} {state}" for state in dict.fromkeys(counts))
        lines = [
            f"# {self.chip}, {date.today().isoformat()}",
            f"Commit {self.commit}: {summary}.",
            "",
        ]
        known = {part.name: part.what for part in PARTS}
        lines += ["| part | what | state | seconds | |", "|---|---|---|---|---|"]
        for name, one in self.outcomes.items():
            why = one.why.replace("|", "\\|")
            lines.append(
                f"| {name} | {known.get(name, '')} | {one.state} | {one.seconds:.0f} | {why} |"
            )
        for title, names in (
            ("Figures", self._with("figures")),
            ("What went wrong", self._with("tail")),
        ):
            lines += ["", f"## {title}"] if names else []
            for name in names:
                one = self.outcomes[name]
                if title == "Figures":
                    lines += [f"- **{name}**: {_flat(one.figures)}"]
                else:
                    lines += [f"### {name}", *(f"    {line}" for line in one.tail)]
        return "\n".join(lines) + "\n"

    def _with(self, what: str) -> list[str]:
        return [name for name, one in self.outcomes.items() if getattr(one, what)]


def _flat(figures: dict[str, Any]) -> str:
    def said(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name} {said(value)}" for name, value in figures.items())


def name_of_chip() -> str:
    """As the driver calls the first GPU."""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    return said.partition("\n")[0].strip() or "no GPU"
