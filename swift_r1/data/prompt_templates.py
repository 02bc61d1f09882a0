r"""Chat templates (Jinja): the prompt formats `r1`, `qwen_math` and `no`, files, and what a template puts around the
model's turn.

`r1` is the prompt of DeepSeek-R1-Zero (arXiv 2501.12948, table 1), `qwen_math` that of the Qwen2.5-Math models
(arXiv 2409.12122) with `\boxed{}`, `no` the bare question; arXiv 2503.20783 compares the three. All render several
turns too. A system message replaces the format's own instruction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from swift_r1.errors import UsageError, a_kind

_R1_INSTRUCTION = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    "<think> reasoning process here </think> <answer> answer here </answer>."
)
_QWEN_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."

_SPLIT = (
    "{%- set own = messages[0]['content'] if messages[0]['role'] == 'system' else instruction -%}"
    "{%- set turns = messages[1:] if messages[0]['role'] == 'system' else messages -%}"
)
_R1 = (
    "{%- set instruction = '" + _R1_INSTRUCTION + "' -%}" + _SPLIT + "{{- own -}}"
    "{%- for turn in turns -%}"
    "{%- if turn['role'] == 'assistant' -%}{{- '\\nAssistant: ' + turn['content'] -}}"
    "{%- else -%}{{- '\\nUser: ' + turn['content'] -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '\\nAssistant:' -}}{%- endif -%}"
)
_QWEN_MATH = (
    "{%- set instruction = '"
    + _QWEN_INSTRUCTION.replace("\\", "\\\\")
    + "' -%}"
    + _SPLIT
    + "{{- '<|im_start|>system\\n' + own + '<|im_end|>\\n' -}}"
    "{%- for turn in turns -%}"
    "{{- '<|im_start|>' + turn['role'] + '\\n' + turn['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
_NO = (
    "{%- for turn in messages -%}"
    "{%- if not loop.first and turn['role'] != 'assistant' -%}{{- '\\n' -}}{%- endif -%}"
    "{{- turn['content'] -}}"
    "{%- endfor -%}"
)
TEMPLATES = {"r1": _R1, "qwen_math": _QWEN_MATH, "no": _NO}

_CUT = "swift-r1-cut-9d27e4"  # in rendered text: tokens end here
# a message's text where only what the template puts after it is wanted
_MARKER = "swift-r1-text-c41f0a"
_ASKED = {"role": "user", "content": "x"}
PLAIN_TURN = (_ASKED, {"role": "assistant", "content": "x"})
_CALL = {"type": "function", "id": "call00000", "function": {"name": "x", "arguments": "{}"}}
CALLING_TURN = (_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]})
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""What templates and data call the thought of an answer."""
_NO_TEXT = re.compile("(?<![a-z])(image|img|video|audio|vision|media|patch)", re.IGNORECASE)
_THINK = r"[\w:]*(?:think|thought|reason)[\w:]*"
_THOUGHT = re.compile(rf".*</{_THINK}>", re.DOTALL)
_CUT_TAG = re.compile("<[^<>]*$")
_EMPTY_THOUGHT = re.compile(
    r"\s*(?=.*(?:think|thought|reason))<[^<>]*>\s*(?:\w+\s*)?<[^<>]*>\s*", re.IGNORECASE
)
_OPENED = re.compile(rf"<{_THINK}>\s*$")
_OPENING = re.compile(rf"(?:<{_THINK}>\s*)?(?:</{_THINK}>\s*)?$")
# transformers' tags around what the model says
_SAID = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_RENDERED = frozenset(("messages", "tools", "add_generation_prompt"))
# to each template
_GIVEN = _RENDERED | {"documents", "continue_final_message", "raise_exception", "strftime_now"}


def with_own_words(
    template: str, system: str | None, response_prefix: str, arguments: Mapping[str, Any]
) -> str:
    """Returns a chat template that itself adds what `--system` and `--response_prefix` added to it, and takes
    `arguments` where it is given none.

    A conversation's own system message comes before `system`; the prefix opens the model's turn.
    """
    # JSON strings are Jinja strings too. No dashes: they would strip a newline that the template ends with.
    before = after = ""
    for name, value in arguments.items():  # the literals of Python are Jinja's
        before += (
            "{% if "
            + name
            + " is not defined %}{% set "
            + name
            + " = "
            + repr(value)
            + " %}{% endif %}"
        )
    if system:
        message = "{'role': 'system', 'content': " + json.dumps(system, ensure_ascii=False) + "}"
        before += (
            "{% if messages[0]['role'] != 'system' %}{% set messages = ["
            + message
            + "] + messages %}{% endif %}"
        )
    if response_prefix:
        after = (
            "{% if add_generation_prompt %}{{ "
            + json.dumps(response_prefix, ensure_ascii=False)
            + " }}{% endif %}"
        )
    # Jinja drops one newline at the end of a template; here it would be in the middle.
    return before + template.removesuffix("\n") + after


