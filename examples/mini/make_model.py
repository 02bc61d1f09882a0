"""The models of the miniatures: `python examples/mini/make_model.py countdown|words FOLDER`.

`countdown` is the demo's model for the demo's task, `words` one for `word_problems` in all its forms. Each is a Llama
of 0.6 M parameters, made from random weights and taught supervised for a few minutes: the recipes' formats and
arithmetic, but not to choose well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from swift_r1.flags.world import World
from swift_r1.launch.environment import has_gpu, trainer_environment, usable_cpus

DEMO = Path(__file__).resolve().parents[1] / "countdown_demo"
sys.path.append(str(DEMO))
# set in the process that trains: the allocator must be chosen before Python starts
_INSIDE = "SWIFT_R1_MINI_MODEL"

STEPS = 900
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
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\\nAnswer: ' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=("countdown", "words"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="supervised steps [the task's own]")
    args = parser.parse_args()
    if _INSIDE not in os.environ:
        added = trainer_environment(
            os.environ, World(), offline=True, cpus=usable_cpus(), gpu=has_gpu(os.environ)
        )
        return subprocess.run(
            [sys.executable, *sys.argv], env={**os.environ, **added, _INSIDE: "1"}, check=False
        ).returncode
    if args.task == "countdown":
        words = ["--output_dir", str(args.folder), "--seed", str(args.seed)]
        words += ["--steps", str(args.steps)] if args.steps else []
        return subprocess.run(
            [sys.executable, str(DEMO / "warm_start.py"), *words], check=False
        ).returncode
    make_words(args.folder, args.seed, args.steps or STEPS)
    return 0


def make_words(folder: Path, seed: int, steps: int) -> None:
    """Makes, teaches and saves the model of the word problems."""
    import tiny_model
    import warm_start

    started = time.perf_counter()
    tokenizer = make_tokenizer()
    model = tiny_model.make_model(seed, tokenizer=tokenizer)
    warm_start.train(model, batches(tokenizer, seed), steps)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tiny_model.save(model, folder, tokenizer)
    result = {
        "task": "words",
        "steps": steps,
        "seed": seed,
        "seconds": time.perf_counter() - started,
    }
    (folder / "warm_start.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{folder}: {steps} supervised steps in {result['seconds']:.0f} s")


def make_tokenizer():
    """A token a tag, a word of the prompts (with the space before it), or a character."""
    import tiny_model
    import word_problems

    rng = random.Random(0)
    # Rendered with a tokenizer of characters, which has all that matters here: the template.
    plain = tiny_model.make_tokenizer(TAGS, CHARACTERS, chat_template=CHAT_TEMPLATE)
    texts = [form.answer for form in word_problems.FORMS.values()]
    for problem in word_problems.split()[0]:
        question = problem.question(rng)
        texts += [prompt(plain, form, question) for form in word_problems.FORMS.values()]
    words = {word for text in texts for word in re.findall(r" ?[A-Za-z]{2,}", text)}
    return tiny_model.make_tokenizer(TAGS, CHARACTERS, sorted(words), CHAT_TEMPLATE)


def prompt(tokenizer, form, question: str) -> str:
    """The prompt as `swift rlhf` renders it with the form's flags."""
    from swift_r1.data.prompts import PromptEncoder

    return PromptEncoder(tokenizer, wording=form.wording).render(
        [{"role": "user", "content": question}]
    )


def batches(tokenizer, seed: int) -> Iterator:
    """Endless batches of traces behind their prompts, in all forms alike."""
    import warm_start
    import word_problems

    rng, problems = random.Random(seed), word_problems.split()[0]
    forms = list(word_problems.FORMS.values())
    while True:
        token_ids, weights = [], []
        for _ in range(warm_start.BATCH * warm_start.POOL):
            problem, form = rng.choice(problems), rng.choice(forms)
            asked = tokenizer(prompt(tokenizer, form, problem.question(rng)))["input_ids"]
            written = tokenizer(word_problems.write_trace(problem, form, rng))["input_ids"]
            token_ids.append(asked + written)
            weights.append([0.0] * len(asked) + [1.0] * len(written))
        yield from warm_start.cut(token_ids, weights, tokenizer, rng)


if __name__ == "__main__":
    sys.exit(main())
