"""Small chat templates that render tools in the forms of well-known models."""

from __future__ import annotations

_HEAD = (
    "{%- set own = messages[0]['content'] if messages[0]['role'] == 'system' else 'You help.' -%}"
    "{{- '<|im_start|>system\\n' + own -}}"
)
_TURNS = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}"
    "{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}"
    "{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- '<|im_start|>assistant\\n' + message['content'] -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- if not loop.first or message['content'] -%}{{- '\\n' -}}{%- endif -%}"
    "{{- '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' -}}"
    "{{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- elif message['role'] != 'system' -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# Qwen2.5's and Hermes' form: tool answers are in a turn of the user.
HERMES = (
    _HEAD + "{%- if tools -%}{{- '\\n# Tools\\n<tools>' -}}"
    "{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}"
    '{{- \'\\n</tools>\\nCall one so:\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>\' -}}{%- endif -%}'
    "{{- '<|im_end|>\\n' -}}" + _TURNS
)
# Llama 3.1's: one call a turn, tool answers in turns of their own.
LLAMA = (
    "{%- for message in messages -%}"
    "{%- if message['tool_calls'] -%}"
    "{%- if message['tool_calls'] | length > 1 -%}{{- raise_exception('one call at once') -}}{%- endif -%}"
    "{%- set call = message['tool_calls'][0]['function'] -%}"
    "{{- '<|im_start|>assistant\\n{\"name\": \"' + call['name'] + '\", ' -}}"
    "{{- '\"parameters\": ' + (call['arguments'] | tojson) + '}<|im_end|>' -}}"
    "{%- elif message['role'] == 'tool' -%}"
    "{{- '<|im_start|>ipython\\n' + ({'output': message['content']} | tojson) + '<|im_end|>' -}}"
    "{%- else -%}"
    "{%- if loop.first and tools -%}{{- '<|im_start|>system\\nEnvironment: ipython\\n' -}}"
    "{%- for tool in tools -%}{{- (tool | tojson(indent=4)) + '\\n\\n' -}}{%- endfor -%}"
    "{{- '<|im_end|>' -}}{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# Gemma 4's: an answer is part of the turn that has called, and of no other.
WITHIN_THE_TURN = (
    "{%- for message in messages -%}"
    "{%- if message['tool_calls'] -%}"
    "{{- '<|im_start|>assistant\\ncall:' + message['tool_calls'][0]['function']['name'] -}}"
    "{{- ' response:' + messages[loop.index0 + 1]['content'] + '<|im_end|>' -}}"
    "{%- elif message['role'] != 'tool' -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if tools and add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# Qwen3's: thoughts are left out of the turns before the last question, and rebuilt in those behind it.
THINKING = (
    "{%- if tools -%}{{- '<|im_start|>system\\n<tools>' -}}"
    "{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}"
    '{{- \'\\n</tools>\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n\' -}}{%- endif -%}'
    "{%- set ns = namespace(asked=-1) -%}"
    "{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{%- set thought = message.content.split('</think>')[0].split('<think>')[-1] if '</think>' in message.content -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if loop.index0 > ns.asked -%}{{- '<think>\\n' + (thought or '') | trim + '\\n</think>\\n\\n' -}}{%- endif -%}"
    "{{- message.content.split('</think>')[-1] | trim -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- elif message.role == 'tool' -%}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}"
    "{%- else -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    "{%- endif -%}"
)
# SmolVLM's and LLaVA's: a text that is no part of a list is left out.
PARTS = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- for part in message.content | selectattr('type', 'equalto', 'text') -%}{{- part.text -}}{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
