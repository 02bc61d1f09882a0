"""The model of this example, before it has learned anything: a Llama of 0.6 M parameters with random weights.

python examples/calculator_agent/calculator_model.py --output_dir models/calculator/random --seed 0
"""

from __future__ import annotations

import sys
from pathlib import Path

# For tiny_model.py of examples/countdown_demo.
sys.path.append(str(Path(__file__).resolve().parents[1] / "countdown_demo"))

# Pieces of JSON that are one token, as in most tokenizers, longest first.
JSON_PIECES = ('", "arguments": {"', '{"name": "', '": "', '"}}')
TAGS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
NAME, ARGUMENT = "calculate", "expression"  # of the tool, see plugin.py
WORDS = (NAME, ARGUMENT)
# a token is one or two of a number's digits
DIGITS = tuple(f"{number:02d}" for number in range(100))
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
# Hermes' form of calls, and tools by the names of their arguments.
CHAT_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool['function']['name'] }}"
    "{% for name in tool['function']['parameters']['properties'] %}{{ ' ' + name }}{% endfor %}"
    "{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}<tool_response>{{ message['content'] }}</tool_response>"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ call[\'function\'][\'name\'] }}", "arguments": '
    "{{ call['function']['arguments'] | tojson }}}</tool_call>"
    "{% endfor %}{{ eos_token }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
)


def make_tokenizer():
    """A token a tag, a piece of JSON, a word of a call, or a character."""
    import tiny_model

    return tiny_model.make_tokenizer(
        (*TAGS, *JSON_PIECES), CHARACTERS, (*WORDS, *DIGITS), CHAT_TEMPLATE
    )


if __name__ == "__main__":
    import tiny_model

    tiny_model.main(make_tokenizer)
