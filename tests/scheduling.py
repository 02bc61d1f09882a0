"""Which tests go to the same process where several run them (pytest-xdist), and which come first.

A file's tests stay together: they share what its fixtures made. Files that share a server of the whole session stay
together too. What takes longest comes first, so that the processes end at about the same time: `tests/durations.json` has
the seconds of each test that takes one or more, as pytest-split stores them (`make durations`).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

GROUPS = {
    "vllm": (
        "tests/sync/test_server_updates.py",
        "tests/serving/test_server_generation.py",
        "tests/serving/test_openai.py",
        "tests/e2e/test_server.py",
        "tests/e2e/test_multi_turn.py",
    ),
    "backends": ("tests/training/test_backends.py", "tests/training/test_families.py"),
}
"""Files that share what a session has one of: a vLLM server, the workers of `tests/training/conftest.py`."""
_GROUP_OF = {file: name for name, files in GROUPS.items() for file in files}


def scope_of(nodeid: str) -> str:
    """Returns the group of a test's file, or the file."""
    file = nodeid.partition("::")[0]
    return _GROUP_OF.get(file, file)


def put_in_order(items: list[pytest.Item]) -> None:
    """Sorts the longest groups and files first."""
    durations = json.loads(Path(__file__).with_name("durations.json").read_text(encoding="utf-8"))
    seconds: Counter[str] = Counter()
    for item in items:
        seconds[scope_of(item.nodeid)] += durations.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -seconds[scope_of(item.nodeid)])
