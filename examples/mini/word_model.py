"""The model of the word problems, before it has learned anything: a Llama of 0.6 M parameters with random weights.

python examples/mini/word_model.py --output_dir models/words-random --seed 0
"""

from __future__ import annotations

import random
import re
import sys
from functools import cache
from pathlib import Path

import word_problems

from swift_r1.data.prompts import PromptEncoder

# For tiny_model.py of examples/countdown_demo.
sys.path.append(str(Path(__file__).resolve().parents[1] / "countdown_demo"))

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TAGS = (
    "<reasoning>",
    "</reasoning>",
    "<answer>",
    "</answer>",
    "<|im_start|>",
    "<|im_end|>",
    "\\boxed",
)
# A prompt that another template has rendered (--prompt_template of math_dr_grpo) comes as it is.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'].startswith('<|im_start|>') %}{{ message['content'] }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\\nAnswer: ' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)


@cache
def encoder(form: str) -> PromptEncoder:
    """Renders the prompts of a form; a tokenizer of characters has all that matters for it, the template."""
    import tiny_model

    tokenizer = tiny_model.make_tokenizer(TAGS, CHARACTERS, chat_template=CHAT_TEMPLATE)
    return PromptEncoder(tokenizer, word_problems.FORMS[form].wording)


def asked(form: str, question: str) -> list[dict[str, str]]:
    """The messages that the model's own chat template renders as the form's prompt, without its response prefix."""
    user = {"role": "user", "content": question}
    wording = word_problems.FORMS[form].wording
    if wording.template is not None:
        return [{"role": "user", "content": encoder(form).render([user])}]
    if wording.system is None:
        return [user]
    return [{"role": "system", "content": wording.system}, user]


def make_tokenizer():
    """A token a tag, a word of the prompts (with the space before it), or a character."""
    import tiny_model

    rng = random.Random(0)
    texts = [form.answer for form in word_problems.FORMS.values()]
    for problem in word_problems.split()[0]:
        user = {"role": "user", "content": problem.question(rng)}
        texts += [encoder(form).render([user]) for form in word_problems.FORMS]
    words = {word for text in texts for word in re.findall(r" ?[A-Za-z]{2,}", text)}
    return tiny_model.make_tokenizer(TAGS, CHARACTERS, sorted(words), CHAT_TEMPLATE)


if __name__ == "__main__":
    import tiny_model

    tiny_model.main(make_tokenizer)
