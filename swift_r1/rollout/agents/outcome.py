"""What became of an episode: from its process's end and its session's record to a trajectory."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift_r1.data.prompts import Prompt
from swift_r1.record.episodes import EpisodeCall
from swift_r1.rollout.agents.processes import EpisodeExit
from swift_r1.rollout.trajectory import TokenSequence, Trajectory, spans_of
from swift_r1.serving.engines.base import PromptTokenizer
from swift_r1.serving.sessions.session import SessionState
from swift_r1.wire.sessions import RecordedSequence, SessionRecord
from swift_r1.workers.confine import MEMORY_EXIT


class _NoResult(ValueError):
    """What an agent returned cannot be used."""


@dataclass(frozen=True)
class EndedEpisode:
    """An episode that has ended. `seconds` are its own, without those of the model."""

    request_id: str  # of its prompt
    prompt: Prompt
    ended: EpisodeExit
    late: bool
    seconds: float
    timeout: float
    needs_reward: bool  # no reward function judges it but `agent_reward`


def trajectory_of(play: EndedEpisode, state: SessionState, prompts: PromptTokenizer) -> Trajectory:
    record = state.record()
    calls = sorted(record.calls, key=lambda call: call.number)
    failure, result = outcome_of(play, len(calls))
    # Where the first call was refused there is nothing that the policy could have done otherwise.
    limited = (
        bool(calls)
        and failure is not None
        and state.limit is not None
        and failure.startswith(("exception", "exit"))
    )
    if limited:  # it was cut off, as a completion is at its longest
        failure = None
        result = {"reward": 0.0}
    turns = {call.number: turn for turn, call in enumerate(calls)}
    forced = {call.number for call in calls if call.constrained}
    sequences = [_sequence(one, state, record, turns, forced) for one in record.sequences]
    ids: dict[int, tuple[int, ...]] = {}
    for one, own in zip(record.sequences, sequences, strict=True):
        for number in one.calls:
            turn = turns[number]
            ids[turn] = tuple(
                t for t, of in zip(one.token_ids, own.turns, strict=True) if of == turn
            )
    # The one with the last answer is what rewards see first.
    in_order = sorted(record.sequences, key=lambda one: one.calls[-1])
    last = in_order[-1] if in_order else None
    prompt = play.prompt
    messages = [dict(one) for one in play.prompt.messages]
    text = ""
    if last is not None:
        shown = str(prompts.tokenizer.decode(list(last.prompt_token_ids)))
        prompt = replace(prompt, text=shown, token_ids=tuple(last.prompt_token_ids))
        messages = [dict(one) for one in last.messages]
        text = str(messages[-1].get("content") or "")
    about = {
        "kinds": dict(record.kinds),
        "constrained": len(forced),
        "seconds": play.seconds,
    }
    noted = {
        "num_turns": len(calls),
        "tool_calls": list(_tool_calls(record.sequences)),
        "agent": about,
    }
    return Trajectory(
        request_id=play.request_id,
        prompt=prompt,
        sequences=sequences,
        turns=[ids[turn] for turn in sorted(ids)],
        messages=messages,
        text=text,
        other_messages=[[dict(message) for message in one.messages] for one in in_order[:-1]],
        calls=_calls(record, [record.sequences.index(one) for one in in_order]),
        call_seconds=[call.seconds for call in calls],
        finish_reason="length" if limited or last is None else last.finish_reason,
        infos=result | noted,
        failure=failure,
        limit=state.limit,
    )


def outcome_of(play: EndedEpisode, calls: int) -> tuple[str | None, dict[str, Any]]:
    """Returns why an episode has failed, and what it returned where it has not, after so many answered calls."""
    failure = _failure(play, bool(calls))
    if failure is not None:
        return failure, {}
    try:
        return None, _result(play, calls)
    except _NoResult as error:
        return f"result: {error}", {}


def _failure(play: EndedEpisode, answered: bool) -> str | None:
    """Its kind and cause, in one line."""
    ended = play.ended
    said = next((line for line in reversed(ended.stderr.splitlines()) if line.strip()), "").strip()[
        :300
    ]
    words = f" ({said})" if said else ""
    if ended.code is None:
        return "died: the process that agents are forked from was killed"
    if play.late:
        return f"timeout: no end within {play.timeout:g} s{words}"
    if ended.code == MEMORY_EXIT:
        return "memory: MemoryError"
    if ended.code < 0:
        return f"died: signal {-ended.code} ({signal.strsignal(-ended.code)}){words}"
    if ended.raised is not None:
        # it may have half surrogate pairs
        return f"exception: {ended.raised.encode(errors='replace').decode()}"
    if ended.code:
        return f"exit: exit code {ended.code}{words}"
    return None if answered else f"silent: it made no call of the model that was answered{words}"


def _result(play: EndedEpisode, calls: int) -> dict[str, Any]:
    """Returns what an episode returned, or what a command's last line says, as a dict with `reward`. Raises
    _NoResult."""
    text = play.ended.result
    said = "it returned"
    if text is None:
        said = "its last line is"
        text = next((line for line in reversed(play.ended.stdout.split("\n")) if line.strip()), "")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # the latter for one that is nested too deep
            value = None
        if not isinstance(value, int | float | dict):  # some JSON that was meant for somebody else
            value = None
    else:
        value = json.loads(text)
    found = dict(value) if isinstance(value, dict) else {"reward": value}
    reward = found.setdefault("reward", None)
    if reward is None and play.needs_reward:
        raise _NoResult(
            f"{said} {text[:60]!r}, which is not a number and no JSON object with a reward, "
            "and no other reward function judges"
        )
    if reward is not None and not _is_number(reward):
        raise _NoResult(f"the reward is {str(reward)[:60]!r}, not a finite number")
    found["reward"] = None if reward is None else float(reward)
    turns = found.get("turn_rewards")
    if turns is not None:
        if not isinstance(turns, list) or not all(map(_is_number, turns)):
            raise _NoResult("turn_rewards is not a list of finite numbers")
        if len(turns) != calls:
            raise _NoResult(f"turn_rewards has {len(turns)} values for {calls} calls of the model")
    return found


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def _sequence(
    one: RecordedSequence,
    state: SessionState,
    record: SessionRecord,
    turns: Mapping[int, int],
    forced: set[int],
) -> TokenSequence:
    """Tokens of a call that was forced come from a part of the policy's distribution, and are not trained."""
    lengths = {call.number: call.completion_tokens for call in record.calls}
    written = iter([number for number in one.calls for _ in range(lengths[number])])
    writers = [next(written) if own else None for own in one.loss_mask]
    return TokenSequence(
        prompt_token_ids=one.prompt_token_ids,
        token_ids=one.token_ids,
        logprobs=one.logprobs,
        loss_mask=[writer is not None and writer not in forced for writer in writers],
        versions=spans_of(one.versions),
        turns=[-1 if writer is None else turns[writer] for writer in writers],
        routes=state.routes_of(one.calls[-1]),
    )