def system_message(value: str | None) -> str | None:
    r"""Returns the text of `--system`, as in ms-swift: a .txt file's content as it is, else the value with `\n` as
    newlines.

    Raises UsageError where the file cannot be read.
    """
    if value is None or not value.endswith(".txt"):
        return None if value is None else newlines(value)
    try:
        return Path(value).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(
            f"--system {value}: {error.strerror or error} (a value that ends in .txt is the path of a file)"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--system {value}: not UTF-8 at byte {error.start}") from error


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError where template arguments have a name that no template can read, or one of what is rendered."""
    for name in arguments:
        if not name.isidentifier() or name in _RENDERED:
            raise ValueError(f"has {name!r}, which is not an argument of a chat template")


def template_arguments(enable_thinking: bool | None, others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `--enable_thinking` and `--chat_template_kwargs` say together."""
    return {**others} if enable_thinking is None else {**others, "enable_thinking": enable_thinking}


def check_read(arguments: Iterable[str], templates: Iterable[str]) -> None:
    """Raises UsageError where the templates read one of the arguments nowhere."""
    wanted = set(arguments)
    if not wanted:
        return
    read = frozenset[str]().union(*map(_variables, templates))
    unread = sorted(wanted - read)
    if unread:
        known = sorted(name for name in read - _GIVEN if not name.endswith("_token"))
        raise UsageError(
            f"the chat template does not read {', '.join(unread)}, so it would have no effect: leave it out (the "
            f"template reads {', '.join(known) or 'no arguments'})"
        )


@lru_cache(maxsize=16)
def _variables(template: str) -> frozenset[str]:
    """Returns what a template reads of what it is given."""
    from jinja2.meta import find_undeclared_variables

    return frozenset(find_undeclared_variables(_parsed(template)))


def newlines(value: str) -> str:
    r"""Returns a value of the command line with its `\n` as newlines, as in ms-swift."""
    return value.replace("\\n", "\n")


def prompt_template(value: str) -> str:
    """Returns the Jinja text of a `--prompt_template`; UsageError where there is no such template, or it is not
    Jinja."""
    if value in TEMPLATES:
        return TEMPLATES[value]
    path = Path(value).expanduser()
    if not path.is_file():
        raise UsageError(
            f"--prompt_template {value}: write {', '.join(TEMPLATES)}, or the path of a Jinja file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt_template {value}: cannot be read: {error}") from error
    from jinja2 import TemplateSyntaxError

    try:
        _parsed(text)
    except TemplateSyntaxError as error:
        raise UsageError(f"--prompt_template {value}:{error.lineno}: {error.message}") from error
    return text


def _parsed(template: str) -> Any:
    """Returns the syntax tree of a template."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(
        _SAID.sub("", template)
    )


Renderer = Callable[[Sequence[Mapping[str, str]], bool], str]
"""The chat template: messages to text, on request with the start of the model's next turn."""


def rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **given: Any
) -> str:
    """Returns messages in the tokenizer's chat template, with its further variables; UsageError where it refuses
    them. The text is for `token_ids` and `plain`: a message is cut there where it spells a token that stands for a
    part of an image, video or sound, and what tools answered where it spells any token that has a meaning."""
    import jinja2  # `from` looks for a module of that name each time

    in_parts = _wants_parts(tokenizer, str(given.get("chat_template") or tool_template(tokenizer)))
    try:
        told = [_for_template(message, tokenizer, in_parts) for message in in_call_order(messages)]
        return str(
            tokenizer.apply_chat_template(
                told, tokenize=False, add_generation_prompt=add_generation_prompt, **given
            )
        )
    except (jinja2.TemplateError, TypeError, RecursionError) as error:
        # TypeError: text put together with what is none; RecursionError: a macro that calls itself
        roles = ", ".join(message["role"] for message in messages)
        raise UsageError(f"the chat template cannot render messages of {roles}: {error}") from error


