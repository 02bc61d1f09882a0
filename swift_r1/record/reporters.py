"""Trackers that metrics and completions are sent to: TensorBoard, Weights & Biases, SwanLab, Trackio, MLflow.

They do not stand on `accelerate.tracking`, whose trackers raise RuntimeError in a process without accelerate's
`PartialState`. Of these five it has a table for wandb alone, and its MLflow passes on names such as `avg@4`, which
MLflow refuses, and every failure of the server, which would end the run.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from swift_r1.errors import UsageError, one_line

logger = logging.getLogger(__name__)

_COLUMNS = ("step", "prompt", "completion", "reward", "advantage")


@dataclass(frozen=True)
class TrackerFlags:
    """The flags of the trackers. SwanLab's key is in SWANLAB_API_KEY, which its library reads."""

    report_to: Sequence[str] = ()
    run_name: str | None = None
    logging_dir: str | None = None
    wandb_project: str | None = None
    wandb_log_unique_prompts: bool = False
    swanlab_project: str | None = None
    swanlab_workspace: str | None = None
    swanlab_exp_name: str | None = None
    swanlab_mode: str | None = None
    project: str | None = None
    trackio_space_id: str | None = None


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Returns the table of completions that trackers show, `[rows][_COLUMNS]`."""
    return [[row[name] for name in _COLUMNS] for row in rows]


class Reporter(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
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


class SwanLab:
    """Writes to the cloud where there is a key, else in the run folder; it never prompts."""

    def __init__(self, flags: TrackerFlags, run_dir: Path, config: Mapping[str, Any]) -> None:
        swanlab = importlib.import_module("swanlab")
        self._swanlab = swanlab
        has_key = (
            bool(os.environ.get("SWANLAB_API_KEY"))
            or Path.home().joinpath(".swanlab", ".netrc").is_file()
        )
        mode = (
            flags.swanlab_mode
            or os.environ.get("SWANLAB_MODE")
            or ("cloud" if has_key else "local")
        )
        if mode == "cloud" and not has_key:
            logger.warning(
                "swanlab has no key (--swanlab_token): this run is kept in %s", run_dir / "swanlab"
            )
            mode = "local"
        swanlab.init(
            project=flags.swanlab_project or os.environ.get("SWANLAB_PROJ_NAME", "swift-r1"),
            workspace=flags.swanlab_workspace,
            experiment_name=flags.swanlab_exp_name or flags.run_name or run_dir.name,
            config=dict(config),
            logdir=str(run_dir / "swanlab"),
            mode=mode,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        texts = [
            self._swanlab.Text(f"{row['prompt']}\n{row['completion']}\nreward {row['reward']}")
            for row in rows
        ]
        self._swanlab.log({"completions": texts}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


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


class MLflow:
    """Writes to the run folder, or where MLFLOW_TRACKING_URI says, in the experiment MLFLOW_EXPERIMENT_NAME. A server
    that fails during the run costs what was to be sent, and a warning."""

    def __init__(self, flags: TrackerFlags, run_dir: Path, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read by the import
        self._entities = importlib.import_module("mlflow.entities")
        self._error = importlib.import_module("mlflow.exceptions").MlflowException
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        files = None
        if not uri:
            folder = run_dir.absolute() / "mlflow"
            folder.mkdir(exist_ok=True)
            uri = f"sqlite:///{folder / 'mlflow.db'}"
            files = (folder / "artifacts").as_uri()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "swift-r1")
        self._client = client = importlib.import_module("mlflow").MlflowClient(uri)
        experiment = client.get_experiment_by_name(name)
        number = (
            client.create_experiment(name, files)
            if experiment is None
            else experiment.experiment_id
        )
        self._run: str = client.create_run(
            number, run_name=flags.run_name or run_dir.name
        ).info.run_id
        params = [self._entities.Param(key, str(value)[:500]) for key, value in config.items()]
        for first in range(0, len(params), 100):  # at most, in a batch
            self._client.log_batch(self._run, params=params[first : first + 100])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        names = {name: re.sub(r"[^\w\-. :/]", "_", name) for name in metrics}  # avg@4
        found = [
            self._entities.Metric(names[name], float(value), now, step)
            for name, value in metrics.items()
        ]
        self._send(self._client.log_batch, self._run, found)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        table = {name: [row[name] for row in rows] for name in _COLUMNS}
        self._send(self._client.log_table, self._run, table, f"completions/step-{step:06}.json")

    def close(self) -> None:
        self._send(self._client.set_terminated, self._run)

    def _send(self, work: Callable[..., object], *arguments: Any) -> None:
        try:
            work(*arguments)
        except (self._error, OSError) as error:  # what stores artifacts raises the latter
            logger.warning("mlflow: %s", one_line(error))


REPORTERS: Mapping[str, Callable[[TrackerFlags, Path, Mapping[str, Any]], Reporter]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "swanlab": SwanLab,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def chosen_trackers(names: Sequence[str]) -> list[str]:
    """Returns the trackers that `--report_to` names: none, or with `all` those that are installed."""
    return (
        [name for name in REPORTERS if is_installed(name)]
        if "all" in names
        else [n for n in names if n != "none"]
    )


def is_installed(name: str) -> bool:
    """Returns whether a tracker's package, which has its name, is installed."""
    return find_spec(name) is not None


def tracker_faults(names: Sequence[str]) -> list[str]:
    """Returns why a run would be in no tracker; where one of several is installed, the others are only warned about."""
    if not names or any(map(is_installed, names)):
        return []
    wanted = " ".join(names)
    return [
        f"--report_to {wanted}: not installed: pip install {wanted}; logging.jsonl in the run folder has it all too"
    ]


def open_reporters(flags: TrackerFlags, run_dir: Path, config: Mapping[str, Any]) -> list[Reporter]:
    """Opens the trackers of `--report_to`, with a warning about those that are not installed. Raises UsageError as
    `tracker_faults`."""
    faults = tracker_faults(flags.report_to)
    if faults:
        raise UsageError(*faults)
    for name in flags.report_to:
        if not is_installed(name):
            logger.warning(
                "--report_to %s: it is not installed, so nothing is sent there: pip install %s",
                name,
                name,
            )
    return [
        REPORTERS[name](flags, run_dir, config) for name in flags.report_to if is_installed(name)
    ]
