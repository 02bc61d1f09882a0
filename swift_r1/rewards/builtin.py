"""The rewards that are registered without a plugin: format, graders, environments, and ms-swift's shaping rewards.

`cosine` scales correctness by length and `repetition` counts repeated word n-grams (Yeo et al. 2025, arXiv:2502.03373);
`soft_overlong` punishes the last stretch before the length limit (DAPO, arXiv:2503.14476). Lengths are in tokens, from
`response_token_ids`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from swift_r1.rewards.graders import grade_countdown, grade_gsm8k, grade_math
from swift_r1.rewards.graders.answers import QUALIFIER, answered, tidied, written_answer
from swift_r1.rewards.graders.equality import contradict, equal
from swift_r1.rewards.graders.gsm8k import only_number
from swift_r1.rewards.graders.library import MAX_READ, read_alone, verified
from swift_r1.rewards.orm import ORM, Rewards, orms

_THOUGHT_THEN = {next_: re.compile(rf"</think>\s*{next_}") for next_ in ("<answer>", "Action:")}
_END = "</answer>"
_WORDS = re.compile(r"(?=.*[A-Za-z]{2})[-\w.,:;%'!? ]*")
_FORMULA = re.compile(r"(?<!\\)\$\$?[^$]+(?<!\\)\$\$?|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
# before a formula, where another answer stands before it; behind it, where something follows that may be the answer
_LIST = re.compile(r"^[^A-Za-z]*[,;/][^A-Za-z]*$|\b(?:or|and|either)\W*$")
_MORE = re.compile(r"[0-9=\\$]|[.!;]\s+\S|\b(?:is|or)\b")


def _after_thought(completion: str, next_: str) -> int | None:
    """Returns where the text after a first think block and `next_` begins. Linear: the earliest leaves most room."""
    start = "<think>"
    match = (
        _THOUGHT_THEN[next_].search(completion, len(start))
        if completion.startswith(start)
        else None
    )
    return None if match is None else match.end()


def is_formatted(completion: str) -> bool:
    r"""ms-swift's `^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])` (dot matches all), found in linear time."""
    answer = _after_thought(completion, "<answer>")
    return answer is not None and completion.endswith(_END, answer)


class Format(ORM):
    """1 for think tags, then answer tags, and nothing else; 0 otherwise."""

    def __call__(self, completions: list[str], **kwargs: Any) -> Rewards:
        return [float(is_formatted(completion)) for completion in completions]


def is_react(completion: str) -> bool:
    r"""ms-swift's `^<think>.*?</think>\s*Action:.*?Action Input:.*?$` (dot matches all), found in linear time."""
    action = _after_thought(completion, "Action:")
    return action is not None and "Action Input:" in completion[action:]


class ReActFormat(ORM):
    """1 for a thought in think tags, then `Action:` and `Action Input:`; 0 otherwise."""

    def __call__(self, completions: list[str], **kwargs: Any) -> Rewards:
        return [float(is_react(completion)) for completion in completions]


def last_call(text: str) -> tuple[str, Any]:
    """Returns the last `Action:` of a ReAct text and its `Action Input:`, as JSON where it is that; `none` and no
    arguments where they are left out."""
    action = (
        text.rpartition("Action:")[2].partition("Action Input:")[0].strip()
        if "Action:" in text
        else "none"
    )
    words = text.rpartition("Action Input:")[2].strip() if "Action Input:" in text else "{}"
    try:
        return action, json.loads(words)
    except ValueError:
        return action, words


class ToolBench(ORM):
    """1 where the last ReAct call has the action and the input of `solution`'s; 0 otherwise."""

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> Rewards:
        rewards: Rewards = []
        for text, right in zip(completions, solution, strict=True):
            if text.endswith("Observation:"):
                text = text.partition("Observation:")[0]
            rewards.append(float(last_call(answered(text)) == last_call(right)))
        return rewards


class GymReward(ORM):
    """The total reward of an environment's episode (--use_gym_env)."""

    key = "total_reward"

    def __call__(
        self, completions: list[str], rollout_infos: list[dict[str, Any]], **kwargs: Any
    ) -> Rewards:
        return [infos.get(self.key) for infos in rollout_infos]


class AgentReward(GymReward):
    """What an agent's episode returned, or its `reward` (--agent, --agent_command)."""

    key = "reward"