def token_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Returns the tokens of rendered text; no special ones are added."""
    ids: list[int] = []
    for part in pieces(text):
        ids += tokenizer(part, add_special_tokens=False)["input_ids"]
    return tuple(ids)


def pieces(text: str) -> list[str]:
    """Returns rendered text in the pieces that are tokenised each by itself."""
    return text.split(_CUT)


def plain(text: str) -> str:
    """Rendered text as the model reads it."""
    return text.replace(_CUT, "")


def text_of(content: Any) -> str:
    """Returns the text of a message's content, which may be a list of parts of text. Raises ValueError where it has
    others."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else []
    if parts and all(isinstance(part, Mapping) for part in parts):
        others = sorted({str(part.get("type")) for part in parts} - {"text"})
        if others:
            raise ValueError(f"has parts of {', '.join(others)}, and only text is read here")
        if all(isinstance(part.get("text"), str) for part in parts):
            return "".join(part["text"] for part in parts)
    raise ValueError(f"is {a_kind(content)}, not text")


@lru_cache(maxsize=16)
def _wants_parts(tokenizer: Any, template: str) -> bool:
    """Returns whether a template renders contents only as lists of parts, as those of some multimodal models do."""
    from jinja2 import TemplateError

    def renders(texts: Sequence[str], in_parts: bool) -> bool:
        said = [{"type": "text", "text": text} for text in texts]
        contents: Sequence[Any] = [[one] for one in said] if in_parts else texts
        messages = [
            {"role": role, "content": one}
            for role, one in zip(("user", "assistant"), contents, strict=False)
        ]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template)
        except (TemplateError, TypeError, RecursionError):
            return False
        return all(one in text for one in texts)

    asked = f"{_MARKER}1"
    answered = f"{_MARKER}2"
    if not template or renders([asked, answered], False):
        return False
    return renders([asked, answered], True) or (
        not renders([asked], False) and renders([asked], True)
    )


def _for_template(message: Mapping[str, Any], tokenizer: Any, in_parts: bool) -> dict[str, Any]:
    """Returns a message as chat templates want it: the arguments of a tool call as an object, where they are the JSON
    of one, and content that is text, or a list of parts, of which images hold nothing."""
    own = dict(message)
    calls = own.get("tool_calls")
    if calls:
        own["tool_calls"] = [{**one, "function": _with_object(one["function"])} for one in calls]
        own["content"] = own.get("content") or ""
    markup = _markup(tokenizer, own.get("role") == "tool")

    def cut(part: Mapping[str, Any]) -> dict[str, Any]:
        text = {"text": markup.sub(rf"\1{_CUT}", part["text"])} if "text" in part else {}
        return {**part, **text}

    content = own.get("content")
    if isinstance(content, str):
        part = cut({"type": "text", "text": content})
        own["content"] = [part] if in_parts else part["text"]
    elif isinstance(content, list):
        own["content"] = list(map(cut, content))
    return own


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):  # the model wrote it, and reads it again as it was
            return dict(function)
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else dict(function)


@lru_cache(maxsize=8)
def _markup(tokenizer: Any, whole: bool) -> re.Pattern[str]:
    """Returns the first character of each text that is one token with a meaning: special, or a tag. Without `whole`
    only of those that stand for a part of an image, video or sound."""
    names = {
        str(about.content)
        for about in getattr(tokenizer, "added_tokens_decoder", {}).values()
        if about.special or re.fullmatch(r"<.+>", about.content)
    }
    names |= {str(one) for one in getattr(tokenizer, "all_special_tokens", ())}
    names = names if whole else set(filter(_NO_TEXT.search, names))
    wanted = "|".join(re.escape(one) for one in sorted(names) if len(one) > 1)
    return re.compile(f"(?={wanted or '(?!)'})(.)", re.DOTALL)


def templates_of(tokenizer: Any) -> list[str]:
    """Returns the texts of a tokenizer's chat templates: one, or several by name."""
    own = getattr(tokenizer, "chat_template", None) or {}
    return [own] if isinstance(own, str) else list(own.values())


def tool_template(tokenizer: Any) -> str:
    """Returns the text of the chat template that renders tools: where there are several by name, that of tool_use."""
    own = getattr(tokenizer, "chat_template", None) or ""
    return own if isinstance(own, str) else str(own.get("tool_use") or own.get("default") or "")


def has_tools(template: str) -> bool:
    """Returns whether a template has a place for tools."""
    return re.search(r"\btools\b", template) is not None


def renders_tools(tokenizer: Any) -> bool:
    return has_tools(tool_template(tokenizer))


def opening_of(render: Renderer) -> str:
    r"""Returns the reasoning tags with which the template begins the model's turn: `<think>\n` of QwQ and R1-Distill,
    an empty block where thinking is switched off, and "" of most. They are in the prompt, and part of what the model
    says."""
    text = render([{"role": "user", "content": _MARKER}], True)
    # Only what follows the message: a question may end in such a tag too.
    found = _OPENING.search(text.rpartition(_MARKER)[2])
    return found[0] if found else ""


