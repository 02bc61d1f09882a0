"""What ms-swift's plugins import besides base classes: records of requests and answers with its names, fields and
defaults, small helpers, and registries that nothing here reads.

The records carry values between a plugin's own pieces (a scheduler, an environment, a client of a judge). Our own wire
is `swift_r1.wire.protocol`.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, Any]]
Tool = dict[str, Any]


def _random_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


@dataclass
class InferRequest:
    """A conversation to continue. Media stay empty here: only text is generated."""

    messages: Messages
    images: list[Any] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    tools: list[Tool] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def remove_response(messages: Messages) -> str | None:
        """Removes the model's turn from the end of `messages`, in place; returns its text, None without one."""
        if not messages or messages[-1]["role"] != "assistant":
            return None
        content: str | None = messages.pop()["content"]
        return content


@dataclass
class RolloutInferRequest(InferRequest):
    """A request of a rollout: `data_dict` has the row's other columns, `uuid` names the trajectory."""

    data_dict: dict[str, Any] = field(default_factory=dict)
    uuid: str | None = None


@dataclass
class RequestConfig:
    """How to sample; None means the engine's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    stop: list[str] | None = field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    length_penalty: float = 1.0
    return_details: bool = False
    structured_outputs_regex: str | None = None

    def __post_init__(self) -> None:
        self.stop = self.stop or []


@dataclass
class Function:
    """A tool call's function; arguments that are no text become JSON."""

    name: str
    arguments: Any

    def __post_init__(self) -> None:
        text = (
            self.arguments
            if isinstance(self.arguments, str)
            else json.dumps(self.arguments, ensure_ascii=False)
        )
        self.name = self.name.strip()
        self.arguments = text.strip()


@dataclass
class ChatCompletionMessageToolCall:
    function: Function
    type: str = "function"
    id: str = field(default_factory=lambda: _random_id("toolcall"))


@dataclass
class ChatMessage:
    """The model's turn: `content` is its text."""

    role: str
    content: Any
    tool_calls: list[ChatCompletionMessageToolCall] | None = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    """One of the answers; `token_ids` are the sampled ids where they are known."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None


@dataclass
class UsageInfo:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass
class ChatCompletionResponse:
    """A whole answer."""

    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    id: str = field(default_factory=lambda: _random_id("chatcmpl"))
    object: str = "chat.completion"
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass
class RolloutOutput:
    """One trajectory: ids and loss mask of each turn (lists of equal lengths), and what the scheduler noted."""

    response: ChatCompletionResponse
    messages: Messages | None = None
    response_token_ids: list[list[int]] = field(default_factory=list)
    response_loss_mask: list[list[int]] = field(default_factory=list)
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    rollout_logprobs: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """A flat list is that of one turn."""
        for name in ("response_token_ids", "response_loss_mask", "rollout_logprobs"):
            rows = list(getattr(self, name) or ())
            setattr(self, name, [rows] if rows and not isinstance(rows[0], list | tuple) else rows)


class PRM:
    """A process reward model, which scores the steps of requests."""

    def __call__(self, **kwargs: Any) -> list[Any]:
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


prms: dict[str, Callable[..., Any]] = {}
"""Plugin files may fill it, nothing here reads it."""
rm_plugins: dict[str, Callable[..., Any]] = {}
"""Name for `--reward_model_plugin` -> class, built with `model` and `template`, called with `inputs` and columns."""

remove_response = InferRequest.remove_response


def get_logger(*_: Any, **__: Any) -> logging.Logger:
    """Returns the logger of plugins. ms-swift's arguments (file, level) have no effect here."""
    return logging.getLogger("swift_r1.plugin")


def to_device(data: Any, device: Any, non_blocking: bool = False) -> Any:
    """Returns a copy of nested dicts, lists and tuples with every tensor in them on `device`; other values as they
    are."""
    if isinstance(data, Mapping):
        make: Callable[[Any], Any] = type(data)
        return make({key: to_device(value, device, non_blocking) for key, value in data.items()})
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device, non_blocking) for value in data)
    if hasattr(data, "to") and hasattr(data, "device"):
        return data.to(device=device, non_blocking=non_blocking)
    return data
