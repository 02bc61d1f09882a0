"""MLflow as a tracker.

    swift rlhf --external_plugins plugin.py plugins/mlflow_tracker.py --report_to mlflow ...

A run is kept in its folder, in mlflow/, or where MLFLOW_TRACKING_URI says, in the experiment MLFLOW_EXPERIMENT_NAME. To
look at it: MLFLOW_BACKEND_STORE_URI=sqlite:///RUN/mlflow/mlflow.db mlflow ui
"""

import logging
import os
import re
import time
from importlib import import_module
from importlib.util import find_spec

from swift_r1 import trackers

if find_spec("mlflow") is None:
    raise ImportError("mlflow is not installed: pip install mlflow")
logger = logging.getLogger("swift_r1.mlflow")
COLUMNS = ("step", "prompt", "completion", "reward", "advantage")


class MLflow:
    """A server that fails during the run costs what was to be sent, and a warning."""

    def __init__(self, flags, run_dir, config):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read by the import
        self.entities = import_module("mlflow.entities")
        self.error = import_module("mlflow.exceptions").MlflowException
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        files = None
        if not uri:
            folder = run_dir.absolute() / "mlflow"
            folder.mkdir(exist_ok=True)
            uri = f"sqlite:///{folder / 'mlflow.db'}"
            files = (folder / "artifacts").as_uri()
        self.client = import_module("mlflow").MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "swift-r1")
        found = self.client.get_experiment_by_name(name)
        number = (
            self.client.create_experiment(name, files) if found is None else found.experiment_id
        )
        self.run = self.client.create_run(
            number, run_name=flags.run_name or run_dir.name
        ).info.run_id
        params = [self.entities.Param(key, str(value)[:500]) for key, value in config.items()]
        for first in range(0, len(params), 100):  # at most, in a batch
            self.client.log_batch(self.run, params=params[first : first + 100])

    def log(self, metrics, step):
        now = int(time.time() * 1000)
        found = [  # MLflow refuses names such as avg@4
            self.entities.Metric(re.sub(r"[^\w\-. :/]", "_", name), float(value), now, step)
            for name, value in metrics.items()
        ]
        self.send(self.client.log_batch, self.run, found)

    def log_completions(self, rows, step):
        table = {name: [row[name] for row in rows] for name in COLUMNS}
        self.send(self.client.log_table, self.run, table, f"completions/step-{step:06}.json")

    def close(self):
        self.send(self.client.set_terminated, self.run)

    def send(self, work, *arguments):
        try:
            work(*arguments)
        except (self.error, OSError) as error:  # what stores artifacts raises the latter
            logger.warning("mlflow: %s", error)


trackers["mlflow"] = MLflow