def closed_thought(text: str) -> str:
    """Returns the beginning of a text up to the last tag that closes a thought; "" without any."""
    found = _THOUGHT.match(text)
    return found[0] if found else ""


def opens_thought(prompt: str) -> bool:
    """Returns whether a prompt ends in a tag that opens a thought."""
    return _OPENED.search(prompt) is not None


def common_beginning(prompt: str, text: str) -> str:
    """Returns what a prompt and a text begin with, up to a whole token or tag where that is not the whole prompt."""
    common = "".join(
        one
        for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False))
    )
    return common if common == prompt else _CUT_TAG.sub("", common)


def rewritten_beginning(
    render: Renderer, messages: Sequence[Mapping[str, Any]], prompt: str
) -> str:
    """Returns what stands before the last message, an answer, where the template renders earlier ones otherwise once it
    is there (gpt-oss leaves thoughts out behind a call); "" where the answer does not begin as in `prompt`."""
    *earlier, asked, answer = messages
    opening = prompt.removeprefix(common_beginning(prompt, render([*earlier, asked], False)))
    marked = (_marked(one)[0] for one in (asked, answer))
    before, _, rest = render([*earlier, *marked], False).partition(_MARKER)
    between, opened, _ = rest.partition(_MARKER)[0].partition(opening or _MARKER)
    return f"{before[:-3]}{between}{opened}" if opened else ""  # without the number of the mark


def is_empty_thought(text: str) -> bool:
    r"""Returns whether a text is two tags around nothing, as prompts end in where no thought is wanted:
    `<think>\n\n</think>\n\n`, `<|channel>thought\n<channel|>` (Gemma 4)."""
    return _EMPTY_THOUGHT.fullmatch(text) is not None


def behind_turn(render: Renderer, messages: Sequence[Mapping[str, Any]], place: int) -> str | None:
    """Returns what follows the text of the model's turn `messages[place]`, the opening of its next one included; None
    where the template leaves the turn's text out. Earlier calls, with their answers, need not be such that the template
    can render them: the model's own tokens stand for them."""
    ordered = in_call_order(messages)
    before = ordered[:place]
    behind = [{"role": "assistant", "content": _MARKER}, *ordered[place + 1 :]]
    try:
        text = render([*before, *behind], True)
    except UsageError:
        said = [one for one in before if one["role"] != "tool" and not one.get("tool_calls")]
        text = render([*said, *behind], True)
    _, found, rest = text.rpartition(_MARKER)
    return rest if found else None


def answered_turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, list[int]]]:
    """Yields the place of each turn with tool calls, and the places of the answers between it and the model's next
    turn."""
    for place, message in enumerate(messages):
        if message.get("tool_calls"):
            behind = range(place + 1, len(messages))
            own = takewhile(lambda number: messages[number]["role"] != "assistant", behind)
            yield place, [number for number in own if messages[number]["role"] == "tool"]


def answered_calls(asked: Sequence[str | None], answers: Sequence[str | None]) -> list[int]:
    """Returns which of a turn's calls each answer is to, both given by their ids. An answer without one, or to calls
    without any, is to the first call that no other names; those beyond the calls come last.

    Raises UsageError: an id is no call's, or is answered twice, or a call without an answer is before one with.
    """
    left = list(range(len(asked)))
    named: dict[int, int] = {}
    for place, name in enumerate(answers if any(asked) else ()):
        if name:
            number = next((one for one in left if asked[one] == name), None)
            if number is None:
                why = (
                    "is answered twice"
                    if name in asked
                    else f"is none of {', '.join(map(str, asked))}"
                )
                raise UsageError(f"answers of tools: the call {name} {why}")
            left.remove(number)
            named[place] = number
    rest = chain(left, count(len(asked)))
    numbers = [named[place] if place in named else next(rest) for place in range(len(answers))]
    without = min(set(range(len(numbers))).difference(numbers), default=None)
    if without is not None:
        raise UsageError(
            f"answers of tools: the call {asked[without]} has none, and a later one has"
        )
    return numbers


