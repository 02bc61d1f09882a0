"""From a dataset's row to a row with `messages`: preprocessors with ms-swift's names and meaning.

Before `preprocess(row)` runs, columns are renamed: first by the user's `columns`, then by the class's own synonyms
(`question`, `problem`, `prompt`, ... become `query`; `answer`, `target`, `output`, ... become `response`). When two
columns of a row would get the same name, neither is renamed, as in ms-swift. `solution` also stays as a column
where it becomes `response`, because rewards ask for it.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from swift_r1.data.prompt_templates import THOUGHTS

Row = dict[str, Any]
Preprocessed = Row | list[Row] | None
Preprocess = Callable[[Row], Preprocessed]


class RowFault(ValueError):
    """A row that cannot be trained on, and why."""


LEARNED_KEYS = ("loss", "weight")  # ms-swift's and OpenAI's
SYSTEM_KEYS = ("system", "system_prompt")
TOOL_CALL_KEYS = ("tool_calls", "function_call")
QUERY_KEYS = ("query", "prompt", "input", "instruction", "question", "problem")
RESPONSE_KEYS = (
    *("response", "answer", "output", "targets", "target", "answer_key", "answers", "solution"),
    *("text", "completion", "content"),
)


class RowPreprocessor:
    """Base of all preprocessors: override `preprocess`.

    Args:
        columns: dataset column -> name wanted, applied before the class's own synonyms.
    """

    def __init__(self, *, columns: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self.origin_columns: dict[str, str] = dict(columns or {})
        self.columns: dict[str, str] = {**self.origin_columns, "image": "images"}

    def preprocess(self, row: Row) -> Preprocessed:
        """Returns a row with `messages` (OpenAI's chat form) and its other columns, a list of such rows, or None to
        drop it."""
        return row

    def __call__(self, row: Mapping[str, Any]) -> Preprocessed:
        return preprocess_row(self, row)


class ResponsePreprocessor(RowPreprocessor):
    """Rows with a `query` (a text, or messages as in rows for TRL and verl) and perhaps a `system`, a `history` and a
    `response` (the reference answer)."""

    def __init__(self, *, columns: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(columns=columns, **kwargs)
        self.columns.update(dict.fromkeys(SYSTEM_KEYS, "system"))
        self.columns.update(dict.fromkeys(QUERY_KEYS, "query"))
        self.columns.update(dict.fromkeys(RESPONSE_KEYS, "response"))

    def preprocess(self, row: Row) -> Preprocessed:
        query = row.pop("query", None)
        response = row.pop("response", None)
        if isinstance(response, list | tuple) and not _are_messages(response):
            response = response[0] if response else None
        if _are_messages(query) and response is not None:  # only what answers them is learned
            query = [{"loss": False, **one} if one["role"] == "assistant" else one for one in query]
        history = _parsed(row.get("history") or [])
        system = row.pop("system", None)
        messages = [{"role": "system", "content": system}] if system is not None else []
        for turn in (*history, (query, response)):
            for role, said in zip(("user", "assistant"), turn, strict=True):
                if _are_messages(said):
                    messages.extend(said)
                elif said is not None:
                    messages.append({"role": role, "content": said})
        row["messages"] = messages
        return row


class PreferencePreprocessor(ResponsePreprocessor):
    """Rows with a `chosen` and a `rejected` answer, as for TRL: texts or messages, behind a `query` or with it."""

    def preprocess(self, row: Row) -> Preprocessed:
        chosen, rejected = row["chosen"], row["rejected"]
        if _are_messages(chosen) != _are_messages(rejected):
            raise RowFault("chosen and rejected are a text and messages: give both in one form")
        made = super().preprocess(row | {"response": chosen})
        if not isinstance(made, dict):
            return made
        if not _are_messages(rejected):
            return made | {"rejected_response": rejected}
        other = super().preprocess(row | {"response": rejected})
        assert isinstance(other, dict)
        return made | {"rejected_messages": other["messages"]}


def _are_messages(said: Any) -> bool:
    return (
        isinstance(said, list)
        and bool(said)
        and all(isinstance(one, Mapping) and "role" in one for one in said)
    )


class AlpacaPreprocessor(ResponsePreprocessor):
    """Rows with `instruction`, `input` and `output`."""

    def __init__(self, *, columns: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(columns=columns, **kwargs)
        for key in ("instruction", "input", "output"):
            if key not in self.origin_columns:
                del self.columns[key]

    @classmethod
    def concat_inst_input(cls, instruction: str | None, input_: str | None) -> str | None:
        """Returns the instruction and its input on separate lines."""
        return f"{instruction}\n{input_}" if instruction and input_ else instruction or input_

    def preprocess(self, row: Row) -> Preprocessed:
        instruction, input_, output = (row.get(key) for key in ("instruction", "input", "output"))
        if output is not None:
            row["response"] = output
        row["query"] = self.concat_inst_input(instruction, input_)
        return super().preprocess(row)


def _parsed(value: Any) -> Any:
    """Returns messages or a history, which a file may hold as text: JSON, else a Python literal (no code is run)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        try:
            return ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(
                "messages (or a history) as text that is neither JSON nor a Python list"
            ) from None


class MessagesPreprocessor(RowPreprocessor):
    """Rows with a conversation: OpenAI's `messages`, or ShareGPT's `conversations` in its two forms."""

    def __init__(
        self,
        *,
        role_key: str | None = None,
        content_key: str | None = None,
        user_role: str | None = None,
        assistant_role: str | None = None,
        system_role: str = "system",
        columns: Mapping[str, str] | None = None,
        repair_messages: Callable[[Any], Any] = _parsed,
        inner_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(columns=columns, **kwargs)
        self.role_keys = [role_key] if role_key else ["role", "from"]
        self.content_keys = [content_key] if content_key else ["content", "value"]
        self.user_roles = [user_role] if user_role else ["user", "human"]
        self.assistant_roles = [assistant_role] if assistant_role else ["assistant", "gpt", "bot"]
        self.system_role = system_role
        self.repair_messages = repair_messages
        self.inner_key = inner_key
        self.columns.update(
            dict.fromkeys(("messages", "conversation", "conversations"), "messages")
        )
        self.columns.update(dict.fromkeys((*SYSTEM_KEYS, system_role), "system"))

    def preprocess(self, row: Row) -> Preprocessed:
        messages = row["messages"]
        if self.inner_key is not None:
            messages = messages[self.inner_key]
        messages = self.repair_messages(messages)
        if not messages:
            return None
        system = row.pop("system", None)
        standard = [one for message in messages for one in self._standard(message)]
        if system is not None and standard[0]["role"] != "system":
            standard.insert(0, {"role": "system", "content": system})
        row["messages"] = standard
        return row

    def _standard(self, message: Mapping[str, Any]) -> list[Row]:
        role = _first(message, self.role_keys)
        if role is None:  # a pair of turns in one object
            user = _first(message, self.user_roles)
            assistant = _first(message, self.assistant_roles)
            return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        own = {
            "system": [self.system_role],
            "user": self.user_roles,
            "assistant": self.assistant_roles,
        }
        role = next((standard for standard, names in own.items() if role in names), role)
        kept = (*TOOL_CALL_KEYS, "tool_call_id", "name", *THOUGHTS)
        more = {key: message[key] for key in kept if message.get(key)}
        more |= {key: message[key] for key in LEARNED_KEYS if message.get(key) is not None}
        return [{"role": role, "content": _first(message, self.content_keys), **more}]


def _first(message: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((message[key] for key in keys if key in message), None)


class AutoPreprocessor(RowPreprocessor):
    """Chooses by the columns: a conversation, a chosen and a rejected answer, Alpaca's three columns, else query and
    response."""

    def __init__(self, *, columns: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(columns=columns, **kwargs)
        self._messages = MessagesPreprocessor(**kwargs)
        self._alpaca = AlpacaPreprocessor(**kwargs)
        self._preference = PreferencePreprocessor(**kwargs)
        self._response = ResponsePreprocessor(**kwargs)

    def preprocess(self, row: Row) -> Preprocessed:
        if not row.keys().isdisjoint(("conversation", "conversations", "messages")):
            return preprocess_row(self._messages, row)
        if "chosen" in row and "rejected" in row:
            return preprocess_row(self._preference, row)
        if "instruction" in row and "input" in row:
            return preprocess_row(self._alpaca, row)
        return preprocess_row(self._response, row)


def preprocess_row(function: Preprocess, row: Mapping[str, Any]) -> Preprocessed:
    """Renames the columns of one row as `function.columns` says, then calls it; what it makes also has the renamed
    columns under their own names. Plain callables get the row as is.

    The row itself is not changed. Whatever the preprocessor raises is raised.
    """
    preprocess: Preprocess | None = getattr(function, "preprocess", None)
    if preprocess is None:
        return function(dict(row))
    own = rename_columns(row, getattr(function, "origin_columns", {}))
    synonyms = getattr(function, "columns", {})
    renamed = rename_columns(own, synonyms)
    if "solution" in row:
        renamed.setdefault("solution", row["solution"])  # also for the preprocessor, as in ms-swift
    result = preprocess(renamed)
    for made in result if isinstance(result, list) else [result]:
        if isinstance(made, dict):
            made |= {
                name: value
                for name, value in own.items()
                if synonyms.get(name.lower(), "images") != "images" and name not in made
            }
    return result


def rename_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> Row:
    """Returns a copy of `row` with columns renamed; names match whatever their case."""
    if not columns:
        return dict(row)
    names = _new_names(tuple(row), tuple(columns.items()))
    return {names[key]: value for key, value in row.items()}


@lru_cache(maxsize=1024)  # the rows of a dataset have the same few sets of columns
def _new_names(keys: tuple[str, ...], columns: tuple[tuple[str, str], ...]) -> dict[str, str]:
    by_lower = {key.lower(): key for key in keys}
    wanted = {by_lower[old.lower()]: new for old, new in columns if old.lower() in by_lower}
    times = Counter(wanted.values())
    renamed = {old: new for old, new in wanted.items() if times[new] == 1}
    taken = {key for key in keys if key not in renamed}
    return {
        key: renamed[key] if key in renamed and renamed[key] not in taken else key for key in keys
    }
