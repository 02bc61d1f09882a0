r"""The prompt formats of R1-Zero work, as chat templates (Jinja): `r1`, `qwen_math` and `no`; others come from a file.

`r1` is the prompt of DeepSeek-R1-Zero (arXiv 2501.12948, table 1), `qwen_math` that of the Qwen2.5-Math models
(arXiv 2409.12122) with `\boxed{}`, `no` the bare question; arXiv 2503.20783 compares the three. All render several
turns too. A system message takes the place of the format's own instruction.
"""

from __future__ import annotations

import json
from pathlib import Path

from swift_r1.errors import UsageError

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


def with_own_words(template: str, system: str | None, response_prefix: str) -> str:
    """A chat template that says by itself what `--system` and `--response_prefix` added to it.

    A conversation's own system message comes before `system`; the prefix opens the model's turn.
    """
    # Text of JSON is text of Jinja too. No dashes: they would take a newline away that the template ends with.
    before = (
        "{% if messages[0]['role'] != 'system' %}"
        "{% set messages = [{'role': 'system', 'content': " + _text(system) + "}] + messages %}{% endif %}"
        if system
        else ""
    )
    after = "{% if add_generation_prompt %}{{ " + _text(response_prefix) + " }}{% endif %}" if response_prefix else ""
    # Jinja leaves out one newline at the end of a template, which would be in the middle now.
    return before + template.removesuffix("\n") + after


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def system_message(value: str | None) -> str | None:
    r"""What `--system` says, as in ms-swift: the text of a .txt file as it is, else the value with `\n` as newlines.

    Raises:
        UsageError: there is no such file, or it cannot be read.
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


def newlines(value: str) -> str:
    r"""A value of the command line with its `\n` as newlines, as in ms-swift."""
    return value.replace("\\n", "\n")


def prompt_template(value: str) -> str:
    """The Jinja text of a `--prompt_template`.

    Raises:
        UsageError: no such template, no such file, or one that is no Jinja template.
    """
    if value in TEMPLATES:
        return TEMPLATES[value]
    path = Path(value).expanduser()
    if not path.is_file():
        raise UsageError(f"--prompt_template {value}: write {', '.join(TEMPLATES)}, or the path of a Jinja file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt_template {value}: cannot be read: {error}") from error
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        raise UsageError(f"--prompt_template {value}:{error.lineno}: {error.message}") from error
    return text
