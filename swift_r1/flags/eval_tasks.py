"""What is evaluated: one data set, how it is asked, and who says what is right. Read from flags; nothing is loaded."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from swift_r1.data.prompt_templates import TEMPLATES, prompt_template, system_message
from swift_r1.data.sources import parse_dataset
from swift_r1.errors import UsageError, no_such
from swift_r1.flags.data import check_kwargs
from swift_r1.flags.fields import flag, flag_specs, from_config

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
BENCHMARKS: Mapping[str, str] = {
    "gsm8k": "gsm8k",
    "math500": "math",
    "aime24": "math",
    "amc23": "math",
    "minerva": "math",
    "olympiad_bench": "math",
    "asdiv": "gsm8k",
}
"""The benchmarks by the name of their data set, and the reward function that says 1 for a right answer."""

PROMPT_FLAGS = (
    "system",
    "prompt_template",
    "response_prefix",
    "enable_thinking",
    "chat_template_kwargs",
)
"""The fields of `EvalTask` that are flags of its command too: what a question is written in."""

# A template that asks for an answer in tags is answered in tags.
_IN_TAGS = {"r1": {"math": "math_tag"}}


@dataclass(frozen=True, slots=True)
class EvalTask:
    """One evaluated data set; the fields are also the keys of its JSON form on the command line."""

    name: str = flag("", "in the names of metrics and in files; no slash")
    dataset: str = flag("", "a registered data set, or a file")
    benchmark: str | None = flag(
        None, "whose columns a file has, where it is named by `benchmark=file`"
    )
    reward: str | None = flag(None, "the reward function; None for the run's own")
    limit: int | None = flag(None, "the first so many questions; None for all", at_least=1)
    num_generations: int = flag(1, "completions per question", at_least=1)
    temperature: float = flag(1.0, "sampling temperature", at_least=0)
    top_p: float = flag(
        1.0,
        "nucleus sampling: keep the likeliest tokens up to this probability mass",
        more_than=0,
        at_most=1,
    )
    max_completion_length: int = flag(512, "maximum completion length in tokens", at_least=1)
    instruction: str = flag("", "put below each question")
    system: str | None = flag(None, "this and the following: as the flags of these names")
    prompt_template: str | None = flag(None, "")
    response_prefix: str = flag("", "")
    enable_thinking: bool | None = flag(None, "")
    chat_template_kwargs: dict[str, Any] = flag({}, "", check=check_kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, and a hash of the template where it is a file."""
        own = asdict(self)
        if self.prompt_template is not None and self.prompt_template not in TEMPLATES:
            text = prompt_template(self.prompt_template)
            own["prompt_template_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        return own


_FIELDS = {name: spec for name, spec in flag_specs(EvalTask).items() if name != "benchmark"}


def read_tasks(flag: str, values: Sequence[str], defaults: Mapping[str, Any]) -> list[EvalTask]:
    """Returns the tasks that the values of a flag name: `name`, `file.jsonl`, `benchmark=file.jsonl`, each with `#N`
    for the first N questions, or a JSON object with `dataset` and other fields of `EvalTask`.

    Args:
        flag: for messages, with dashes.
        defaults: of the fields that a value does not set; `reward` is that of data sets which are not benchmarks; an
            `instruction` of None is the benchmark's own.

    Raises:
        UsageError: every value that cannot be read, one per line.
    """
    tasks: list[EvalTask] = []
    faults: list[str] = []
    for value in values:
        try:
            tasks.append(_task(value, defaults))
        except UsageError as error:
            faults += [f"{flag} {value}: {fault}" for fault in error.faults]
    names = [task.name for task in tasks]
    for name in sorted({name for name in names if names.count(name) > 1}):
        faults.append(
            f'{flag} has two of the name {name}: give one another, \'{{"name": ..., "dataset": ...}}\''
        )
    if faults:
        raise UsageError(*faults)
    return tasks


def _task(value: str, defaults: Mapping[str, Any]) -> EvalTask:
    own = _object(value) if value.lstrip().startswith("{") else {"dataset": value}
    text = str(own["dataset"])
    benchmark, equals, rest = text.partition("=")
    if not equals or "/" in benchmark:
        benchmark = ""
        rest = text
    elif benchmark not in BENCHMARKS:
        raise UsageError(no_such("benchmark", benchmark, BENCHMARKS))
    try:
        spec = parse_dataset(rest)
    except UsageError as error:
        raise UsageError(*(fault.split(": ", 1)[-1] for fault in error.faults)) from error
    dataset = spec.raw.rpartition("#")[0] if spec.sample is not None else spec.raw
    kind = benchmark or spec.name
    label = benchmark or (PurePath(spec.name).stem if spec.is_file else spec.name)
    filled = {key: item for key, item in defaults.items() if key in _FIELDS}
    reward = BENCHMARKS.get(kind, filled.get("reward"))
    instruction = filled.get("instruction")
    filled |= {"name": re.sub(r"[^\w.+-]", "_", label), "reward": reward}
    if spec.sample is not None:
        filled["limit"] = spec.sample
    filled |= own | {"dataset": dataset, "benchmark": benchmark or None}
    if "enable_thinking" in own.get("chat_template_kwargs", ()) and "enable_thinking" not in own:
        filled["enable_thinking"] = None  # not the run's
    if "reward" not in own:
        in_tags = _IN_TAGS.get(str(filled.get("prompt_template")), {})
        filled["reward"] = in_tags.get(str(reward), reward)
    if own.get("prompt_template") is not None:
        prompt_template(own["prompt_template"])
    if "system" in own:
        filled["system"] = system_message(own["system"])
    if "instruction" not in own and instruction is None:
        # A template of another form than the chat has its own words for that.
        plain = (
            kind in BENCHMARKS and not filled.get("prompt_template") and not filled.get("system")
        )
        filled["instruction"] = BOXED if plain else ""
    return EvalTask(**filled)


def _object(text: str) -> dict[str, Any]:
    try:
        own: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"not a JSON object: {error.msg} at {error.pos}") from error
    if not isinstance(own.get("dataset"), str):
        raise UsageError('the JSON object lacks "dataset", a name or a file')
    unknown = sorted(own.keys() - _FIELDS)
    if unknown:
        raise UsageError(no_such("key", unknown[0], sorted(_FIELDS)))
    for key, item in own.items():
        try:
            own[key] = from_config(_FIELDS[key], item)
        except ValueError as error:
            raise UsageError(f"{key} {error}") from error
    if "name" in own and not re.fullmatch(r"[\w.+-]+", own["name"]):
        raise UsageError(f"name {own['name']!r} must be of letters, digits and . + - _")
    return own


def limited(value: str, limit: int | None) -> str:
    """Returns a value of `read_tasks` with `limit` where it has none of its own; one that cannot be read is left as it
    is."""
    if limit is None:
        return value
    if value.lstrip().startswith("{"):
        try:
            own = json.loads(value)
        except json.JSONDecodeError:
            return value
        has = "limit" in own or re.search(r"#\d+$", str(own.get("dataset")))
        return value if has else json.dumps(own | {"limit": limit}, ensure_ascii=False)
    return value if re.search(r"#\d*$", value) else f"{value}#{limit}"
