"""The flags of `swift demo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from swift_r1.flags.fields import flag
from swift_r1.flags.parser import Command


@dataclass(frozen=True, kw_only=True)
class DemoArguments(Command):
    """Demo."""

    command: ClassVar[str] = "demo"
    seed: int = flag(0, "of the model, the warm start and the run", at_least=0)
    output_dir: str = flag("output/countdown_demo", "a folder with the time as its name is made in it")
    server: bool = flag(False, "rollouts from vLLM over HTTP, ZeRO-3 on two processes")
    algorithm: str = flag("grpo", "what trains", choices=("grpo", "ppo"))
    warm_start: str | None = flag(None, "folder of a model that has been warm-started, to compare on")
    steps: int | None = flag(None, "optimizer steps (default: 48 of GRPO, 96 of PPO)", at_least=1)
    warm_start_steps: int | None = flag(None, "steps of the supervised phase (default: 880)", at_least=1)
