"""The record of a completion, from the first sampled token to the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Any

import numpy as np

from swift_r1.data.images import ImageFile
from swift_r1.data.prompts import Prompt
from swift_r1.record.episodes import EpisodeCall, steps_of
from swift_r1.wire.protocol import (
    Completion,
    FinishReason,
    Limit,
    VersionSpans,
    versions_of_tokens,
)

FAILURES = ("exception", "exit", "timeout", "died", "memory", "silent", "result")
"""Why an agent's episode has no valid reward: its class raised; its command ended with another code than 0; its
deadline; its process was killed, or was over its memory limit; it made no call of the model that was answered; what it
returned is no result."""
_LONGEST_TEXT = 1000  # characters of a text that an agent has returned


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One row of a batch: a prompt, and `T` tokens behind it.

    Example: the policy answers prompt P0 with A0, its environment says E0, and it goes on with A1, by newer weights:
        prompt_token_ids = P0
        token_ids = A0 + E0 + A1
        logprobs = [-0.1, -0.4] + [0.0] + [-1.2]
        loss_mask = [True, True] + [False] + [True]
        versions = [(0, 4), (3, 5)], E0 counts to what stands before it
        turns = [0, 0] + [-1] + [1]
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]  # `T`, a stop token included
    # `T`, the engine's (natural log); 0 for tokens that the policy did not write
    logprobs: Sequence[float]
    loss_mask: Sequence[bool]  # `T`, True where the policy wrote it and it is trained
    versions: VersionSpans = ((0, 0),)
    # `T`, the number of the turn that wrote it, -1 where none did; empty: there is one turn
    turns: Sequence[int] = ()
    images: Sequence[ImageFile] = ()  # of the prompt
    # `[tokens, layers, k]`, the experts that the engine's routers chose for the first tokens of prompt and row, all but
    # the last that the policy wrote and what follows; None where the engine was not asked
    routes: np.ndarray | None = None

    @classmethod
    def of_completion(
        cls, prompt: Prompt, completion: Completion, routes: np.ndarray | None = None
    ) -> TokenSequence:
        """Makes the sequence of a prompt that the policy answered in one turn."""
        return cls(
            prompt_token_ids=prompt.token_ids,
            images=prompt.images,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            loss_mask=(True,) * len(completion.token_ids),
            versions=completion.version_spans,
            routes=routes,
        )

    @classmethod
    def of_answer(cls, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> TokenSequence:
        """Makes the sequence of an answer that no engine wrote: all of it is trained."""
        count = len(token_ids)
        return cls(prompt_token_ids, token_ids, logprobs=(0.0,) * count, loss_mask=(True,) * count)

    @property
    def oldest_version(self) -> int:
        return min(version for _, version in self.versions)

    @property
    def newest_version(self) -> int:
        return max(version for _, version in self.versions)

    def versions_of_tokens(self) -> list[int]:
        """Returns the version of the weights that wrote each of the `T` tokens."""
        return versions_of_tokens(self.versions, len(self.token_ids))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All that is trained of one completion of a prompt, with what rewards and logs see of it: a single answer of the
    policy, several turns that a scheduler led, or an agent's episode. `Scoring` adds group, number and
    rewards, `Trainer.begin_round` advantage and entropy.

    Example: the second of two answers to `1 + 1 =`, which is right while the first is wrong:
        request_id "run/0/0", sequences [TokenSequence([5, 6], [7, 8], ...)], turns [[7, 8]], text "2",
        finish_reason "stop", group 0, number 1, rewards {"accuracy": 1.0}, reward 1.0, objective 1.0, outcome 1.0,
        advantage 0.7
    Example: an agent that asks the model twice and then begins a new chat:
        sequences [P0 + (A0 + E0 + A1), P2 + A2], turns [A0, A1, A2], messages of the second chat, other_messages
        [those of the first], infos {"num_turns": 3, "reward": 1.0, ...}
    """

    request_id: str  # of the prompt, the same for its whole group
    prompt: Prompt  # with the tokens of the first turn's prompt (an environment makes its own)
    sequences: Sequence[TokenSequence]  # calls of an agent may make several, or none
    turns: Sequence[Sequence[int]]  # the tokens of each turn of the policy
    # the whole conversation; of several sequences of an agent, the last one's
    messages: list[dict[str, Any]]
    text: str  # what rewards see: the last turn, a response prefix included
    finish_reason: FinishReason
    # what scheduler or agent noted, `num_turns` at least; None without one
    infos: Mapping[str, Any] | None = None
    # of the sequences before, by their last call
    other_messages: Sequence[list[dict[str, Any]]] = ()
    calls: Sequence[EpisodeCall] = ()  # one per turn, where a scheduler or an agent led it
    call_seconds: Sequence[float] = ()  # that each of them took
    limit: Limit | None = None  # the limit that the episode has run into
    # of an agent's episode without a valid reward: one of `FAILURES`, and `: cause`
    failure: str | None = None
    # number of its prompt within the round; those of resampled prompts follow the first ones
    group: int = 0
    number: int = 0  # its place in the group
    # by function; None: no opinion, NaN: invalid
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward: float = nan  # their weighted sum; NaN where no advantage can be computed from it
    # what the advantage is computed from: the reward, except with `normalize_then_sum`
    objective: float = nan
    outcome: float = nan  # the objective without what the rewards of turns add by themselves
    advantage: float | None = None  # of tokens their mean; None where nothing is trained on it
    # of the tokens of each turn, where `turn_rewards` make a difference; None where a turn has no trained token
    turn_advantages: Sequence[float | None] = ()
    # nats a token, before the round's first update; None where it is not logged
    entropy: float | None = None

    @property
    def rows(self) -> Sequence[TokenSequence]:
        """Returns what it is in a batch: its sequences, or a row of which nothing is trained, where the model wrote
        nothing."""
        if self.sequences:
            return self.sequences
        ids = self.prompt.token_ids
        nothing = TokenSequence(ids, ids[-1:], logprobs=(0.0,), loss_mask=(False,))
        return [replace(nothing, images=self.prompt.images)]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Returns what each of its calls read and said (`record.episodes`)."""
        return steps_of(self.calls, [*self.other_messages, self.messages])

    @property
    def turn_rewards(self) -> Sequence[float]:
        """Returns the rewards that an agent or an environment gave the turns, if it did."""
        infos = self.infos or {}
        found = infos.get("turn_rewards") or infos.get("step_rewards")  # of ms-swift's environments
        if not isinstance(found, list) or len(found) != len(self.turns):
            return ()
        return found if all(isinstance(one, int | float) for one in found) else ()

    @property
    def returned(self) -> dict[str, float | str]:
        """Returns the numbers and the beginnings of the texts that an agent returned beside its rewards; empty without
        an agent."""
        infos = self.infos or {}
        found: dict[str, float | str] = {}
        for name, value in infos.items() if "agent" in infos else ():
            if isinstance(value, str):
                found[_in_utf8(name)] = _in_utf8(value[:_LONGEST_TEXT])
            elif isinstance(value, int | float) and name not in ("reward", "num_turns"):
                found[_in_utf8(name)] = _as_float(value)
        return found

    @property
    def length(self) -> int:
        """Counts the tokens, prompts aside."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


def _in_utf8(text: str) -> str:
    """Returns a text that may have half surrogate pairs as files can have it."""
    return text.encode(errors="replace").decode()


def _as_float(value: float) -> float:
    """Returns a number of JSON; one that no float holds is infinite."""
    try:
        return float(value)
    except OverflowError:
        return inf


def turns_of_tokens(spans: Sequence[slice], length: int) -> list[int]:
    """Returns for each of `length` tokens the number of the turn that wrote it; -1 for those of none."""
    turns = [-1] * length
    for turn, span in enumerate(spans):
        written = range(*span.indices(length))
        turns[span] = [turn] * len(written)
    return turns


def spans_of(versions: Sequence[int | None]) -> VersionSpans:
    """Returns the stretches of tokens with these versions; a token that no weights wrote belongs to the stretch before
    it."""
    spans: list[tuple[int, int]] = []
    for place, version in enumerate(versions):
        if version is not None and (not spans or spans[-1][1] != version):
            spans.append((place if spans else 0, version))
    return tuple(spans)
