"""The wire of sessions: an address of its own for an agent, and the record of what it asked::

POST   /v1/sessions          SessionRequest -> Session         the same id and body again: the same session
GET    /v1/sessions/ID                      -> SessionRecord
DELETE /v1/sessions/ID                      -> {}              stops what runs, forgets the record
/v1/sessions/ID/v1/...       OpenAI's and Anthropic's routes, with the session's key or the server's
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from swift_r1.wire.protocol import TOP_K_LIMIT, FinishReason, SamplingParams, Seed, Wire

SESSION_ID = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"
SESSION_KEY = "swift-session-"  # keys of sessions begin with it
# the header that says how many calls with this content were made before it
EQUAL_CALLS = "x-swift-equal-calls"
# the header that names calls which no longer count, by Idempotency-Key, with commas
GIVEN_UP = "x-swift-given-up"
SessionId = Annotated[str, Field(pattern=SESSION_ID)]


class SessionSampling(Wire):
    """What holds for every call, whatever the agent asks; None leaves it to the agent. `max_tokens` of a call is an
    upper limit: the smaller one holds."""

    temperature: float | None = Field(default=None, ge=0.0, le=1000.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, lt=TOP_K_LIMIT)
    min_p: float | None = Field(default=None, ge=0.0, lt=1.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0)
    max_tokens: int | None = Field(default=None, ge=1)


class SessionLimits(Wire):
    """None for no limit. `tokens` are those that the model writes in all calls, `seconds` go from the session's start.
    Calls that run side by side may each use what is left of `tokens` when they begin."""

    tokens: int | None = Field(default=None, ge=1)
    calls: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)


class SessionRequest(Wire):
    """Body of `POST /v1/sessions`; without an `id` the server makes one. With a `seed` every call has its own seed,
    from this and what the call says: calls give the same tokens in whatever order they come."""

    id: SessionId | None = None
    seed: Seed | None = None
    sampling: SessionSampling = SessionSampling()
    limits: SessionLimits = SessionLimits()


class Session(Wire):
    """The agent's `OPENAI_BASE_URL` and `OPENAI_API_KEY`. The session ends after `timeout` seconds without a call."""

    id: str
    base_url: str
    api_key: str
    timeout: float  # seconds


class RecordedCall(Wire):
    """A call that was answered. `parent` is the call whose answer it continues, `sequence` where its tokens are."""

    number: int  # in the order of the calls, from 0
    completion_id: str  # as in the client's answer
    kind: str  # how it stands to the earlier ones (docs/agents.md)
    parent: int | None
    sequence: int
    prompt_tokens: int
    place: int  # its answer's among the messages of its conversation
    completion_tokens: int
    finish_reason: FinishReason
    weight_versions: tuple[tuple[int, int], ...]  # (first token of the completion, version)
    seed: int | None
    sampling: SamplingParams  # what was generated with; stop tokens of the template are among them
    # a tool call was forced: tokens were drawn from a part of the model's distribution
    constrained: bool
    seconds: float  # that it took


class RecordedSequence(Wire):
    """`T` tokens behind a prompt. A token that the model wrote here has a True in `loss_mask`, the engine's log-prob
    (natural log, of the distribution sampled from) and the version of the weights that wrote it; another has False, 0
    and None. Every token that the model wrote is True in one sequence exactly: where calls branch, the further branches
    have what they share in their prompts.

    Attributes:
        calls: numbers of the calls, in order.
        messages: of the last call, its answer included.
        tools: of its calls, as they were sent.
    """

    calls: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int | None, ...]
    finish_reason: FinishReason
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


class SessionRecord(Wire):
    """What was answered so far. `kinds` counts the calls by kind, `retried` those answered from memory, `failed` those
    without an answer (refused, stopped, or whose client hung up); `tokens` are the model's."""

    id: str
    seed: int | None
    running: int  # calls that are not answered yet
    tokens: int
    seconds: float
    kinds: dict[str, int]
    retried: int
    failed: int
    calls: tuple[RecordedCall, ...]
    sequences: tuple[RecordedSequence, ...]
