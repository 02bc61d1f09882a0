"""Preprocessing raw rows into training rows, and the account of those that broke."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from datetime import time as time_of_day
from decimal import Decimal
from typing import Any

from swift_r1.data.files import RawRow
from swift_r1.data.image_rows import is_empty, place_images, take_images
from swift_r1.data.images import COLUMN, images_of, placeless
from swift_r1.data.preprocessors import (
    LEARNED_KEYS,
    QUERY_KEYS,
    Row,
    RowFault,
    preprocess_row,
    rename_columns,
)
from swift_r1.data.prompt_templates import THOUGHTS, text_of
from swift_r1.data.sources import DataFlags, Source
from swift_r1.data.tools import CALL_ROLES, with_calls, with_tools
from swift_r1.errors import UsageError, a_kind, describe

# What rewards get beside the dataset's columns; a column of such a name would be overwritten silently.
RESERVED = frozenset(
    (
        "completions",
        "dataset",
        "finish_reason",
        "is_truncated",
        "prompt_id",
        "request_id",
        "response_token_ids",
    )
) | {"rollout_infos", "episode_steps", "trainer_state", "trajectory_inputs"}
TOOL_COLUMNS = frozenset(("num_turns", "tool_calls"))
"""Given to rewards by runs that call tools, which reserves these names too."""
_ROLES = ("system", "user", "assistant", "tool")
_OF_TOOLS = ("tool_calls", "tool_call_id", "name")
# What ms-swift puts into the prompt, and no prompt here has.
_MEDIA = ("videos", "video", "audios", "audio")
# A column that `--columns` gives another name than one of these is meant to lose it; any other keeps it too.
_READ = (
    RESERVED
    | TOOL_COLUMNS
    | {*_MEDIA, "images", "image", "messages", "tools", "chat_template_kwargs"}
)
UNBOUNDED = (
    2**32 - 1
)  # bytes of a row whose length only the chat template knows, or the model's processor
_TAGS = 128  # bytes, more than what a template puts around a thought
_SHOWN = 3


@dataclass
class Drops:
    """How many rows were left out, and where the first three are and what is wrong with them; `answered` of the others
    have an answer behind their prompt, which `swift sft` learns."""

    seen: int = 0
    broken: int = 0
    filtered: int = 0
    answered: int = 0
    examples: list[str] = field(default_factory=list)

    def merge(self, other: Drops) -> None:
        self.seen += other.seen
        self.broken += other.broken
        self.filtered += other.filtered
        self.answered += other.answered
        self.examples += other.examples[: _SHOWN - len(self.examples)]


def preprocessed(
    source: Source, raws: Iterable[RawRow], flags: DataFlags, drops: Drops
) -> Iterator[Row]:
    """Yields training rows of `source`: `messages` without the reference answer, all other columns, `dataset`,
    `prompt_id`. The column `tools` has OpenAI's descriptions, except with an agent template, which describes them
    elsewhere; `images` has those that the tags in the messages stand for (`ImageFile`).

    Broken rows and rows whose preprocessor returns None are counted in `drops`. `prompt_id` is `<label>:<row index>`;
    where a preprocessor makes several rows of one, the second is `<label>:<row index>.1`.

    Raises:
        UsageError: a column has a reserved name, or `--columns` renames one onto another; with `--strict`, a broken row.
    """
    return (row for row, _line in rows_as_json(source, raws, flags, drops))


def rows_as_json(
    source: Source, raws: Iterable[RawRow], flags: DataFlags, drops: Drops
) -> Iterator[tuple[Row, str]]:
    """Yields rows as `preprocessed` does, with the JSON of each, which does not say where its images are."""
    for raw in raws:
        drops.seen += 1
        fault = raw.fault
        rows: list[tuple[Row, str]] = []
        if fault is None:
            try:
                rows = _training_rows(source, raw, flags, drops)
            except UsageError:
                raise
            except RowFault as error:
                fault = str(error)
            except Exception as error:  # noqa: BLE001  a user's preprocessor may raise anything
                fault = describe(error)
        if fault is not None:
            if flags.strict:
                raise UsageError(f"--strict true: dataset {source.name}: {raw.where}: {fault}")
            drops.merge(Drops(broken=1, examples=[f"{raw.where}: {fault}"]))
            continue
        drops.filtered += not rows
        yield from rows


def _training_rows(
    source: Source, raw: RawRow, flags: DataFlags, drops: Drops
) -> list[tuple[Row, str]]:
    """Returns what a raw row becomes, each with its JSON; counts the answers. Raises RowFault, or what the preprocessor
    raises; UsageError where a column has a reserved name."""
    columns = flags.columns
    use = flags.tool_use
    reserved = RESERVED | TOOL_COLUMNS if use.called else RESERVED
    preprocess = source.of_subset.get(raw.subset or "", source.preprocess)
    renamed = _renamed(raw, columns)
    renames = {**getattr(preprocess, "origin_columns", {}), **columns}
    given = {old.lower() for old, new in renames.items() if new != COLUMN} - _READ
    found: list[tuple[Row, str]] = []
    for row in as_list(preprocess_row(preprocess, renamed)):
        row |= {old: raw.row[old] for old in raw.row if old.lower() in given and old not in row}
        _refuse_unread(row)
        images = take_images(row)
        last = _messages(row)[-1:]
        row["messages"] = _conversation(row) if source.whole else _prompt_messages(row)
        drops.answered += any(
            one["role"] == "assistant" and isinstance(one.get("content"), str) for one in last
        )
        if images:
            row["messages"], row[COLUMN] = place_images(
                row["messages"], images, flags.image_rules, source.folders
            )
        if source.pairs:
            row["rejected_messages"] = _rejected(row, bool(images))
        descriptions = use.descriptions(None if is_empty(row.get("tools")) else row["tools"])
        if descriptions and use.agent_template is not None:
            row["messages"] = with_tools(row["messages"], descriptions, use.agent_template)
        elif descriptions or "tools" in row:
            row["tools"] = descriptions
        clashing = sorted(reserved.intersection(row))
        if clashing:
            raise UsageError(
                f"dataset {source.name} has a column {clashing[0]}, a name that rewards get from us; "
                f'rename it: --columns \'{{"{clashing[0]}": "..."}}\''
            )
        row["dataset"] = source.name
        row["prompt_id"] = f"{source.label}:{raw.index}{f'.{len(found)}' if found else ''}"
        found.append((row, _as_json(row)))
    return found


def _renamed(raw: RawRow, columns: Mapping[str, str]) -> Row:
    if not columns:
        return raw.row
    row = rename_columns(raw.row, columns)
    lowered = {old.lower(): new for old, new in columns.items()}
    kept = all(
        row.get(lowered[name.lower()]) is value
        for name, value in raw.row.items()
        if name.lower() in lowered
    )
    if len(row) < len(raw.row) or not kept:
        raise UsageError(
            f"--columns {json.dumps(dict(columns))}: {raw.where} has a column of the new name already"
        )
    return row


def as_list(result: Any) -> list[Row]:
    if result is None:
        return []
    results = result if isinstance(result, list) else [result]
    for one in results:
        if not isinstance(one, dict):
            raise RowFault(f"the preprocessor returned {a_kind(one)}, not a row (dict)")
    return [dict(one) for one in results]


def _refuse_unread(row: Mapping[str, Any]) -> None:
    """Raises RowFault where a column belongs in the prompt but would be missing from it."""
    for name in _MEDIA:
        if not is_empty(row.get(name)):
            raise RowFault(
                f"the column {name} is not read here, images and text are: leave such rows out, or rename the column to "
                f'keep it for the rewards (--columns \'{{"{name}": "..."}}\')'
            )
    if not is_empty(row.get("chat_template_kwargs")):
        raise RowFault(
            "the column chat_template_kwargs is not read: --chat_template_kwargs applies to all rows"
        )


def _prompt_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of a preprocessed row that make its prompt: the trailing reference answer, or call, is cut
    off.

    Raises:
        RowFault: no messages, an unknown role, content that is not text, or no user's turn with text at the end.
    """
    messages = _messages(row)
    end = len(messages)
    given = row.get("completion")  # TRL's
    if isinstance(given, list) and given and list(messages[-len(given) :]) == given:
        end -= len(given)
    answers = ("assistant", *CALL_ROLES)
    while (
        end and isinstance(messages[end - 1], Mapping) and messages[end - 1].get("role") in answers
    ):
        end -= 1  # unchecked: a reference answer may be a number
    prompt = [_message(message) for message in _checked(messages[:end])]
    if not prompt or prompt[-1]["role"] == "system":
        near = next(
            (
                str(key)
                for key in row
                if difflib.get_close_matches(str(key).lower(), QUERY_KEYS, n=1)
            ),
            "...",
        )
        raise RowFault(
            f"no prompt: no column is a question or a user message (other columns: {_columns(row)}); "
            f'--columns \'{{"{near}": "query"}}\' makes one the question'
        )
    if not any(sign.isprintable() and not sign.isspace() for sign in prompt[-1]["content"]):
        raise RowFault(f"the {prompt[-1]['role']} message is empty")
    return prompt


