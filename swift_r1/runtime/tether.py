"""`python -m` of this module, with the id of its parent and the words of a command: becomes that command, which the kernel
kills when the thread that started it ends, however that ends. Linux."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from swift_r1.runtime.processes import end_with_parent, module_words


def tethered(words: Sequence[str]) -> list[str]:
    """Returns the command that starts `words` so, from this process."""
    return [sys.executable, *module_words(__name__, str(os.getpid()), *words)]


def _become(parent: int, words: list[str]) -> None:
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        return
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}")


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
