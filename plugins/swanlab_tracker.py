"""SwanLab as a tracker.

    swift rlhf --external_plugins plugin.py plugins/swanlab_tracker.py --report_to swanlab ...

A run goes to the cloud where there is a key (SWANLAB_API_KEY, or a login), else it is kept in its folder; it never asks.
SWANLAB_PROJ_NAME, SWANLAB_WORKSPACE, SWANLAB_EXP_NAME and SWANLAB_MODE say where and how.
"""

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from swift_r1 import trackers

if find_spec("swanlab") is None:
    raise ImportError("swanlab is not installed: pip install swanlab")
logger = logging.getLogger("swift_r1.swanlab")


class SwanLab:
    def __init__(self, flags, run_dir, config):
        self.swanlab = import_module("swanlab")
        has_key = (
            "SWANLAB_API_KEY" in os.environ or Path("~/.swanlab/.netrc").expanduser().is_file()
        )
        mode = os.environ.get("SWANLAB_MODE") or ("cloud" if has_key else "local")
        if mode == "cloud" and not has_key:
            logger.warning("swanlab has no key (SWANLAB_API_KEY): this run is kept in %s", run_dir)
            mode = "local"
        self.swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", "swift-r1"),
            workspace=os.environ.get("SWANLAB_WORKSPACE"),
            experiment_name=os.environ.get("SWANLAB_EXP_NAME") or flags.run_name or run_dir.name,
            config=dict(config),
            logdir=str(run_dir / "swanlab"),
            mode=mode,
        )

    def log(self, metrics, step):
        self.swanlab.log(dict(metrics), step=step)

    def log_completions(self, rows, step):
        texts = [
            self.swanlab.Text(f"{row['prompt']}\n{row['completion']}\nreward {row['reward']}")
            for row in rows
        ]
        self.swanlab.log({"completions": texts}, step=step)

    def close(self):
        self.swanlab.finish()


trackers["swanlab"] = SwanLab
