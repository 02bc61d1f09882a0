"""Which tests go to the same process where several run them (pytest-xdist), and which come first.

A file's tests stay together: they share what its fixtures made. Files that share a server of the whole session stay
together too. What takes longest comes first, so that the processes end at about the same time.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

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
"""Files that share a session's server or workers, in the order in which the groups are to begin."""
LONGEST = (
    "tests/resume/test_exact_resume.py",
    "tests/e2e/test_embedded.py",
    "tests/rewards/test_reward_pool.py",
)
"""Of the files that are in no group, those that begin first."""

_GROUP_OF = {file: name for name, files in GROUPS.items() for file in files}
_PLACES = {name: place for place, name in enumerate((*GROUPS, *LONGEST))}


def scope_of(nodeid: str) -> str:
    """The group of a test's file, or the file."""
    file = nodeid.partition("::")[0]
    return _GROUP_OF.get(file, file)


def put_in_order(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _PLACES.get(scope_of(item.nodeid), len(_PLACES)))


class Groups(LoadScopeScheduling):
    """Gives a process that has nothing left the next scope, in the order of the tests."""

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