def _conversation(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns all messages of a preprocessed row up to its last answer. `loss` of an answer says whether it is learned.

    Raises:
        RowFault: no messages, an unknown role, content that is not text, no answer, one without a question before it,
            a `loss` or `weight` that is neither true nor false, or one of a message that is no answer.
    """
    found = []
    for message in _checked(_messages(row)):
        said = _message(message)
        for key in LEARNED_KEYS:
            learned = message.get(key)
            if learned is None:
                continue
            if learned not in (True, False):
                raise RowFault(f"{key} of a message must be true or false, not {learned!r}")
            if said["role"] != "assistant":
                raise RowFault(
                    f"{key} of a message of the {said['role']}: only answers are learned"
                )
            if said.setdefault("loss", bool(learned)) != learned:
                raise RowFault("loss and weight of a message contradict each other")
        found.append(said)
    while found and found[-1]["role"] != "assistant":
        found.pop()
    if not found:
        raise RowFault(
            f"no answer to learn: there is no message of the assistant (other columns: {_columns(row)}); --columns "
            '\'{"...": "response"}\' makes one the answer'
        )
    if next(one["role"] for one in found if one["role"] != "system") == "assistant":
        raise RowFault("the assistant's message comes first: there is no question")
    return found


def _rejected(row: Row, images: bool) -> list[dict[str, Any]]:
    """Returns the conversation with the rejected answer, of a row whose `messages` end with the chosen one; takes
    `rejected_response` out.

    Raises:
        RowFault: there is none, there are two, it is the chosen one, or as `_conversation`.
    """
    text, given = row.pop("rejected_response", None), row.get("rejected_messages")
    if is_empty(text) == is_empty(given):
        both = "both rejected_response and rejected_messages" if given else "no rejected answer"
        raise RowFault(
            f"{both}: a row has one of rejected_response, rejected_messages, or chosen and rejected (other columns: "
            f"{_columns(row)})"
        )
    messages: Any = given
    if is_empty(given):
        messages = [*row["messages"][:-1], {"role": "assistant", "content": text}]
    elif images:
        raise RowFault(
            "rejected_messages of a row with images: give the answer as rejected_response"
        )
    rejected = _conversation({"messages": messages})
    if rejected == row["messages"]:
        raise RowFault("the rejected answer is the chosen one")
    return rejected


def _messages(row: Mapping[str, Any]) -> Sequence[Any]:
    messages = row.get("messages")
    if not isinstance(messages, list | tuple):
        raise RowFault(f"no messages after preprocessing (other columns: {_columns(row)})")
    return messages


def _columns(row: Mapping[str, Any]) -> str:
    return ", ".join(str(key) for key in row if key != "messages") or "none"


def _checked(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns messages with their calls (`with_calls`). Raises RowFault where one lacks a role."""
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise RowFault("a message is not an object with role and content")
    return with_calls([{"content": None, **message} for message in messages])


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message["role"]
    if role not in _ROLES:
        raise RowFault(f"unknown role {role!r} in messages")
    try:
        content = text_of(message["content"])
    except ValueError as error:
        raise RowFault(f"the content of the {role} message {error}") from error
    if "\0" in content:
        raise RowFault(f"the content of the {role} message has a NUL character in it")
    own = {"role": role, "content": content}
    own |= {key: message[key] for key in _OF_TOOLS if message.get(key)}
    thoughts = {message[key] for key in THOUGHTS if message.get(key)}
    if len(thoughts) > 1 or not all(isinstance(one, str) for one in thoughts):
        raise RowFault(f"the {role} message has no one text as its {' or '.join(THOUGHTS)}")
    return own | dict.fromkeys(THOUGHTS[: len(thoughts)], *thoughts)


def _as_json(row: Row) -> str:
    """Returns a row as it is stored; RowFault where a value cannot be written as JSON."""
    try:
        text = _ENCODER.encode(placeless(row))
        text.encode()  # of half a character there are no bytes
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise RowFault(_why_not_kept(row, error)) from error


def _plain(value: Any) -> Any:
    """Returns a value that JSON has no form for as the nearest one that it has."""
    if isinstance(value, datetime | date | time_of_day):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # numpy's
        return value.tolist()
    raise TypeError(type(value).__name__)


_ENCODER = json.JSONEncoder(default=_plain, ensure_ascii=False)


def _why_not_kept(row: Row, error: Exception) -> str:
    for name, value in row.items():
        try:
            _ENCODER.encode({name: value}).encode()
        except UnicodeEncodeError:
            where = (
                "a message"
                if name == "messages"
                else f"the column {name.encode('utf-8', 'replace').decode()}"
            )
            return f"{where} has half a character (a lone surrogate) in it"
        except (TypeError, ValueError, RecursionError):
            return f"the column {name} holds a value that JSON cannot: {type(value).__name__} ({error})"
    return f"it cannot be written as JSON: {error}"


def prompt_key(row: Mapping[str, Any]) -> str:
    """Returns what makes two rows the same prompt."""
    messages = [
        [one["role"], one["content"], *filter(None, map(one.get, ("tool_calls", THOUGHTS[0])))]
        for one in row["messages"]
    ]
    images = [image.sha256 for image in images_of(row)]
    return json.dumps([*messages, *filter(None, [row.get("tools"), images])])


def content_bytes(row: Mapping[str, Any]) -> int:
    """Returns the bytes of the contents of a row's messages; with tools or calls more than any prompt has."""
    if row.get("tools") or any("tool_calls" in message for message in row["messages"]):
        return UNBOUNDED
    thoughts = [one[THOUGHTS[0]] for one in row["messages"] if one.get(THOUGHTS[0])]
    texts = [*thoughts, *(message["content"] for message in row["messages"])]
    return sum(len(text.encode()) for text in texts) + len(thoughts) * _TAGS
