"""Rewards: the classes that plugins derive from, and everything that calls them. No torch in here."""

from swift_r1.rewards import builtin, code, judge, remote  # noqa: F401  they register their rewards
from swift_r1.rewards.orm import ORM, AsyncORM, orms

__all__ = ["ORM", "AsyncORM", "orms"]