def _calls(record: SessionRecord, in_order: Sequence[int]) -> list[EpisodeCall]:
    """Returns the calls in the order in which they began; `in_order` are the numbers of the sequences as conversations
    are ordered."""
    calls = sorted(record.calls, key=lambda call: call.number)
    turns = {call.number: turn for turn, call in enumerate(calls)}
    return [
        EpisodeCall(
            kind=call.kind,
            parent=None if call.parent is None else turns[call.parent],
            conversation=in_order.index(call.sequence),
            place=call.place,
            prompt_tokens=call.prompt_tokens,
            tokens=call.completion_tokens,
            finish_reason=call.finish_reason,
        )
        for call in calls
    ]


def _tool_calls(sequences: Sequence[RecordedSequence]) -> Iterator[dict[str, Any]]:
    """Yields the calls that the model made of tools, each with the agent's answer, as runs with `--tools` have them."""
    known: set[str] = set()  # what branches share is in several
    for one in sequences:
        turn = 0
        tools = {tool["function"]["name"] for tool in one.tools}
        answers = {
            message.get("tool_call_id"): message
            for message in one.messages
            if message["role"] == "tool"
        }
        for message in one.messages:
            turn += message["role"] == "assistant"
            for call in message.get("tool_calls") or ():
                if call["id"] in known:
                    continue
                known.add(call["id"])
                answer = answers.get(call["id"])
                name = call["function"]["name"]
                outcome = "unanswered" if answer is None else "answer"
                yield {
                    "turn": turn,
                    "name": name,
                    "arguments": call["function"]["arguments"],
                    "content": None if answer is None else answer["content"],
                    # a name that the model has made up
                    "outcome": outcome if name in tools else "unknown",
                    "cut": False,
                }
