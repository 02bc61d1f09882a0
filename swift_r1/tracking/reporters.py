"""Trackers that metrics and completions are sent to: TensorBoard, Weights & Biases, SwanLab."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from swift_r1.errors import UsageError

logger = logging.getLogger(__name__)

_COLUMNS = ("step", "prompt", "completion", "reward", "advantage")


class Reporter(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for number, row in enumerate(rows):
            text = f"reward {row['reward']}\n\n{row['prompt']}\n\n{row['completion']}"
            # Indented text is shown as it is by TensorBoard's Markdown.
            self._writer.add_text(f"completions/{number}", "    " + text.replace("\n", "\n    "), step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Online where there is a key, else offline with a warning; it never prompts."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        import wandb

        netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
        has_key = os.environ.get("WANDB_API_KEY") or (netrc.is_file() and "wandb" in netrc.read_text(errors="replace"))
        if "WANDB_MODE" not in os.environ and not has_key:
            logger.warning("wandb has no API key: this run is kept offline in %s", run_dir / "wandb")
            os.environ["WANDB_MODE"] = "offline"
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "swift-r1"),
            name=run_name,
            dir=str(run_dir),
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        table = self._wandb.Table(columns=list(_COLUMNS), data=[[row[name] for name in _COLUMNS] for row in rows])
        self._run.log({"completions": table}, step=step)

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # ends wandb's own process


class SwanLab:
    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        swanlab = importlib.import_module("swanlab")
        self._swanlab = swanlab
        swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", "swift-r1"),
            experiment_name=run_name,
            config=dict(config),
            logdir=str(run_dir / "swanlab"),
            mode=os.environ.get("SWANLAB_MODE") or ("cloud" if os.environ.get("SWANLAB_API_KEY") else "local"),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        texts = [self._swanlab.Text(f"{row['prompt']}\n{row['completion']}\nreward {row['reward']}") for row in rows]
        self._swanlab.log({"completions": texts}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


REPORTERS: Mapping[str, type[TensorBoard] | type[WeightsAndBiases] | type[SwanLab]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "swanlab": SwanLab,
}


def open_reporters(
    names: Sequence[str], run_dir: Path, run_name: str | None, config: Mapping[str, Any]
) -> list[Reporter]:
    """The trackers of `--report_to`; raises UsageError where a tracker's package is not installed."""
    reporters: list[Reporter] = []
    for name in names:
        if name == "none":
            continue
        try:
            reporters.append(REPORTERS[name](run_dir, run_name or run_dir.name, config))
        except ImportError as error:
            package = error.name or name
            raise UsageError(f"--report_to {name} needs the package {package}: pip install {name}") from error
    return reporters
