"""The first lines on a run: what it is doing, whether it learns, by how much, what is wrong, and when it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nicegui import ui

from swift_r1.lab.diagnosis.past import DETECTORS
from swift_r1.lab.diagnosis.verdict import Verdict, headed, headline
from swift_r1.lab.diagnosis.watch import Diagnosis, Finding
from swift_r1.lab.runs.timeline import Span
from swift_r1.lab.view.markup import markup, table
from swift_r1.lab.view.shell import Page
from swift_r1.record.folder import RunFolder
from swift_r1.runtime.terminal import duration


class Headline:
    """The verdict on one run with its standing; below them its first cause, and folded all others and every sign."""

    def __init__(self, page: Page) -> None:
        self.page = page
        with ui.element("section").props('aria-label="verdict"') as self.frame:
            self.head = ui.html("", sanitize=False)
            with ui.element("details") as self.more:
                with ui.element("summary"):
                    self.summary = ui.label()
                self.rest = ui.html("", sanitize=False).classes("view-scroll")

    def show(
        self, verdict: Verdict | None, log: Diagnosis, standing: dict[str, str], last: Span | None
    ) -> None:
        """Shows it; what is unfolded stays so. `standing` is that of `progress_of`, `last` what the trainer did last."""
        kind = verdict.reward.kind.replace(" ", "-") if verdict is not None else "too-early"
        self.frame.classes(replace=f"view-verdict view-{kind}")
        now = [text for name, text in standing.items() if name in ("progress", "time") and text]
        if last is not None and standing["status"] == "running":
            ago = duration(max(0.0, time.time() - last.end))
            now.append(f"{last.name} of step {last.step} ended {ago} ago")
        now += [
            f"{name} {text}"
            for name, text in standing.items()
            if name not in ("run", "status", "progress", "time")
        ]
        facts = "".join(f"<span>{markup(one)}</span>" for one in now)
        text = headline(verdict, log.past)
        title = headed(verdict, log.past).capitalize()
        if verdict is None and (log.get("token_accuracy") or log.get("rewards/accuracies")):
            title = "Answers"
        causes = verdict.causes if verdict is not None else []
        evaluated = verdict.evaluations if verdict is not None else []
        learned = "".join(
            f"<p>{markup(one)}</p>" for one in (text, *(e.text for e in evaluated[:2]))
        )
        self.head.content = (
            f"<h2>{markup(title)} "
            f"<span class='view-status'>{markup(standing['status'])}</span></h2>"
            f"<p class=view-now>{facts}</p>{learned}"
            + "".join(
                f"<p><b>Why:</b> {markup(one.name)}: {markup(one.evidence)}</p>"
                f"<p><b>Try:</b> {markup(one.advice)}</p>"
                for one in causes[:1]
            )
        )
        self._show_rest(verdict, log)

    def _show_rest(self, verdict: Verdict | None, log: Diagnosis) -> None:
        causes = verdict.causes[1:] if verdict is not None else []
        trends = verdict.functions if verdict is not None else []
        findings = list(log.findings.values())
        ran = len(DETECTORS) - len(log.not_judged) - len(log.too_early)
        found = [f"{len(causes)} more cause{'s' * (len(causes) > 1)}"] if causes else []
        if findings:
            found.append(f"{len(findings)} sign{'s' * (len(findings) > 1)} of trouble")
        elif ran:
            found.append(f"✓ no sign of trouble ({ran} of {len(DETECTORS)} checks ran)")
        if trends:
            found.append("each reward")
        self.summary.text = ", ".join(found)
        self.more.set_visibility(bool(found))
        rows = [{"why": one.name, "evidence": one.evidence, "try": one.advice} for one in causes]
        lines = "".join(f"<li>{markup(trend.text)}</li>" for trend in trends)
        not_run = [
            f"<p>Not checked, {why}: {markup(', '.join(names))}</p>"
            for why, names in (("too early", log.too_early), ("metrics missing", log.not_judged))
            if names
        ]
        self.rest.content = "".join(
            [
                table(rows) if rows else "",
                signs(self.page, self.page.run, findings),
                f"<ul>{lines}</ul>" if lines else "",
                *not_run,
            ]
        )


def signs(page: Page, run: RunFolder, findings: Sequence[Finding]) -> str:
    """Returns what was found in a run as HTML, each with a way to the completions of its last step."""
    rows = []
    for one in findings:
        href = page.link_of(run, "/completions", step=one.steps[1])
        where = f'<a href="{markup(href)}">steps {one.steps[0]} to {one.steps[1]}</a>'
        rows.append(
            f"<tr><td>{markup(one.name)}</td><td>{where}</td>"
            f"<td>{markup(one.evidence)}</td><td>{markup(one.advice)}</td></tr>"
        )
    head = "<tr><th>sign</th><th>where</th><th>evidence</th><th>try</th></tr>"
    return f"<table class=view-table>{head}{''.join(rows)}</table>" if rows else ""
