"""The base classes of rewards and their registry, with ms-swift's names and call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ORM:
    """A reward: called with completions, it returns one value for each.

    The call gets `completions` first, then as keywords every dataset column and `messages`, `prompt_id`,
    `request_id`, `finish_reason`, `is_truncated`, `response_token_ids`, `dataset` (each a list as long as
    `completions`), and `trainer_state` (an object with `global_step` and `max_steps`). A parameter without a
    default is a column that the reward needs. The completions are whole groups: all completions of a prompt, in order.

    None means "no opinion" and never counts as 0.
    """

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        raise NotImplementedError


class AsyncORM:
    """A reward whose call is a coroutine, for work that waits on a network; else like `ORM`."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        raise NotImplementedError


# Name for `--reward_funcs` -> class, or plain function, or ready object. Plugins write into it.
orms: dict[str, Callable[..., Any]] = {}

from swift_r1.rewards import builtin, remote, verifiable  # noqa: E402, F401  they register themselves; both need ORM
