"""The built-in scheduler of runs with tools: it reads the model's calls, makes them, and shows the answers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift_r1.errors import UsageError
from swift_r1.plugins.protocol import (
    ChatCompletionResponseChoice,
    RolloutInferRequest,
    RolloutOutput,
)
from swift_r1.plugins.rollouts import (
    MultiTurnScheduler,
    RolloutScheduler,
    multi_turns,
    up_to_last_answer,
)
from swift_r1.plugins.tools.calling import ToolAnswer
from swift_r1.plugins.tools.parsing import Parsed, ToolCall

if TYPE_CHECKING:
    from swift_r1.data.prompts import PromptEncoder
    from swift_r1.plugins.tools.parsing import ToolCallParser
    from swift_r1.plugins.tools.pool import EpisodeToolsOwner, ToolPool

_logger = logging.getLogger("swift_r1.tools")


@dataclass(frozen=True)
class ToolKit:
    """What reads and makes calls, those of `owners` too, of which each conversation has its own. Tokens in `ends` end a
    turn."""

    parser: ToolCallParser
    pool: ToolPool
    ends: Collection[int]
    owners: Sequence[EpisodeToolsOwner] = ()


class ToolScheduler(RolloutScheduler):
    """Turn after turn until the model answers without a call, its turn is cut off, `max_turns` is reached or no more
    tokens fit; a call in such a last turn is text, and is not made. `kit` comes by keyword."""

    def __init__(self, *args: Any, kit: ToolKit, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kit = kit
        self._warned = False

    async def run(
        self, infer_request: RolloutInferRequest, request_config: Any, **kwargs: Any
    ) -> RolloutOutput:
        """`rollout_infos` has `tool_calls`, a dict for each call: `turn`, `name`, `arguments` (JSON), `content` (the
        answer), `outcome` (answer, error, timeout or unknown), `seconds` and `cut`. A turn with a call that could not
        be read is there too: its text as `arguments`, `outcome` unread."""
        turns = _Turns(self, infer_request)
        try:
            output = await turns.run(infer_request, request_config, **kwargs)
        finally:
            for tools in turns.own_tools:
                tools.close()
        output.messages = up_to_last_answer(turns.messages)
        output.rollout_infos["tool_calls"] = turns.calls
        return output

    def tell_unread(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(
                "a turn has what looks like a call, which the parser %s does not read (told once, tools/unread_calls "
                "counts them): %s",
                self.kit.parser.name,
                " ".join(text.split())[-300:],
            )


class _Turns(MultiTurnScheduler):
    """One trajectory. The request's messages have the model's turns as it wrote them, `messages` have calls apart."""

    def __init__(self, owner: ToolScheduler, request: RolloutInferRequest) -> None:
        super().__init__(owner.infer_engine, owner.max_turns, tokenizer=owner.tokenizer)
        self._owner = owner
        self._kit = owner.kit
        self._tools: list[Mapping[str, Any]] = request.data_dict.get("tools") or []
        self.messages: list[dict[str, Any]] = deepcopy(request.messages)
        self.calls: list[dict[str, Any]] = []
        self.own_tools = [one.episode() for one in owner.kit.owners]

    async def on_turn_end(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> dict[str, Any]:
        parsed = self._parsed(response_choice, current_turn)
        at_end = current_turn == self.max_turns
        cut_off = response_choice.finish_reason == "length"
        if at_end or cut_off or not parsed.calls:
            self.messages.append({"role": "assistant", "content": response_choice.message.content})
            if cut_off or not parsed.unread:
                limited = at_end and not cut_off and bool(parsed.calls)
                return {"done": True, "rollout_infos": {"limit": "calls"} if limited else {}}
            self._owner.tell_unread(parsed.content or "")
            unread = ToolCall("", "", parsed.content or "")
            self._keep(current_turn, unread, ToolAnswer("", "unread"))
            return {"done": True}
        names = [one["function"]["name"] for one in self._tools]
        answers = await self._kit.pool.call(parsed.calls, names, self.own_tools)
        made = list(zip(parsed.calls, answers, strict=True))
        said = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": answer.content}
            for call, answer in made
        ]
        calls = [call.as_message() for call in parsed.calls]
        self.messages += [
            {"role": "assistant", "content": parsed.content or "", "tool_calls": calls},
            *deepcopy(said),
        ]
        infer_request.messages += said
        for call, answer in made:
            self._keep(current_turn, call, answer)
        return {"done": False}

    def _keep(self, turn: int, call: ToolCall, answer: ToolAnswer) -> None:
        made = {
            "turn": turn,
            "name": call.name,
            "arguments": call.arguments,
            "content": answer.content,
        }
        self.calls.append(
            made | {"outcome": answer.outcome, "seconds": answer.seconds, "cut": answer.cut}
        )

    def step(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> dict[str, Any]:
        return {"infer_request": infer_request}

    def _parsed(self, choice: ChatCompletionResponseChoice, turn: int) -> Parsed:
        """Returns the model's turn, with its special tokens, which belong to the calls of some formats."""
        ids = list(choice.token_ids or ())
        prefix = choice.message.content.removesuffix(
            self.tokenizer.decode(ids, skip_special_tokens=True)
        )
        shown = ids[:-1] if ids[-1] in self._kit.ends else ids
        return self._kit.parser.parse(
            prefix + self.tokenizer.decode(shown), self._tools, (turn, *ids)
        )


def check_tool_answers(encoder: PromptEncoder) -> None:
    """Raises UsageError where the chat template has no place for tools, or renders their answers otherwise behind a
    turn as the model wrote it than behind the same turn with its calls apart: the model would read other text here than
    elsewhere."""
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "f", "parameters": _NO_PARAMETERS},
    }
    user = {"role": "user", "content": "x"}
    apart: list[dict[str, Any]] = [user]
    written = [user]
    for number in range(2):
        call = ToolCall(f"call{number:05d}", "f", "{}")
        answer = {
            "role": "tool",
            "tool_call_id": call.id,
            "name": "f",
            "content": f"answer {number}",
        }
        apart += [{"role": "assistant", "content": "", "tool_calls": [call.as_message()]}, answer]
        written += [{"role": "assistant", "content": _TURN}, answer]
    behind = encoder.render(written, [tool]).rpartition(_TURN)[2]
    if "answer 1" not in behind or not encoder.render(apart, [tool]).endswith(behind):
        raise UsageError(
            "the chat template renders a tool's answer only behind a call that it has rendered itself, which would "
            "tokenise the model's own turns again: give --prompt_template another one for runs with tools"
        )


_NO_PARAMETERS = {"type": "object", "properties": {}}
_TURN = "swift-r1-turn-88c0de"
multi_turns["tool_scheduler"] = ToolScheduler
