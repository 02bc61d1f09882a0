"""What a run needs to go on, beside tensors: plain numbers and names in `state/run.json` of a checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError

STATE = "state"
RUN_JSON = "run.json"
LOGS = ("logging.jsonl", "completions.jsonl", "eval_completions.jsonl", "invalid_rewards.jsonl")
"""Files of a run folder that only grow: a checkpoint knows how long they were."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a run is a run of: a resumed one must have the same.

    Attributes:
        args: every flag.
        world_size: processes that train.
        dataset: a hash of the training rows in their order.
        threads: of one process's tensor operations, which decide the order of sums.
    """

    args: Mapping[str, Any]
    world_size: int
    dataset: str
    threads: int


@dataclass(frozen=True, slots=True)
class RunState:
    """A run after an optimizer step.

    Attributes:
        step: optimizer steps taken.
        rounds: rounds begun; completion seeds and request ids count by it.
        prompts_taken: prompts that the sampler has given out.
        prompts_digest: a hash of these where the data is streamed; else empty.
        published: the step whose weights generate.
        weight_version: of the weights that generate.
        run_id: the beginning of request ids.
        skipped_in_a_row: steps left out since the last that was not.
        outcome: of `summary.json`.
        window: metrics since the last line of `logging.jsonl`.
        rewards: what the monitor of invalid rewards remembers.
        round: of a round in the middle, `done`, `metrics` and `seconds`; None between rounds.
        logs: bytes of each file of `LOGS`.
    """

    step: int
    rounds: int
    prompts_taken: int
    prompts_digest: str
    published: int
    weight_version: int
    run_id: str
    skipped_in_a_row: int
    outcome: Mapping[str, Any]
    window: Mapping[str, Sequence[float]]
    rewards: Mapping[str, Any]
    round: Mapping[str, Any] | None
    logs: Mapping[str, int]
    fingerprint: Fingerprint

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": _FORMAT} | _standard(asdict(self)), indent=1, allow_nan=False)
        (folder / RUN_JSON).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, checkpoint: Path) -> RunState:
        """The state in a checkpoint.

        Raises:
            UsageError: it has none, or one of another version.
        """
        path = checkpoint / STATE / RUN_JSON
        try:
            content = json.loads(path.read_text(encoding="utf-8"), object_hook=_restored)
        except FileNotFoundError:
            raise UsageError(
                f"{checkpoint} cannot be resumed from: it was saved without state/ (--save_only_model true)"
            ) from None
        known = {item.name for item in fields(cls)}
        if content.pop("format", None) != _FORMAT or set(content) != known:
            raise UsageError(f"{checkpoint} cannot be resumed from: its state/ is of another version of swift-r1")
        return cls(**content | {"fingerprint": Fingerprint(**content["fingerprint"])})


def log_sizes(run_dir: Path) -> dict[str, int]:
    """Bytes of each log; all of them are on the disk when this returns."""
    sizes = {}
    for name in LOGS:
        path = run_dir / name
        sizes[name] = path.stat().st_size if path.exists() else 0
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return sizes


def truncate_logs(run_dir: Path, sizes: Mapping[str, int]) -> None:
    """Cuts each log to what it was; what came later is done again.

    Raises:
        UsageError: a log is shorter than that, so that it cannot be continued.
    """
    short = [name for name, size in sizes.items() if _size(run_dir / name) < size]
    if short:
        raise UsageError(f"{run_dir} cannot be resumed: {', '.join(short)} is shorter than it was at the checkpoint")
    for name in LOGS:
        path = run_dir / name
        if path.exists():
            os.truncate(path, sizes.get(name, 0))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _standard(value: Any) -> Any:
    """`value` with non-finite numbers as objects: JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if isinstance(value, Mapping):
        return {str(key): _standard(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(item) for item in value]
    return value


def _restored(value: dict[str, Any]) -> Any:
    return float(value["number"]) if set(value) == {"number"} else value