class Countdown(ORM):
    """1 where the answer reaches the target and uses each number once; 0 otherwise."""

    def __call__(
        self,
        completions: list[str],
        nums: Any,
        target: Any,
        **kwargs: Any,
    ) -> Rewards:
        return [
            grade_countdown(*item).score for item in zip(completions, nums, target, strict=True)
        ]


class Gsm8k(ORM):
    """1 where the number of the answer is that of `solution`; 0 otherwise."""

    def __call__(self, completions: list[str], solution: Any, **kwargs: Any) -> Rewards:
        return [grade_gsm8k(*item).score for item in zip(completions, solution, strict=True)]


class Math(ORM):
    r"""1 where `--verifier` takes the last `\boxed{}` for an answer of `solution`, which is one or a list; 0 otherwise."""

    answer: Literal["boxed", "tag", "tag_strict"] = "boxed"

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        # Arguments without the flag are those of a user's own program.
        self.verifier: Literal["fast", "math_verify"] = getattr(args, "verifier", "fast")

    def __call__(self, completions: list[str], solution: Any, **kwargs: Any) -> Rewards:
        return [
            grade_math(text, gold, verifier=self.verifier, answer=self.answer).score
            for text, gold in zip(completions, solution, strict=True)
        ]


class MathTag(Math):
    """`math` on the last answer tag, or on the box in it."""

    answer = "tag"


class MathTagStrict(Math):
    """`math_tag`, where the text must also go from thought to answer by a literal `</think> <answer>`, as oat has it."""

    answer = "tag_strict"


class MathAccuracy(ORM):
    """math_verify on the answer tag, or on the text where there is none: ms-swift's `accuracy`, which also reads the
    end of a sentence that is plain text.

    A solution that math_verify cannot read gives no opinion (None), where ms-swift's gives 0: the completion is not to
    blame.
    """

    def __call__(self, completions: list[str], solution: Any, **kwargs: Any) -> Rewards:
        return [_accuracy(*item) for item in zip(completions, solution, strict=True)]


def _accuracy(completion: str, solution: Any) -> float | None:
    accepted = solution if isinstance(solution, list | tuple) else [solution]
    golds = [_stated(str(gold)) for gold in accepted if gold is not None]
    golds = [gold for gold in golds if gold]
    if not golds:
        return None
    answer = _stated(completion, as_whole=False)
    return float(bool(answer) and any(_is_right(answer, gold) for gold in golds))


def _stated(text: str, as_whole: bool = True) -> str:
    """Returns what a text answers behind the thought: its last tag or box, or its last formula with what follows it, or,
    where it is no answer `as_whole`, what stands behind the last `is` of its last line; "" where there is none."""
    text = answered(text)
    written = written_answer(text)
    if written is not None and "\\boxed" in text:
        return written.strip()
    text = (text if written is None else written).rstrip()
    before = 0
    formula = None
    for formula in _FORMULA.finditer(text):
        lead = text[before : formula.start()]
        before = formula.end()
    if formula is not None and _is_last(lead, text[before:]):
        return text[formula.start() :].rstrip("*. ")
    if as_whole or written is not None:
        return text
    _, verb, rest = text.rpartition("\n")[2].rpartition(" is ")
    return rest.rstrip("*. ").lstrip("* ") if verb else ""


def _is_last(lead: str, rest: str) -> bool:
    """Returns whether the words before and behind a formula leave it the only answer of its sentence."""
    lead = re.split(r"[.!;\n]\s", lead)[-1]
    if _LIST.search(lead) or _MORE.search(rest):
        return False
    return not QUALIFIER.search(f"{lead} {rest}")


def _is_right(answer: str, gold: str) -> bool:
    """Returns whether an answer is a gold: by the rule `fast`, or by the library."""
    given = tidied(answer)
    right = tidied(gold)
    if equal(given, right):
        return True
    if max(len(answer), len(gold)) > MAX_READ or contradict(given, right):
        return False
    return verified(_read(gold, right), _read(answer, given))


def _read(written: str, text: str) -> list[Any]:
    """Returns what the library reads in an answer, as it is written and tidied; of words the one number in them."""
    if " " in text and _WORDS.fullmatch(text):
        number = only_number(written)
        return [] if number is None else read_alone(str(number))
    return read_alone(written)


