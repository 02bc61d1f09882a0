"""What a run needs to go on beside the model: numbers and names in `state/run.json`, and the random generators."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from swift_r1.errors import UsageError
from swift_r1.record.metrics import standard_json
from swift_r1.runtime.files import read_text
from swift_r1.training.checkpoint.folder import sync

STATE = "state"
RUN_JSON = "run.json"
LOGS = ("logging.jsonl", "completions.jsonl", "eval_completions.jsonl", "invalid_rewards.jsonl")
"""Files of a run folder that only grow: a checkpoint knows how long they were."""

_FORMAT = 4
"""Rises where a field, or what its numbers mean, changes."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a resumed run must have too: every flag, and a hash of the training rows in order. How many ranks computed
    it, and the threads of each, decide the order of sums."""

    args: Mapping[str, Any]
    world_size: int
    dataset: str
    threads: int


@dataclass(frozen=True, slots=True)
class PromptState:
    """How far a run is in the prompts of a task: those that were given out; their hash where the data is streamed; and
    the state of `Choices`, empty with `--prompt_sampler uniform`."""

    taken: int = 0
    digest: str = ""
    choices: str = ""


@dataclass(frozen=True, slots=True)
class RunState:
    """A run after an optimizer step."""

    # step, rounds: optimizer steps taken and rounds begun; completion seeds and request ids count by rounds
    step: int
    rounds: int
    prompts: Mapping[str, PromptState]  # by task
    # published, weight_version: the step and the version of the weights that generate
    published: int
    weight_version: int
    run_id: str  # the beginning of request ids
    skipped_in_a_row: int  # steps without an update since the last with one
    outcome: Mapping[str, Any]  # of `summary.json`
    window: Mapping[str, Sequence[float]]  # metrics since the last line of `logging.jsonl`
    rewards: Mapping[str, Any]  # what the monitor of invalid rewards remembers
    # `done`, `metrics` and `seconds` of the open round; None between rounds
    round: Mapping[str, Any] | None
    logs: Mapping[str, int]  # bytes of each file of `LOGS`
    fingerprint: Fingerprint
    evaluates: bool = False  # the evaluation of this step is still to come
    movement: Mapping[str, Any] = field(default_factory=dict)  # of `Movement`

    def write(self, folder: Path) -> None:
        content = standard_json(asdict(self), lambda value: {"number": str(value)})
        text = json.dumps({"format": _FORMAT} | content, indent=1, allow_nan=False)
        (folder / RUN_JSON).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, checkpoint: Path) -> RunState:
        """Raises UsageError where a checkpoint has no state, or one of another version."""
        path = checkpoint / STATE / RUN_JSON
        try:
            content = json.loads(read_text(path), object_hook=_restored)
        except FileNotFoundError:
            raise UsageError(
                f"{checkpoint} cannot be resumed from: it was saved without state/ (--save_only_model true)"
            ) from None
        known = {item.name for item in fields(cls)}
        if content.pop("format", None) != _FORMAT or content.keys() != known:
            raise UsageError(
                f"{checkpoint} cannot be resumed from: its state/ is of another version of swift-r1; "
                "--resume_only_model true begins a new run with its weights"
            )
        fingerprint = Fingerprint(**content["fingerprint"])
        prompts = {name: PromptState(**own) for name, own in content["prompts"].items()}
        return cls(**content | {"fingerprint": fingerprint, "prompts": prompts})


def log_sizes(run_dir: Path) -> dict[str, int]:
    """Bytes of each log; all of them are on the disk when this returns."""
    for path in (run_dir / name for name in LOGS):
        if path.exists():
            sync(path)
    return {name: _size(run_dir / name) for name in LOGS}


def truncate_logs(run_dir: Path, sizes: Mapping[str, int]) -> None:
    """Cuts each log back to its size then; what came later is done again. Raises UsageError: a log is shorter than
    that, so that it cannot be continued."""
    short = [name for name, size in sizes.items() if _size(run_dir / name) < size]
    if short:
        raise UsageError(
            f"{run_dir} cannot be resumed: {', '.join(short)} is shorter than it was at the checkpoint"
        )
    for name in LOGS:
        path = run_dir / name
        if path.exists():
            os.truncate(path, sizes.get(name, 0))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _restored(value: dict[str, Any]) -> Any:
    return float(value["number"]) if set(value) == {"number"} else value


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's generators, for plugin code: completions and prompts have seeds of their own."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Tensor]:
    """The states of Python's, numpy's and torch's generators, as 1-D tensors by name."""
    version, numbers, gauss = random.getstate()
    legacy: Any = numpy.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = legacy
    assert version == 3 and kind == "MT19937"
    state = {
        "python": torch.tensor(numbers, dtype=torch.long),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.long),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Restores what `rng_state` gave; a GPU's where there is one here and was one then."""
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    numpy.random.set_state(
        ("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached)
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
