"""Metrics of what was asked and what was written: loops, foreign scripts, prompts that come twice."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np

from swift_r1.rollout.base import Conversation

N = 8  # tokens of an n-gram
_POWERS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(N, dtype=np.uint64)  # odd, so none is 0


def text_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """`completions/repetition`: the share of n-grams of 8 tokens that were in their completion before, of all of them
    together; left out where completions are shorter. `completions/foreign_letters`: the share of letters of scripts
    that are not in the prompt. `prompts/repeated`: the share of prompts that came before in the round."""
    ngrams = repeats = letters = foreign = 0
    prompts = {one.request_id: one.prompt for one in conversations}
    scripts = {request_id: letter_counts(prompt.text).keys() for request_id, prompt in prompts.items()}
    for one in conversations:
        for completion in one.completions:
            found, again = repeated_ngrams(completion.token_ids)
            ngrams = ngrams + found
            repeats = repeats + again
        for script, count in letter_counts(one.text).items():
            letters += count
            foreign += count * (script not in scripts[one.request_id])
    different = len({prompt.token_ids for prompt in prompts.values()})
    metrics = {"prompts/repeated": 1 - different / len(prompts)}
    metrics |= {"completions/repetition": repeats / ngrams} if ngrams else {}
    return metrics | ({"completions/foreign_letters": foreign / letters} if letters else {})


def repeated_ngrams(token_ids: Sequence[int]) -> tuple[int, int]:
    """How many n-grams a completion has, and how many of them came before in it; told apart by a 64-bit hash."""
    count = len(token_ids) - N + 1
    if count < 2:
        return max(count, 0), 0
    ids = np.array(token_ids, dtype=np.uint64) + np.uint64(1)
    hashes = sum(ids[place : place + count] * power for place, power in enumerate(_POWERS))
    return count, count - len(np.unique(hashes))


def letter_counts(text: str) -> Counter[str]:
    """Letters by script (the first word of Unicode's names: LATIN, CJK, CYRILLIC)."""
    counts: Counter[str] = Counter()
    for letter, count in Counter(text).items():
        if letter.isalpha():
            counts[_script(letter)] += count
    return counts


@cache
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]