class CosineReward(ORM):
    """Correct answers earn less the longer they are, wrong ones lose less: a half cosine over the length.

    Where `t` is the length, `T = --cosine_max_len`, and `r_0`, `r_T` the values at no and at full length of a correct
    (or a wrong) answer: `r = r_T + (r_0 - r_T) * (1 + cos(pi * t / T)) / 2`.

    Args:
        args: the run's arguments, for the `--cosine_*` flags.
        accuracy_orm: says what is correct (a value of at least 1); the reward `accuracy` by default.

    Raises ValueError: there is no reward `accuracy`.
    """

    def __init__(
        self, args: Any, accuracy_orm: Callable[..., Sequence[float | None]] | None = None
    ) -> None:
        super().__init__(args)
        self.at_zero = {
            True: args.cosine_min_len_value_correct,
            False: args.cosine_min_len_value_wrong,
        }
        self.at_full = {
            True: args.cosine_max_len_value_correct,
            False: args.cosine_max_len_value_wrong,
        }
        self.max_len = args.cosine_max_len
        if accuracy_orm is None:
            if "accuracy" not in orms:
                raise ValueError(
                    "cosine scales the reward accuracy, and no reward of that name is registered"
                )
            accuracy_orm = orms["accuracy"](args=args)
        self.accuracy_orm = accuracy_orm

    def __call__(
        self,
        completions: list[str],
        solution: list[Any],
        response_token_ids: list[Any],
        **kwargs: Any,
    ) -> Rewards:
        accuracies = self.accuracy_orm(
            completions, solution, response_token_ids=response_token_ids, **kwargs
        )
        return [
            None if accuracy is None else self.scaled(accuracy >= 1.0, token_count(ids))
            for accuracy, ids in zip(accuracies, response_token_ids, strict=True)
        ]

    def scaled(self, correct: bool, length: int) -> float:
        """Returns the reward of an answer of `length` tokens; beyond the full length it stays what it is there."""
        start: float = self.at_zero[correct]
        end: float = self.at_full[correct]
        return end + (start - end) * (1 + math.cos(math.pi * min(length / self.max_len, 1))) / 2


class RepetitionPenalty(ORM):
    """`--repetition_max_penalty` times the share of word n-grams (`--repetition_n_grams`) that came before."""

    def __init__(self, args: Any, **kwargs: Any) -> None:
        super().__init__(args)
        self.ngram_size = args.repetition_n_grams
        self.max_penalty = args.repetition_max_penalty

    def __call__(self, completions: list[str], **kwargs: Any) -> Rewards:
        return [
            self.max_penalty * repeated_share(completion, self.ngram_size)
            for completion in completions
        ]


def repeated_share(text: str, size: int) -> float:
    """Returns the share of the text's n-grams (words in lower case) that are repeats; 0 where it has none."""
    words = text.lower().split()
    ngrams = list(zip(*(words[start:] for start in range(size)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


class SoftOverlong(ORM):
    """0 up to `--soft_max_length - --soft_cache_length` tokens, then falling in a line to -1 at `--soft_max_length`
    and beyond."""

    def __init__(self, args: Any, **kwargs: Any) -> None:
        super().__init__(args)
        if not 0 < args.soft_cache_length < args.soft_max_length:
            raise ValueError(
                f"soft_cache_length {args.soft_cache_length} is not below {args.soft_max_length}"
            )
        self.soft_max_length = args.soft_max_length
        self.soft_cache_length = args.soft_cache_length

    def __call__(
        self, completions: list[str], response_token_ids: list[Any], **kwargs: Any
    ) -> Rewards:
        free = self.soft_max_length - self.soft_cache_length
        lengths = map(token_count, response_token_ids)
        return [max(-1.0, min((free - length) / self.soft_cache_length, 0.0)) for length in lengths]


def token_count(ids: Sequence[Any]) -> int:
    """Tokens of a completion: its ids, or the lists of its turns' ids."""
    return sum(map(len, ids)) if ids and isinstance(ids[0], list) else len(ids)


orms.update(
    format=Format,
    react_format=ReActFormat,
    toolbench=ToolBench,
    gym_reward=GymReward,
    agent_reward=AgentReward,
    countdown=Countdown,
    gsm8k=Gsm8k,
    math=Math,
    math_tag=MathTag,
    math_tag_strict=MathTagStrict,
    accuracy=MathAccuracy,
    cosine=CosineReward,
    repetition=RepetitionPenalty,
    soft_overlong=SoftOverlong,
)
