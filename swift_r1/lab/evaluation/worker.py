"""`python -m swift_r1.lab.evaluation.worker ARGS_JSON`: the process of `swift eval`.

Kept light at import: the reward workers, started by spawn, import this module again.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from swift_r1.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_TERMINATED, SwiftError
from swift_r1.runtime.libraries import large_imports
from swift_r1.runtime.processes import leave, say


class _Terminated(BaseException):
    """SIGTERM arrived."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code. Errors that a user can cause are one line each."""
    signal.signal(signal.SIGTERM, _terminated)
    content: dict[str, Any] = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        with large_imports():
            from swift_r1.flags.evaluation import EvalArguments
            from swift_r1.lab.evaluation.run import run

        return run(EvalArguments.from_dict(content["args"]), content["command"])
    except SwiftError as error:
        for line in str(error).splitlines():
            say(line, "eval")
        return error.exit_code
    except (KeyboardInterrupt, _Terminated) as stop:
        say("interrupted; the same command continues from here", "eval")
        return EXIT_INTERRUPTED if isinstance(stop, KeyboardInterrupt) else EXIT_TERMINATED
    except OSError as error:
        # a write that fails names no file
        place = error.filename or content["args"].get("output_dir") or ""
        say(f"{error.strerror or error}: {place}".rstrip(": "), "eval")
        return EXIT_RUN_FAILED
    except Exception:  # noqa: BLE001  a defect of ours
        traceback.print_exc()
        return EXIT_RUN_FAILED


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise _Terminated


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
