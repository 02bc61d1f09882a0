"""Made-up completions that every reward must bear: right, wrong, empty, very long, garbage, and hostile ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_r1.data.rows import RESERVED
from swift_r1.rewards.types import RewardBatch

RIGHT, WRONG = "right", "wrong"
_NO_IDEA = "<think>I do not know, so I guess.</think>\n<answer>wrong</answer>"
_LONG = "<think>" + "and then I try the next one, which is 7 " * 500
_GARBAGE = "\x00\ufffd\u202e</answer><answer>\\boxed{ {}%s {0} \n\n\u0661\u0662 \U0001f642 \u221a\u222b <|im_end|>"
_HOSTILE = {
    "9**9**9": "<think></think>\n<answer>9**9**9</answer>",
    "brackets": "<think></think>\n<answer>" + "(" * 100_000 + "</answer>",
}
_ANSWER = re.compile(r"(<answer>).*?(</answer>)|(\\boxed\{).*?(\})", re.DOTALL)


class MadeUpInfos(dict[str, Any]):
    """A scheduler's notes: which it will make is not known here, so every name has a value, 0."""

    def __missing__(self, name: str) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A completion of a known kind (`right`, `wrong`, `empty`, `long`, `garbage`, or what is hostile in it)."""

    kind: str
    text: str


def ordinary(gold: str | None) -> list[MadeUp]:
    """What a model may well say: one group. `gold` is a right completion, where one is known."""
    known = [] if gold is None else [MadeUp(RIGHT, gold)]
    return [
        *known,
        MadeUp(WRONG, _NO_IDEA if gold is None else made_wrong(gold)),
        MadeUp("empty", ""),
        MadeUp("long", _LONG),
        MadeUp("garbage", _GARBAGE),
    ]


def hostile() -> list[MadeUp]:
    """What makes a careless reward hang or break: one group, the first of which is harmless."""
    return [MadeUp(WRONG, _NO_IDEA), *(MadeUp(kind, text) for kind, text in _HOSTILE.items())]


def made_wrong(gold: str) -> str:
    """A right completion made wrong, its form kept: every number of the answer one larger, else another answer."""
    found = _ANSWER.search(gold)
    start, end = found.span() if found else (0, len(gold))
    answer = gold[start:end]
    if re.search(r"\d", answer):
        changed = re.sub(r"[0-9]+", lambda digits: str(int(digits[0][:18]) + 1), answer)
    elif found:
        changed = "".join((found[1] or found[3], "wrong", found[2] or found[4]))
    else:
        changed = "wrong"
    return gold[:start] + changed + gold[end:]


def made_up_batch(
    rows: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[MadeUp]], longest: int, prefix: str = ""
) -> RewardBatch:
    """The call that a training step would make: group `g` answers row `g`, and every column is there.

    Args:
        rows: preprocessed rows, one a group.
        groups: of equal sizes.
        longest: `--max_completion_length`; token ids are made up, one a byte, and cut there.
        prefix: what the prompt has the model's turn begin with; a text that begins so already stays as it is.
    """
    pairs = [(row, one.text) for row, group in zip(rows, groups, strict=True) for one in group]
    begins = prefix.strip()
    pairs = [(row, text if text.lstrip().startswith(begins) else prefix + text) for row, text in pairs]
    names = sorted({name for row in rows for name in row} - RESERVED - {"messages"})
    ids = [list(text.encode("utf-8", "replace")) for _, text in pairs]
    columns: dict[str, list[Any]] = {name: [row.get(name) for row, _ in pairs] for name in names}
    columns |= {
        "messages": [[*row["messages"], {"role": "assistant", "content": text}] for row, text in pairs],
        "prompt_id": [row["prompt_id"] for row, _ in pairs],
        "request_id": [f"check-{number}" for number in range(len(pairs))],
        "dataset": [row["dataset"] for row, _ in pairs],
        "finish_reason": ["length" if len(some) > longest else "stop" for some in ids],
        "is_truncated": [len(some) > longest for some in ids],
        "response_token_ids": [some[:longest] for some in ids],
        "rollout_infos": [MadeUpInfos(num_turns=1, total_reward=0.0) for _ in pairs],
    }
    return RewardBatch([text for _, text in pairs], columns, len(groups[0]), {"global_step": 0, "max_steps": 1})
