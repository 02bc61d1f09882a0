"""What plugins derive from and register for rollouts of several turns, and the loop over the turns.

A scheduler drives one trajectory: it asks the model through `infer_engine.infer_async`, and decides what comes next.
The engine that it is handed keeps the tokens (`swift_r1.rollout.schedulers`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from swift_r1.plugins.protocol import (
    ChatCompletionResponseChoice,
    InferRequest,
    Messages,
    RolloutInferRequest,
    RolloutOutput,
)


class RolloutScheduler:
    """Drives one trajectory. Override `run`; one object serves all trajectories, so keep no state of one in it.

    Args:
        infer_engine: has `async infer_async(infer_request, request_config) -> ChatCompletionResponse`.
        max_turns: `--max_turns`; None for no limit.
        tokenizer: the model's, by keyword.
    """

    def __init__(
        self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        self.infer_engine = infer_engine
        self.max_turns = max_turns
        self.tokenizer: Any = kwargs.get("tokenizer")

    @property
    def engine(self) -> Any:
        """`infer_engine` under ms-swift's other name."""
        return self.infer_engine

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
        """Returns the log-probs of a turn's tokens; ms-swift's schedulers use this name."""
        return [token["logprob"] for token in (response_choice.logprobs or {}).get("content", ())]

    async def run(
        self, infer_request: RolloutInferRequest, request_config: Any, **kwargs: Any
    ) -> RolloutOutput:
        """Returns one whole trajectory, with an `infer_async` for each turn. What it raises ends the run."""
        raise NotImplementedError(f"{type(self).__name__} does not override run")


