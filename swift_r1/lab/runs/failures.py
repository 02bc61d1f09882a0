r"""Why a completion is not right, decided from what `completions.jsonl` says of it. The first that holds:

invalid reward   it has no usable reward (`reward` is null)
right            the first reward function gave at least 1, as in evaluations
truncated        it was cut off (`finish_reason` is `length`)
no answer        the grader of the first reward found no answer in the text (`has_answer`)
wrong format     a reward function with `format` in its name gave 0 or less
wrong value      anything else: there is an answer, and it is wrong
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

FAILURES = ("right", "wrong value", "wrong format", "no answer", "truncated", "invalid reward")
RIGHT = 1.0  # the first reward of a right completion is at least this


def has_answer(reward: str, completion: str, prompt: str) -> bool:
    r"""Returns whether the text has an answer, as the built-in reward function of this name reads it.

    Of another function it is not known how it reads: there the text lacks an answer only where the prompt asks for
    `<answer>` tags or a `\boxed{}`, and it has neither, closed.
    """
    readers = _readers()
    reader = readers.get(reward)
    if reader is not None:
        return reader(completion) is not None
    if "<answer>" not in prompt and "\\boxed" not in prompt:
        return True
    return any(readers[name](completion) is not None for name in ("countdown", "math"))


def answer_place(reward: str, completion: str) -> tuple[int, int] | None:
    r"""Returns from where to where the answer stands that the built-in reward function of this name reads; of another
    function the last `<answer>` or `\boxed{}`. None without one, or where it is not written as it is read."""
    reader = _readers().get(reward)
    readers = [_readers()[name] for name in ("math_tag", "math")] if reader is None else [reader]
    for read in readers:
        answer = read(completion)
        for before in ("<answer>", "\\boxed{", "") if answer else ():
            place = completion.rfind(f"{before}{answer}")
            if place >= 0:
                start = place + len(before)
                return start, start + len(str(answer))
    return None


@cache
def _readers() -> Mapping[str, Callable[[str], object]]:
    from swift_r1.rewards.graders.answers import answered, last_answer
    from swift_r1.training.evaluation.results import RULES

    return {"countdown": lambda text: last_answer(answered(text))} | {
        name: rule.read for name, rule in RULES.items()
    }
