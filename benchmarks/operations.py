"""Where the seconds of some work go on a CPU, by torch's profiler. Needs torch only."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

PARTS = {
    "products with weights": ("aten::mm", "aten::addmm", "_linear_pointwise", "_reorder_linear"),
    "attention": ("aten::bmm", "aten::baddbmm", "softmax", "attention", "Attention"),
    "copies": ("aten::copy_", "aten::cat", "aten::clone", "aten::index"),
}
COLUMNS = ("python", "other operations", *PARTS)
"""`python` is what no operation took."""


def seconds_by_part(profiled: profile, wall: float) -> dict[str, float]:
    """Returns what each of `COLUMNS` took of `wall` seconds that were profiled."""
    seconds: Counter[str] = Counter()
    for one in profiled.key_averages():
        found = (part for part, names in PARTS.items() if any(name in one.key for name in names))
        seconds[next(found, "other operations")] += one.self_cpu_time_total / 1e6
    return {column: seconds[column] for column in COLUMNS} | {"python": wall - seconds.total()}


class BetweenRounds:
    """Is called whenever a round is generated, by the thread that trains on it. Where STEP_PROFILE names a file, it
    profiles from the second call to the third, a step's training and the next one's generation, and writes
    `seconds_by_part` there."""

    def __init__(self) -> None:
        self.calls = 0
        self.profiled: Any = None

    def __call__(self) -> None:
        name = os.environ.get("STEP_PROFILE")
        if not name:
            return
        self.calls += 1
        if self.calls == 2:
            self.profiled = profile(activities=[ProfilerActivity.CPU])
            self.profiled.start()
            self.began = time.perf_counter()
        elif self.calls == 3:
            wall = time.perf_counter() - self.began
            self.profiled.stop()
            Path(name).write_text(json.dumps(seconds_by_part(self.profiled, wall)))
