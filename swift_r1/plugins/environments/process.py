"""An environment in a process of its own, which reads its rows or tries it: what it imports, prints and replaces stays
there, and it can be killed. `python -m` of this module is that process."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any, TextIO

from swift_r1.errors import UsageError, describe
from swift_r1.plugins.environments.base import (
    EnvironmentAgent,
    Row,
    adapter,
    own_columns,
    seed_generators,
)
from swift_r1.plugins.environments.kinds import KINDS
from swift_r1.runtime.processes import end_with_parent, leave, module_words
from swift_r1.workers.confine import confine
from swift_r1.workers.killing import end_group, end_marked, end_whole
from swift_r1.workers.process import SupervisedProcess

ROWS_SECONDS = 1800.0
"""For an environment to load and give its rows; it may download them."""


def read_rows(
    spec: str, args: Mapping[str, Any], kept: Sequence[str], split: str, count: int | None
) -> Iterator[Row]:
    """Yields the environment's own rows. Raises UsageError where it has none, or fails."""
    request = {
        "do": "rows",
        "spec": spec,
        "args": args,
        "kept": kept,
        "split": split,
        "count": count,
    }
    lines, fault = _answers(request, ROWS_SECONDS)
    if fault is not None:
        raise UsageError(fault)
    yield from lines


def try_environment(
    spec: str, args: Mapping[str, Any], kept: Sequence[str], rows: int, seconds: float
) -> tuple[list[dict[str, Any]], str | None]:
    """Returns the lines of `_tried`, as far as it came within so many seconds, and what went wrong."""
    return _answers({"do": "try", "spec": spec, "args": args, "kept": kept, "rows": rows}, seconds)


def _answers(request: Mapping[str, Any], seconds: float) -> tuple[list[dict[str, Any]], str | None]:
    """Returns the lines that the process wrote, and why it did not write all of them. `kept` are the variables that it
    sees although they look like secrets (`confine`), as episodes do."""
    # Files, not pipes: what the environment has started and left would hold those open.
    mark = secrets.token_hex(8)
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, *module_words(__spec__.name)]
        # rows out of a set are in the same order in each process
        environ = {"PYTHONHASHSEED": "0", **os.environ}
        # It makes a group of its own, as all that is confined.
        process = SupervisedProcess(
            command,
            environ,
            keeps_errors=True,
            start_new_session=False,
            stdin=subprocess.PIPE,
            stdout=output,
        )
        try:
            process.communicate(json.dumps({**request, "mark": mark}).encode(), seconds)
        except subprocess.TimeoutExpired:
            pass  # it has no exit code
        finally:
            code = process.poll()
            if code is None:
                end_whole([process.pid])
                process.wait()
            end_group(process.pid)
            end_marked(mark)
        output.seek(0)
        lines = [json.loads(line) for line in output if line.endswith(b"}\n")]
    fault = next((line["fault"] for line in lines if "fault" in line), None)
    if fault is None and code != 0:
        ending = f"did not end within {seconds:g} s" if code is None else f"ended with code {code}"
        fault = f"--env {request['spec']}: its process {ending}; its last line: {process.last_line('it wrote nothing')}"
    return [line for line in lines if "fault" not in line], fault


def _tried(agent: type[EnvironmentAgent], spec: str, count: int) -> Iterator[dict[str, Any]]:
    """Yields one line with the first rows, then one for each episode that is tried on the first of them."""
    rows = list(islice(agent.rows("train", count), count))
    package = KINDS[spec.partition(":")[0]].package
    yield {"rows": rows, "version": _version(package)}
    if not rows:
        raise UsageError(f"--env {spec} has no rows")
    from swift_r1.plugins.environments.scripted import ScriptedModel

    for name, script in agent.scripts(own_columns(rows[0])).items():
        for calls_tools in (True, False):
            model = ScriptedModel(script, 0, calls_tools)
            started = time.perf_counter()
            about: dict[str, Any] = {"result": None, "error": None}
            try:
                row = {**rows[0], "prompt_id": "env:0", "episode_id": "check"}
                with model.client() as client:
                    result = asyncio.run(agent().run(client, row))
                about["result"] = (
                    dict(result) if isinstance(result, Mapping) else {"reward": result}
                )
            except UsageError:
                raise
            except Exception as error:  # noqa: BLE001  the environment's
                about["error"] = describe(error)
            has_tools = any(body.get("tools") for body in model.requests)
            yield about | {
                "script": "random calls" if has_tools and calls_tools else name,
                "seconds": time.perf_counter() - started,
                "turns": len(model.requests),
                "first": model.requests[0].get("messages", []) if model.requests else [],
                "messages": model.messages,
                "tools": model.requests[0].get("tools", []) if model.requests else [],
            }
            if not has_tools:
                break


def _version(package: str | None) -> str:
    try:
        return f"{package} {version(package)}" if package else ""
    except PackageNotFoundError:
        return package or ""


def _main(output: TextIO) -> int:
    end_with_parent(signal.SIGKILL)
    request = json.load(sys.stdin)
    confine(request["mark"], request["kept"])

    def tell(line: Mapping[str, Any]) -> None:
        output.write(json.dumps(line, default=_plain) + "\n")
        output.flush()

    try:
        agent = adapter(request["spec"], request["args"])
        seed_generators("rows")
        if request["do"] == "rows":
            for row in agent.rows(request["split"], request["count"]):
                tell(row)
        else:
            for line in _tried(agent, request["spec"], request["rows"]):
                tell(line)
    except UsageError as error:
        tell({"fault": str(error)})
    except Exception as error:  # noqa: BLE001  the environment's
        tell({"fault": f"--env {request['spec']} failed: {describe(error)}"})
    return 0


def _plain(value: Any) -> Any:
    """Returns numbers and lists of numpy as such, and other values that JSON has no form for as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


if __name__ == "__main__":
    # What an environment prints must not come between the lines.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    leave(_main(lines))  # whatever threads it has left
