"""Two hosts that train and one that generates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import Host, made_hosts


@pytest.fixture(scope="session")
def hosts() -> Iterator[list[Host]]:
    with made_hosts(3) as made:
        yield made
