"""The loop that an environment without one of its own is played in: the model speaks or calls, the environment
answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Message = dict[str, Any]
MODEL = "policy"
"""The model's name in requests; a session answers to any."""


class EnvironmentGone(Exception):
    """What plays the environment is away: no word of the environment's, and the end of the episode."""


class Chat:
    """The messages of one episode. `ended` says why the model cannot speak again, where that is so: `length` for a turn
    that was cut off, `limit` for a call after the first that was refused since the episode has used up its share."""

    def __init__(
        self,
        client: AsyncOpenAI,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        self._client = client
        self._tools = list(tools)
        self.messages: list[Message] = [dict(message) for message in messages]
        self.turns = 0
        self.ended: str | None = None

    async def turn(self) -> Message | None:
        """Returns the model's next message, which is in `messages` then; None where there is none (`ended`)."""
        from openai import APIStatusError

        more: dict[str, Any] = {"tools": self._tools} if self._tools else {}
        try:
            response = await self._client.chat.completions.create(
                model=MODEL,
                messages=self.messages,  # type: ignore[arg-type]  # plain dicts
                **more,
            )
        except APIStatusError as error:
            if not self.turns or not is_limit(error):
                raise
            self.ended = "limit"
            return None
        self.turns += 1
        choice = response.choices[0]
        message: Message = choice.message.model_dump(
            exclude_none=True, include={"role", "content", "tool_calls"}
        )
        message.setdefault("content", "")
        self.messages.append(message)
        if choice.finish_reason == "length":
            self.ended = "length"
        return message

    async def call(
        self, message: Message, answer: Callable[[str, Mapping[str, Any]], Awaitable[str]]
    ) -> int:
        """Answers the calls of a message, one after the other, and says how many failed. What `answer` raises is told
        to the model as `Error: ...`, as are arguments that cannot be read; EnvironmentGone is raised."""
        failed = 0
        for call in message["tool_calls"]:
            function = call["function"]
            try:
                arguments = json.loads(function["arguments"] or "{}")
                if not isinstance(arguments, dict):
                    raise TypeError("the arguments are not a JSON object")
                text = await answer(function["name"], arguments)
            except EnvironmentGone:
                raise
            except Exception as error:  # noqa: BLE001  the environment's word for a move that is not allowed
                failed += 1
                text = f"Error: {error}"
            self.messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "name": function["name"],
                    "content": text,
                }
            )
        return failed


def with_text(
    messages: Sequence[Message], text: str | None, between: str = "\n\n"
) -> list[Message]:
    """Returns the messages with `text` at the end of the last one, which is the user's."""
    if not text:
        return list(messages)
    last = messages[-1]
    return [
        *messages[:-1],
        {**last, "content": f"{last['content']}{between if last['content'] else ''}{text}"},
    ]


def is_limit(error: BaseException) -> bool:
    """Returns whether a request was refused since the episode has used up its share, or the model takes no more."""
    return getattr(error, "status_code", None) == 403 or "maximum context length" in str(error)