class MultiTurnScheduler(RolloutScheduler):
    """Several turns: the model speaks, `check_finished` decides, `step` prepares the next turn."""

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Called before the first turn, with one request; it may change its messages."""

    async def on_turn_end(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> dict[str, Any]:
        """Called after each turn: gives `rollout_infos` to keep, and `done` to decide in `check_finished`'s place."""
        return {}

    async def run(
        self, infer_request: RolloutInferRequest, request_config: Any, **kwargs: Any
    ) -> RolloutOutput:
        """Turn after turn until `check_finished` says so, `max_turns` is reached or no more tokens fit.

        `step` may give, besides `infer_request`, `response_token_ids` and `response_loss_mask` (its tokens where
        it changed them, and which are trained), and `rollout_infos` (collected, and given to the rewards).
        """
        request = infer_request
        infos: dict[str, Any] = {}
        ids: list[list[int]] = []
        masks: list[list[int]] = []
        await self.on_trajectory_start([request])
        InferRequest.remove_response(request.messages)
        turn = 1
        while True:
            response = await self.infer_engine.infer_async(request, request_config, **kwargs)
            choice = response.choices[0]
            if turn > 1 and request.messages[-1] == {"role": "assistant", "content": None}:
                request.messages.pop()  # it only asked for the turn to go on
            if not choice.token_ids:
                messages = up_to_last_answer(request.messages)
                return RolloutOutput(
                    response, messages, ids, masks, infos | {"num_turns": turn - 1}
                )
            if request.messages[-1]["role"] == "assistant":  # its turn goes on
                request.messages[-1]["content"] += choice.message.content
            else:
                request.messages.append({"role": "assistant", "content": choice.message.content})
            at_end = self.max_turns is not None and turn >= self.max_turns
            told = await self.on_turn_end(request, choice, turn) or {}
            infos |= told.get("rollout_infos") or {}
            finished = (
                told["done"] if "done" in told else self.check_finished(request, choice, turn)
            )
            if at_end and not finished:
                infos["limit"] = "calls"
            if finished or at_end:
                ids.append(list(choice.token_ids or []))
                masks.append([1] * len(ids[-1]))
                return RolloutOutput(
                    response, request.messages, ids, masks, infos | {"num_turns": turn}
                )
            following = self.step(request, choice, turn)
            request = following["infer_request"]
            given = following.get("response_token_ids"), following.get("response_loss_mask")
            if any(item is not None for item in given):
                self.infer_engine.revise(*given)
            ids.append(list(given[0] or choice.token_ids or []))
            masks.append(list(given[1] or [1] * len(ids[-1])))
            infos |= following.get("rollout_infos") or {}
            turn += 1

    def check_finished(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> bool:
        """Returns whether the trajectory ends: the answer was cut off, or this was turn `max_turns`."""
        if response_choice.finish_reason == "length":
            return True
        return self.max_turns is not None and current_turn >= self.max_turns

    def step(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> dict[str, Any]:
        """Returns the next turn's request, as `{"infer_request": ...}`. Subclasses override it."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither step nor run")


def up_to_last_answer(messages: Messages) -> Messages:
    """Without what was asked after the model's last turn and got no answer."""
    end = max(
        (place for place, message in enumerate(messages, 1) if message["role"] == "assistant"),
        default=0,
    )
    return messages[:end]


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
    async def close(self) -> None: ...


class ContextManager(ABC):
    """Edits the history before each turn of an environment; it may only add to its end."""

    def __init__(self, ctx_config: Any) -> None:
        self.ctx_config = ctx_config

    @abstractmethod
    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        """Returns the history that the model sees."""


multi_turns: dict[str, Callable[..., Any]] = {}
"""Name for `--multi_turn_scheduler` -> class. Plugins write into it."""
envs: dict[str, Callable[..., Any]] = {}
"""Name for `--gym_env`, or the key `name` of a row's column `env_config` -> class, called with that column."""
context_managers: dict[str, Callable[..., Any]] = {}
"""Name for `--context_manager`, or the key `name` of a row's column `ctx_config` -> class, called with that column."""


class GymScheduler(RolloutScheduler):
    """Plays one episode of an environment (`--use_gym_env`); the reward `gym_reward` is the episode's total.

    A row's columns `env_config` and `ctx_config` (dicts) are handed to the environment and the context manager; their
    key `name` chooses another one than `--gym_env` and `--context_manager`.
    """

    def __init__(
        self,
        *args: Any,
        gym_env: str | None = None,
        context_manager: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.gym_env = gym_env
        self.context_manager = context_manager

    async def run(
        self, infer_request: RolloutInferRequest, request_config: Any, **kwargs: Any
    ) -> RolloutOutput:
        """Returns the episode: the environment's observations are the user's messages."""
        columns = infer_request.data_dict
        env_config = columns.get("env_config") or {}
        config = columns.get("ctx_config") or {}
        env = _made(envs, "environment", env_config, self.gym_env, "--gym_env")
        manager = None
        if self.context_manager or config.get("name"):
            manager = _made(
                context_managers,
                "context manager",
                config,
                self.context_manager,
                "--context_manager",
            )
        try:
            return await self._episode(env, manager, infer_request, request_config)
        finally:
            await env.close()

    async def _episode(
        self, env: Any, manager: Any, request: RolloutInferRequest, config: Any
    ) -> RolloutOutput:
        observation, info, system = await env.reset(request)
        messages: Messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": observation})
        rewards: list[float] = []
        infos = [info]
        while True:
            if manager is not None:
                messages = manager.manage_context(messages, request.uuid)
            request.messages = messages
            response = await self.infer_engine.infer_async(request, config)
            choice = response.choices[0]
            # no room: the environment gets no action that the model did not take
            if not choice.token_ids:
                messages = up_to_last_answer(messages)
                over = True
            else:
                messages.append({"role": "assistant", "content": choice.message.content})
                observation, reward, over, info = await env.step(deepcopy(messages))
                rewards.append(float(reward))
                infos.append(info)
            turns = len(rewards)
            if over or (self.max_turns is not None and turns >= self.max_turns):
                notes: dict[str, Any] = {
                    "num_turns": turns,
                    "gym_done": over,
                    "total_reward": sum(rewards),
                }
                notes |= {"step_rewards": rewards, "trajectory_info": infos}
                if not over:
                    notes["limit"] = "calls"
                return RolloutOutput(response, messages, rollout_infos=notes)
            messages.append({"role": "user", "content": observation})


def _made(
    registry: dict[str, Callable[..., Any]], what: str, config: Any, default: str | None, flag: str
) -> Any:
    name = config.get("name", default)
    if name not in registry:
        known = ", ".join(sorted(registry)) or "none"
        raise KeyError(
            f"there is no {what} {name!r} ({flag}, or the row's config); registered are: {known}"
        )
    return registry[name](config)


GYMScheduler = GymScheduler  # ms-swift's spelling
multi_turns["gym_scheduler"] = GymScheduler
