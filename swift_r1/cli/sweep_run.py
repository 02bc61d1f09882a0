"""`python -m swift_r1.cli.sweep_run PARENT CPUS words...`: `swift rlhf words...` on these CPUs. It ends in order when
PARENT, the process of the sweep, ends by whatever."""

from __future__ import annotations

import os
import signal
import sys

from swift_r1.cli.main import main
from swift_r1.errors import EXIT_TERMINATED
from swift_r1.runtime.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(EXIT_TERMINATED)
    os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
    sys.exit(main(["rlhf", *sys.argv[3:]]))