def in_call_order(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns messages with the answers of each turn's calls in the order of the calls: most templates show no ids.
    Raises UsageError as `answered_calls`."""
    own = list(messages)
    for place, places in answered_turns(messages):
        asked = [call.get("id") for call in messages[place]["tool_calls"]]
        numbers = answered_calls(asked, [messages[one].get("tool_call_id") for one in places])
        for number, one in zip(numbers, places, strict=True):
            own[places[number]] = messages[one]
    return own


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids of tokens that are not text. That of unknown text is not among them, unless it is the end token too."""
    marked = {
        token
        for token, about in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if about.special
    }
    return frozenset(
        marked.union(tokenizer.all_special_ids)
        - ({tokenizer.unk_token_id} - {tokenizer.eos_token_id})
    )


class TurnEnd(NamedTuple):
    """How a template ends a turn of the model."""

    written: str  # by the model, up to the token that ends it; "" where none does
    shown: str  # in its place, where no other turn follows
    token: str | None


def turn_end(
    render: Renderer, tokenizer: Any, messages: Sequence[Mapping[str, Any]] = PLAIN_TURN
) -> int | None:
    """Returns the token that ends the model's turn in the template, which is often another than a base model's; None
    where none does."""
    try:
        token = end_of_turn(render, tokenizer, PLAIN_TURN).token
        if messages is not PLAIN_TURN:
            token = end_of_turn(render, tokenizer, messages, token).token
    except UsageError:
        return None
    return None if token is None else int(tokenizer.convert_tokens_to_ids(token))


def end_of_turn(
    render: Renderer,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    other: str | None = None,
) -> TurnEnd:
    """Returns how the last message ends: in special tokens that stand there whether or not another turn follows; else
    in the one that stands there where none does (gpt-oss), or in that with which the next turn begins (GLM).

    Args:
        other: a token that ends turns, beside the tokenizer's.

    Raises UsageError where the template leaves a part of the message out, or refuses the messages.
    """
    said, marks = _marked(messages[-1])
    calls = said.get("tool_calls") or ()
    answered = [*messages[:-1], said]
    text = render(answered, False)
    for mark, part in marks.items():
        if mark not in text:
            raise UsageError(
                f"the chat template does not render {part} of an answer: take another --prompt_template, or leave such "
                "rows out"
            )
    special = _special(tokenizer)

    def behind(text: str) -> list[str]:  # text, token, text, ..., text
        return special.split(text.rpartition(_MARKER)[2])

    last = behind(text)
    answers = [
        {
            "role": "tool",
            "content": "x",
            "tool_call_id": one.get("id", ""),
            "name": one["function"]["name"],
        }
        for one in calls
    ]
    try:
        longer = behind(render([*answered, *(answers or [_ASKED])], False))
    except UsageError:  # a template of one turn
        longer = last
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, longer, strict=False))
    )
    start = same
    while start and (start % 2 == 0 or not last[start - 1].strip()):
        start -= 1
    shown = "".join(last[start:])
    tokens = [place for place in range(start, same) if place % 2]
    known = (tokenizer.eos_token, other)
    for place in tokens:
        # behind a call's own tokens there may be white space, behind the end of a text the next turn
        if last[place] in known or place == tokens[-1] or (not calls and last[place + 1]):
            return TurnEnd("".join(last[start : place + 1]), shown, last[place])
    place = same | 1
    for turns in (last, longer):
        if place < len(turns) and not "".join(turns[start:place]).strip():
            return TurnEnd("".join(turns[start : place + 1]), shown, turns[place])
    for place in range(1, len(last), 2):  # calls are rendered otherwise where none follows
        if last[place] in known:
            return TurnEnd(last[place], "".join(last[place:]), last[place])
    return TurnEnd("", shown[len(shown.rstrip()) :], None)


def _marked(message: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns an answer with a mark in each of its parts, and which part each mark is in."""
    marks: dict[str, str] = {}

    def mark(part: str) -> str:
        own = f"{len(marks):03}{_MARKER}"
        marks[own] = part
        return own

    own = dict(message)
    if own.get("reasoning_content"):
        own["reasoning_content"] += mark("the reasoning_content")
    if own["content"] or not own.get("tool_calls"):
        content = own["content"]
        text = mark("the text")
        parts = [] if isinstance(content, str) else [{"type": "text", "text": text}]
        own["content"] = content + (parts or text)
    calls = []
    for call in own.get("tool_calls") or ():
        function = _with_object(call["function"])
        name = mark("the tool calls")
        arguments = function.get("arguments") or ""
        function["arguments"] = (
            {**arguments, name: name} if isinstance(arguments, dict) else f"{arguments}{name}"
        )
        calls.append({**call, "function": function})
    return own | ({"tool_calls": calls} if calls else {}), marks


@lru_cache(maxsize=8)
def _special(tokenizer: Any) -> re.Pattern[str]:
    """Returns a pattern of the texts of special tokens."""
    names = tokenizer.convert_ids_to_tokens(list(special_tokens(tokenizer)))
    wanted = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(f"({wanted or '(?!)'})")
