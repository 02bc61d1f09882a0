"""A plugin that takes for ever to load in rank 0 of a run, as a large model may; it says so by the file that
WAITING_PLUGIN names."""

import os
import sys
import time
from pathlib import Path

if "swift_r1.cli.rank" in sys.orig_argv and os.environ["RANK"] == "0":
    Path(os.environ["WAITING_PLUGIN"]).touch()
    time.sleep(1000)
