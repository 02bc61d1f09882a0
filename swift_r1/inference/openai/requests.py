"""What OpenAI's clients send: the fields that we act on. An unknown one is refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from swift_r1.wire.protocol import TOP_K_LIMIT, SamplingParams, Seed, Text, TokenId

Stop = Annotated[str, Field(min_length=1)]


class OpenAIModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TextPart(OpenAIModel):
    type: Literal["text"]
    text: Text


class ChatMessage(OpenAIModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | tuple[TextPart, ...]
    name: Text | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(OpenAIModel):
    include_usage: bool = False


class Generation(OpenAIModel):
    """What both kinds of request have."""

    model: Text
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1, lt=TOP_K_LIMIT)  # not OpenAI's, but every open server has it
    n: int = Field(default=1, ge=1)
    stop: Stop | tuple[Stop, ...] | None = None
    stop_token_ids: tuple[TokenId, ...] = ()  # vLLM's
    seed: Seed | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Text | None = None  # for an abuse monitor that we do not have

    def sampling(self, max_tokens: int) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=stop,
            stop_token_ids=self.stop_token_ids,
        )


class ChatRequest(Generation):
    """Body of `POST /v1/chat/completions`. Without a limit the answer may fill the model's length."""

    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class CompletionRequest(Generation):
    """Body of `POST /v1/completions`: texts, or token ids as they are."""

    prompt: (
        Text
        | Annotated[tuple[TokenId, ...], Field(min_length=1)]
        | Annotated[tuple[Text, ...], Field(min_length=1, max_length=256)]
        | Annotated[
            tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...], Field(min_length=1, max_length=256)
        ]
    )
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return (self.prompt,)  # type: ignore[return-value]
        return self.prompt  # type: ignore[return-value]
