"""Registries as they were, and plugins that load anew in each test."""

from collections.abc import Iterator

import pytest

from swift_r1.data import registry
from swift_r1.plugins import loader, protocol, rollouts
from swift_r1.rewards import orms


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Gives every registry back as it was."""
    everything = (
        *(orms, registry.datasets, registry._origins, loader._LOADED, protocol.prms, protocol.rm_plugins),
        *(rollouts.multi_turns, rollouts.envs, rollouts.context_managers),
    )
    before = [dict(one) for one in everything]
    yield
    for one, content in zip(everything, before, strict=True):
        one.clear()
        one.update(content)
