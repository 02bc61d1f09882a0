"""`python -m swift_r1.cli.rank ARGS_JSON`: one training process, started by `swift rlhf`.

Kept light at import: the reward workers, started by spawn, import this module again.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_r1.errors import EXIT_LOST_PEER, EXIT_RUN_FAILED, EXIT_USAGE, SwiftError
from swift_r1.runtime.libraries import large_imports
from swift_r1.runtime.processes import end_with_parent, leave
from swift_r1.runtime.stopping import StopRequest
from swift_r1.runtime.visible import harmless


def main(argv: Sequence[str]) -> int:
    """Runs the process; returns its exit code. Errors that a user can cause are one line."""
    if len(argv) != 1:
        print("usage: python -m swift_r1.cli.rank ARGS_JSON", file=sys.stderr)
        return EXIT_USAGE
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)  # a launcher killed by SIGKILL leaves no rank behind
    content: dict[str, Any] = {}
    stop = StopRequest().listen()
    try:
        with large_imports():
            from swift_r1.flags.forecast import ForecastArguments, arguments_of
            from swift_r1.lab.diagnosis.watch import LiveDiagnosis
            from swift_r1.lab.report.card import model_card
            from swift_r1.record.recorded import Replay
            from swift_r1.training.run import run
            from swift_r1.training.setup import Start

        content = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
        checkpoint = content["resumed_from"]
        start = Start(
            run_dir=Path(content["run_dir"]),
            checkpoint=Path(checkpoint) if checkpoint else None,
            dataset=content["dataset_hash"],
            prepared=content["prepared_data"],
            own_dtype=content["own_dtype"],
            time=content["started"],
            replay=Replay(**content["replay"]) if content.get("replay") else None,
            model_card=model_card,
            diagnosis=LiveDiagnosis,
        )
        args = arguments_of(content)
        return run(args.tried if isinstance(args, ForecastArguments) else args, start, stop)
    except SwiftError as error:
        print(f"swift {_command(content)}: {harmless(str(error))}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # noqa: BLE001  the last line of defence: reported whole, and a clear exit code
        code = known_end(error, content)
        if code:
            return code
        traceback.print_exc()
        return EXIT_RUN_FAILED


def known_end(error: Exception, content: Mapping[str, Any]) -> int:
    """Says in a line what ended this rank, where it is one of the usual accidents; 0 where it is not. `content` is that
    of args.json."""
    from swift_r1.runtime.ranks import lost_peer, peer_fault
    from swift_r1.training.memory import out_of_memory

    command = _command(content)
    rank = os.environ.get("RANK", "0")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        print(
            f"swift {command}: {error.strerror}: {error.filename or content.get('run_dir', '')}",
            file=sys.stderr,
        )
        return EXIT_RUN_FAILED
    what = out_of_memory(error)
    if what:
        # What the failed step held can go: saying what would help needs some memory too.
        error.__traceback__ = None
        print(
            f"swift {command}: rank {rank} is out of memory: {what}{_advice(content)}",
            file=sys.stderr,
        )
        return EXIT_RUN_FAILED
    if lost_peer(error):
        print(
            f"swift {command}: rank {rank} lost another rank: {peer_fault(error)}", file=sys.stderr
        )
        return EXIT_LOST_PEER
    return 0


def _command(content: Mapping[str, Any]) -> str:
    """Returns the command that the user gave, `rlhf` or `replay`."""
    return str(content.get("command", ("swift", "rlhf"))[1])


def _advice(content: Mapping[str, Any]) -> str:
    from swift_r1.flags import World
    from swift_r1.launch.environment import card_here
    from swift_r1.training.memory import advice_for

    world, _ = World.from_environment(os.environ)
    try:
        return (
            f"; {advice_for(content, world, card_here(os.environ, world.nproc_per_node))}"
            if content
            else ""
        )
    except MemoryError:
        return ""


if __name__ == "__main__":
    status = main(sys.argv[1:])
    atexit._run_exitfuncs()  # a plugin may have registered some
    leave(status)
