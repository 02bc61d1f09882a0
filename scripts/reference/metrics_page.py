"""docs/metrics.md: what a run logs, and what a server counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from prometheus_client.parser import text_string_to_metric_families
from text import MADE, link, table

import swift_r1.lab.diagnosis.watch  # noqa: F401  it registers the detectors
from swift_r1.flags.server import RolloutArguments
from swift_r1.lab.diagnosis.past import DETECTORS
from swift_r1.record.glossary import GROUPS, Metric
from swift_r1.serving.service import Lifecycle

_SERVER = "Metrics of the server"
_INTRODUCTION = f"""{MADE}
# Metrics

Every key that a run writes to `logging.jsonl` and sends to trackers. A line is written every `--logging_steps` steps.
It has the mean of the steps since the line before; of `completions/max_length`, `rollout/weight_check` and
`rollout/ratio_max` the largest; of `step`, `learning_rate` and `rollout/weight_version` the latest. An evaluation has a
line of its own. A value that is not a finite number is `null`.

A share is between 0 and 1. Entropies, KL and differences of log-probs are per token, with the natural logarithm.

What to look at first: `reward` and an evaluation rise, `frac_reward_zero_std` stays below 0.5,
`completions/clipped_ratio` does not rise, `entropy` does not fall to 0, `rollout/logp_diff` does not change.
Links name the signs by which a run says by itself that something is wrong; [diagnosis.md](diagnosis.md) has their
thresholds. [seeing-a-run.md](seeing-a-run.md) shows the curves.

The tables are `swift_r1/record/glossary.toml`. A new metric gets an entry there; tests fail without.
"""


def page() -> str:
    parts = [_INTRODUCTION, *(f"- {link(name)}" for name in (*GROUPS, _SERVER)), ""]
    for name, metrics in GROUPS.items():
        parts += [f"## {name}", "", _table(metrics), ""]
    parts += [
        f"## {_SERVER}",
        "",
        "`GET /metrics` of `swift rollout`, in Prometheus's text format.",
        "",
    ]
    return "\n".join([*parts, table(("metric", "type", "labels", "what it is"), _of_server()), ""])


def _table(metrics: Sequence[Metric]) -> str:
    head = ("key", "what it is", "unit", "healthy; and what another value says", "logged with")
    return table(
        head, ((f"`{one.name}`", one.meaning, one.unit, _healthy(one), one.when) for one in metrics)
    )


def _healthy(metric: Metric) -> str:
    """And the signs that are seen in it."""
    found = [
        sign.name for sign in DETECTORS for need in sign.needs if fnmatchcase(metric.name, need)
    ]
    signs = ", ".join(f"[{name}](diagnosis.md#what-is-looked-for)" for name in dict.fromkeys(found))
    return metric.healthy + (f" ({signs})" if signs else "")


def _of_server() -> Iterator[tuple[str, str, str, str]]:
    lifecycle = Lifecycle(RolloutArguments(), lambda: None)  # type: ignore[arg-type, return-value]
    metrics = lifecycle.metrics
    labels = {
        one._name: ", ".join(one._labelnames)
        for one in metrics._registry._names_to_collectors.values()
    }
    for family in text_string_to_metric_families(metrics.text().decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        if not family.name.endswith("_created"):
            yield f"`{name}`", family.type, labels.get(family.name, ""), family.documentation
