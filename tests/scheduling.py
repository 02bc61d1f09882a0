"""Which tests go to the same process where several run them (pytest-xdist), and which come first.

A file's tests stay together: they share what its fixtures made. Files that share a server of the whole session stay
together too. What takes longest comes first, so that the processes end at about the same time.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

GROUPS: dict[str, tuple[str, ...]] = {}
"""Files by the name of their group; the groups, and the files in them, in the order in which they are to begin."""


class Groups(LoadScopeScheduling):
    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._group_of = {file: name for name, files in GROUPS.items() for file in files}
        self._first = {name: number for number, name in enumerate(GROUPS)}

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return self._group_of.get(file, file)
