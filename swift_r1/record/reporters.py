"""Trackers that metrics and completions are sent to: TensorBoard, Weights & Biases, Trackio, and those of plugins.

They do not stand on `accelerate.tracking`, whose trackers raise RuntimeError in a process without accelerate's
`PartialState`, and have a table for wandb alone.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from swift_r1.errors import UsageError, no_such

logger = logging.getLogger(__name__)

_COLUMNS = ("step", "prompt", "completion", "reward", "advantage")


@dataclass(frozen=True)
class TrackerFlags:
    """The flags of the trackers."""

    report_to: Sequence[str] = ()
    run_name: str | None = None
    logging_dir: str | None = None
    wandb_project: str | None = None
    wandb_log_unique_prompts: bool = False
    project: str | None = None
    trackio_space_id: str | None = None


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Returns the table of completions that trackers show, `[rows][_COLUMNS]`."""
    return [[row[name] for name in _COLUMNS] for row in rows]


class Reporter(Protocol):
    """A tracker of one run. What its methods raise ends the run."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes its files into the run folder, or into `--logging_dir`."""

    def __init__(self, flags: TrackerFlags, run_dir: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(flags.logging_dir or str(run_dir / "tensorboard"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for number, row in enumerate(rows):
            text = f"reward {row['reward']}\n\n{row['prompt']}\n\n{row['completion']}"
            # Indented text is shown as it is by TensorBoard's Markdown.
            self._writer.add_text(
                f"completions/{number}", "    " + text.replace("\n", "\n    "), step
            )

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Online where there is a key, else offline with a warning; it never prompts."""

    def __init__(self, flags: TrackerFlags, run_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb

        netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
        has_key = os.environ.get("WANDB_API_KEY") or (
            netrc.is_file() and "wandb" in netrc.read_text(errors="replace")
        )
        if "WANDB_MODE" not in os.environ and not has_key:
            logger.warning(
                "wandb has no API key: this run is kept offline in %s", run_dir / "wandb"
            )
            os.environ["WANDB_MODE"] = "offline"
        self._wandb = wandb
        self._unique = flags.wandb_log_unique_prompts
        self._run = wandb.init(
            project=flags.wandb_project or os.environ.get("WANDB_PROJECT", "swift-r1"),
            name=flags.run_name or run_dir.name,
            dir=str(run_dir),
            config=dict(config),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, x_disable_stats=True
            ),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if self._unique:
            rows = list({row["prompt"]: row for row in reversed(rows)}.values())[::-1]
        self._run.log({"completions": self._wandb.Table(list(_COLUMNS), _cells(rows))}, step=step)

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # ends wandb's own process


class Trackio:
    """Writes to the run folder, or with a login to Hugging Face in the Space that the flags name; it never prompts."""

    def __init__(self, flags: TrackerFlags, run_dir: Path, config: Mapping[str, Any]) -> None:
        space = flags.trackio_space_id or os.environ.get("TRACKIO_SPACE_ID")
        if space and importlib.import_module("huggingface_hub").get_token() is None:
            logger.warning(
                "trackio has no login to Hugging Face: this run is kept in %s", run_dir / "trackio"
            )
            space = None
        if not space:
            os.environ.pop("TRACKIO_SPACE_ID", None)
            if not os.environ.get("TRACKIO_SERVER_URL"):
                os.environ.setdefault("TRACKIO_DIR", str(run_dir / "trackio"))  # read by the import
        self._trackio = importlib.import_module("trackio")
        self._run = self._trackio.init(
            project=flags.project or "swift-r1",
            name=flags.run_name or run_dir.name,
            space_id=space,
            config=dict(config),
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({name: value for name, value in metrics.items() if name != "step"}, step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        table = self._trackio.Table(columns=list(_COLUMNS), data=_cells(rows))
        self._run.log({"completions": table}, step=step)

    def close(self) -> None:
        self._trackio.finish()


trackers: dict[str, Callable[[TrackerFlags, Path, Mapping[str, Any]], Reporter]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
"""Name for `--report_to` -> what makes a reporter of the flags, the run's folder and all flags. Plugins write into it."""
BUILT_IN = frozenset(trackers)
# Trackers of other trainers, whose scripts name them: a plugin that comes with the package has each.
_PLUGINS = {name: f"plugins/{name}_tracker.py" for name in ("swanlab", "mlflow")}


def chosen_trackers(names: Sequence[str]) -> list[str]:
    """Returns the trackers that `--report_to` names: none, or with `all` those of the package that are installed."""
    return (
        [name for name in sorted(BUILT_IN) if _is_there(name)]
        if "all" in names
        else [n for n in names if n != "none"]
    )


def _is_there(name: str) -> bool:
    """Returns whether a tracker can be used; a package's has its name."""
    return find_spec(name) is not None if name in BUILT_IN else name in trackers


def _how_to_get(name: str) -> str:
    if name in BUILT_IN:
        return f"{name} is not installed: pip install {name}"
    return f"{name} comes from a plugin: --external_plugins {_PLUGINS[name]}"


def tracker_faults(names: Sequence[str]) -> list[str]:
    """Returns why a run would be in no tracker; where one of several is there, the others are only warned about. Plugins
    are loaded already."""
    faults = [
        f"--report_to: {no_such('tracker', name, trackers, '; others come from --external_plugins')}"
        for name in names
        if name not in trackers and name not in _PLUGINS
    ]
    if not names or faults or any(map(_is_there, names)):
        return faults
    ways = "; ".join(map(_how_to_get, names))
    return [f"--report_to: {ways}; logging.jsonl in the run folder has it all too"]


def open_reporters(flags: TrackerFlags, run_dir: Path, config: Mapping[str, Any]) -> list[Reporter]:
    """Opens the trackers of `--report_to`, with a warning about those that are not there. Raises UsageError as
    `tracker_faults`."""
    faults = tracker_faults(flags.report_to)
    if faults:
        raise UsageError(*faults)
    there = [name for name in flags.report_to if _is_there(name)]
    for name in flags.report_to:
        if name not in there:
            logger.warning("--report_to: nothing is sent to %s: %s", name, _how_to_get(name))
    return [trackers[name](flags, run_dir, config) for name in there]
