"""What plugins derive from and register for rollouts of several turns.

This version generates one turn. The classes and registries are here so that files with schedulers and environments
load, and `swift plugins` and `swift check` list them; `--multi_turn_scheduler` is refused as a flag we lack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from swift_r1.plugins.protocol import ChatCompletionResponseChoice, Messages, RolloutInferRequest
from swift_r1.plugins.stand_ins import NotHere


class RolloutScheduler:
    """Drives one trajectory. Override `run`."""

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        self.infer_engine = infer_engine
        self.max_turns = max_turns
        self.tokenizer = kwargs.get("tokenizer")

    async def run(self, infer_request: RolloutInferRequest, request_config: Any, **kwargs: Any) -> Any:
        """Generates the trajectory of a request.

        Raises:
            NotHere: always, where a subclass does not override it.
        """
        raise NotHere("rollouts of several turns are not there yet in this version: train with one turn")


class MultiTurnScheduler(RolloutScheduler):
    """Several turns: the model speaks, `check_finished` decides, `step` prepares the next turn."""

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the trajectory ends: the answer was cut off, or this was turn `max_turns`."""
        if response_choice.finish_reason == "length":
            return True
        return self.max_turns is not None and current_turn >= self.max_turns

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """The next turn's request, as `{"infer_request": ...}`. Subclasses override it."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither step nor run")


class Env(ABC):
    """A gym-style environment: `reset` gives the first observation, `step` takes the model's turn."""

    def __init__(self, env_config: Any) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Observation, info and system message of a new episode."""

    @abstractmethod
    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Next observation, reward, whether the episode is over, and info."""

    @abstractmethod
    async def close(self) -> None:
        """Frees what the episode holds."""


class ContextManager(ABC):
    """Edits the history before each turn of an environment."""

    def __init__(self, ctx_config: Any) -> None:
        self.ctx_config = ctx_config

    @abstractmethod
    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        """The history that the model gets to see."""


multi_turns: dict[str, Callable[..., Any]] = {}
envs: dict[str, Callable[..., Any]] = {}
context_managers: dict[str, Callable[..., Any]] = {}
