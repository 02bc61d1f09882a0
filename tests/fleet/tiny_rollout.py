"""`python -m tests.fleet.tiny_rollout FLAGS...`: `swift rollout` with the engine of `tests/tiny_server.py`."""

from __future__ import annotations

import json
import os
import sys

from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.server import RolloutArguments
from swift_r1.runtime.processes import leave
from tests.tiny_server import main

if __name__ == "__main__":
    args = parse_arguments(RolloutArguments, sys.argv[1:])
    given = {"host": args.host, "api_key": os.environ["SWIFT_API_KEY"], "update_timeout": 20}
    leave(main(args.model, args.port, json.dumps(given)))
