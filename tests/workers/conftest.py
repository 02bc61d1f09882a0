"""What the tests of the sandbox need of the machine."""

from __future__ import annotations

import pytest

from swift_r1.workers.sandbox.box import Sandbox, SandboxError


@pytest.fixture(scope="session")
def allows_sandbox() -> None:
    """Skips where the kernel, or the container, allows no sandbox; there `code` is refused, which is tested, too."""
    try:
        Sandbox().close()
    except SandboxError as error:
        pytest.skip(str(error))
