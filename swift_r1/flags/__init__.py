"""The command line's flags as dataclasses, their parsing and checking, and the plan they resolve to."""

from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.plan import Plan, make_plan
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.run import RunFlags
from swift_r1.flags.server import RolloutArguments
from swift_r1.flags.world import World

__all__ = [
    "Plan",
    "RlhfArguments",
    "RolloutArguments",
    "RunFlags",
    "World",
    "make_plan",
    "parse_arguments",
]
