"""Which tests go to the same process where several run them (pytest-xdist), and which come first.

A file's tests stay together: they share what its fixtures made. Files that share a server of the whole session stay
together too. What takes longest comes first, so that the processes end at about the same time.
"""

from __future__ import annotations

import pytest

GROUPS = {
    "vllm": (
        "tests/rollout/test_server_updates.py",
        "tests/rollout/test_server_generation.py",
        "tests/rollout/test_openai.py",
        "tests/e2e/test_server.py",
        "tests/e2e/test_multi_turn.py",
    ),
    "backends": ("tests/training/test_backends.py", "tests/training/test_families.py"),
}
"""Files that share what a session has one of: a vLLM server, the workers of `tests/training/conftest.py`."""
SHORT_S = 3.0
SECONDS: dict[str, float] = {
    "tests/resume/test_exact_resume.py": 60,
    "tests/e2e/test_embedded.py": 30,
    "tests/rewards/test_reward_pool.py": 60,
}
"""What the tests of a file take where it is longer than SHORT_S; roughly, on two quiet cores."""

_GROUP_OF = {file: name for name, files in GROUPS.items() for file in files}


def scope_of(nodeid: str) -> str:
    """The group of a test's file, or the file."""
    file = nodeid.partition("::")[0]
    return _GROUP_OF.get(file, file)


def put_in_order(items: list[pytest.Item]) -> None:
    """The longest groups and files first."""
    seconds: dict[str, float] = {}
    for file, own in SECONDS.items():
        seconds[scope_of(file)] = seconds.get(scope_of(file), 0) + own
    items.sort(key=lambda item: -seconds.get(scope_of(item.nodeid), SHORT_S))
