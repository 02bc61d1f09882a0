"""`sweep.json`: what a sweep is and how far it is, for scripts and for its next start."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift_r1.errors import RunFailed, UsageError, one_line
from swift_r1.lab.evaluation.store import differences, write_whole
from swift_r1.lab.sweep.judging import Ranked, ranking
from swift_r1.lab.sweep.running import Sweep
from swift_r1.record.metrics import standard_json
from swift_r1.runtime.files import read_text

RECORD = "sweep.json"


def read_stopped(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the points that were stopped in `folder` so far, with the reasons; none in a new folder.

    Raises:
        UsageError: another sweep is in it, with what differs; or its record cannot be read.
    """
    path = folder / RECORD
    try:
        record = json.loads(read_text(path))
        before = record["settings"]
        stopped = dict(record["stopped"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is damaged ({one_line(error)}): remove it, and ended runs are kept"
        ) from error
    found = list(differences(before, standard_json(settings)))
    if found:
        raise UsageError(
            f"{folder} holds another sweep: give another output_dir, or the same file", *found
        )
    return stopped


def ranked(sweep: Sweep) -> list[Ranked]:
    """Returns the points all of whose runs have ended, the best first; those without the metric are left out."""
    points: dict[str, list[float]] = {}
    for run in sweep.runs:
        value = run.value(sweep.args.metric, sweep.args.over) if run.state == "ended" else math.nan
        points.setdefault(run.plan.point, []).append(value)
    return ranking(
        {name: values for name, values in points.items() if all(map(math.isfinite, values))}
    )


def write_record(
    folder: Path,
    file: str,
    sweep: Sweep,
    order: Sequence[Ranked],
) -> None:
    """Raises RunFailed: it cannot be written."""
    content = {
        "file": file,
        "settings": sweep.args.settings,
        "stopped": sweep.stopped,
        "runs": [
            {
                "name": run.plan.name,
                "point": run.plan.point,
                "seed": run.plan.seed,
                "state": run.state,
                "why": run.why,
                "step": run.log.last_step,
                sweep.args.metric: run.value(sweep.args.metric, sweep.args.over),
                "folder": str(run.plan.folder),
                "output": str(run.output),
            }
            for run in sweep.runs
        ],
        "points": [asdict(one) for one in order],
    }
    path = folder / RECORD
    try:
        write_whole(path, json.dumps(standard_json(content), indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {error.strerror or error}") from error
