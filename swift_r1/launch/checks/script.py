"""A script in the model's place behind a run's own gateway: an agent finds there what it will find in the run, in each
protocol, with its refusals and its record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from swift_r1.plugins.environments.scripted import ScriptedModel
from swift_r1.plugins.tools.parsing import (
    Parsed,
    Tool,
    ToolCall,
    ToolCallParser,
    call_id,
)
from swift_r1.rollout.agents.gateway import AgentModel
from swift_r1.serving.engines.base import PromptTokenizer
from swift_r1.serving.openai_messages import ToolCalls
from swift_r1.serving.pieces import Pieces
from swift_r1.serving.sessions.calls import CallContent
from swift_r1.serving.sessions.session import SessionState
from swift_r1.wire.protocol import Completion, RolloutRequest

_LONGEST = 1 << 20
_CALL = "The script calls: "
_END = "<end>"
_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for one in messages %}[{{ one.role }}]{{ one.content }}<end>\n{% endfor %}"
    "{% if enable_thinking is defined %}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def letters() -> Any:
    """Returns a tokenizer with a chat template that needs no model: a byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=_END)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


class _CallParser(ToolCallParser):
    """Reads the script's calls, without vLLM."""

    def __init__(self) -> None:
        self.name = "script"

    def parse(self, text: str, tools: Sequence[Tool] = (), token_ids: Sequence[int] = ()) -> Parsed:
        begin, _, call = text.partition(_CALL)
        if begin.strip() or not call:
            return Parsed(text or None)
        return Parsed(None, (ToolCall(call_id(token_ids, 0), **json.loads(call)),))

    def forced(self, tools: Sequence[Tool], choice: Any) -> str:
        return json.dumps(choice)


class _ScriptCalls(ToolCalls):
    async def parser(self) -> ToolCallParser:
        return _CallParser()


class ScriptedPolicy(AgentModel):
    """The model of a gateway, and its own conversation in the one session `state`, whose turns are the script's."""

    def __init__(self, script: ScriptedModel, tokenizer: Any) -> None:
        prompts = PromptTokenizer(tokenizer)
        ends = () if prompts.turn_end is None else (prompts.turn_end,)
        calls = _ScriptCalls("script", tokenizer)
        super().__init__(prompts, calls, _LONGEST, len(tokenizer), ends)
        self._script = script
        self.state: SessionState | None = None

    def pieces(self, requests: Sequence[RolloutRequest], *how: Any) -> Pieces:
        """Lets any call be forced, as vLLM does: the script calls a tool wherever it may."""
        [request] = requests
        free = request.sampling.model_copy(update={"structural_tag": None})
        return super().pieces([request.model_copy(update={"sampling": free})], *how)

    def ask(self, request: RolloutRequest) -> asyncio.Future[Completion]:
        """Answers the call of the session that the request is for."""
        assert self.state is not None
        number = int(request.request_id.rpartition("/")[2])
        [call] = [one for one in self.state.running if one.number == number]
        ids = (*self.prompts.encode_more(self._text(call.content)), *self.ends)
        said = Completion(
            token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop", weight_version=0
        )
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        answer.set_result(said)
        return answer

    def _text(self, content: CallContent) -> str:
        tools = [] if content.settings.get("tool_choice") == "none" else list(content.tools)
        answer = self._script.answer({"messages": list(content.messages), "tools": tools})
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls")
        return _CALL + json.dumps(calls[0]["function"]) if calls else str(message["content"])
