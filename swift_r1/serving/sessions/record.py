"""The record of a session's calls: each token that the model wrote is in one sequence exactly."""

from __future__ import annotations

from collections.abc import Sequence

from swift_r1.serving.sessions.calls import ModelCall
from swift_r1.wire import sessions as wire


def recorded(calls: Sequence[ModelCall], seeded: bool) -> tuple[list[wire.RecordedCall], list[wire.RecordedSequence]]:
    """The answered calls and their sequences; `seeded` where the order in which they came must not matter."""
    chains = _chains(calls, seeded)
    place = {call: number for number, chain in enumerate(chains) for call in chain}
    return [_call(call, place[call]) for call in calls], [_sequence(chain) for chain in chains]


def _chains(calls: Sequence[ModelCall], seeded: bool) -> list[list[ModelCall]]:
    """A call is continued by the first that extends it; in a session with a seed by the one with the smallest
    content."""
    continued: dict[ModelCall, ModelCall] = {}
    order = calls
    if seeded:
        order = sorted(order, key=lambda call: (len(call.line()), call.content, call.again))
    for call in order:
        if call.parent is not None:
            continued.setdefault(call.parent, call)
    chains = []
    for call in order:
        if call.parent is None or continued[call.parent] is not call:
            chain = [call]
            while (following := continued.get(chain[-1])) is not None:
                chain.append(following)
            chains.append(chain)
    return chains


def _call(call: ModelCall, sequence: int) -> wire.RecordedCall:
    assert call.finish_reason is not None and call.sampling is not None
    return wire.RecordedCall(
        number=call.number,
        completion_id=call.completion_id,
        kind=call.kind,
        parent=None if call.parent is None else call.parent.number,
        sequence=sequence,
        prompt_tokens=call.prompt_tokens,
        completion_tokens=len(call.token_ids),
        finish_reason=call.finish_reason,
        weight_versions=call.versions,
        seed=call.seed,
        sampling=call.sampling.model_copy(update={"structural_tag": None}),
        constrained=call.sampling.structural_tag is not None,
        seconds=round(call.seconds, 3),
    )


def _sequence(chain: Sequence[ModelCall]) -> wire.RecordedSequence:
    first = chain[0]
    last = chain[-1]
    assert last.finish_reason is not None
    prompt = first.tokens()[: first.prompt_tokens]
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int | None] = []
    for call in chain:
        if call is not first:
            tokens += call.added
            mask += [False] * len(call.added)
            logprobs += [0.0] * len(call.added)
            versions += [None] * len(call.added)
        tokens += call.token_ids
        mask += [True] * len(call.token_ids)
        logprobs += call.logprobs
        versions += _of_tokens(call.versions, len(call.token_ids))
    answer = [] if last.answer is None else [dict(last.answer)]
    return wire.RecordedSequence(
        calls=tuple(call.number for call in chain),
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(tokens),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        finish_reason=last.finish_reason,
        messages=(*map(dict, last.asked.messages), *answer),
        tools=tuple(map(dict, last.asked.tools)),
    )


def _of_tokens(versions: Sequence[tuple[int, int]], length: int) -> list[int]:
    """`(first token, version)` in order, as a version for each token."""
    ends = [start for start, _ in versions[1:]] + [length]
    return [version for (start, version), end in zip(versions, ends, strict=True) for _ in range(start, end)]
