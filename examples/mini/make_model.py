"""The models of the miniatures: `python examples/mini/make_model.py FORM FOLDER`.

FORM is `countdown` (the demo's model and task), or one of the answer forms of `word_problems.FORMS`. Each is a Llama of
half a million parameters, made from random weights and taught supervised for a minute or two: the recipe's format and
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

from swift_r1.arguments.world import World
from swift_r1.cli.environment import has_gpu, trainer_environment, usable_cpus

DEMO = Path(__file__).resolve().parents[1] / "countdown_demo"
sys.path.append(str(DEMO))
_INSIDE = "SWIFT_R1_MINI_MODEL"  # set in the process that trains: the allocator must be chosen before Python starts

STEPS = 450
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>", "\\boxed")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\\nAnswer: ' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("form", choices=("countdown", "gsm8k", "tags", "boxed"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="supervised steps [the form's own]")
    args = parser.parse_args()
    if _INSIDE not in os.environ:
        environment = trainer_environment(
            os.environ, World(), offline=True, cpus=usable_cpus(), gpu=has_gpu(os.environ)
        ).applied_to(os.environ)
        return subprocess.run([sys.executable, *sys.argv], env=environment | {_INSIDE: "1"}, check=False).returncode
    if args.form == "countdown":
        words = ["--output_dir", str(args.folder), "--seed", str(args.seed)]
        words += ["--steps", str(args.steps)] if args.steps else []
        return subprocess.run([sys.executable, str(DEMO / "warm_start.py"), *words], check=False).returncode
    make(args.form, args.folder, args.seed, args.steps or STEPS)
    return 0


def make(name: str, folder: Path, seed: int, steps: int) -> None:
    """Makes, teaches and saves the model of a form."""
    import tiny_model
    import warm_start

    started = time.perf_counter()
    tokenizer = make_tokenizer(name)
    model = tiny_model.make_model(seed, tokenizer=tokenizer)
    warm_start.train(model, batches(tokenizer, name, seed), steps)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tiny_model.save(model, folder, tokenizer)
    result = {"form": name, "steps": steps, "seed": seed, "seconds": time.perf_counter() - started}
    (folder / "warm_start.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{folder}: {steps} supervised steps in {result['seconds']:.0f} s")


def make_tokenizer(name: str):
    """A token a tag, a word of the form's prompts (with the space before it), or a character."""
    import tiny_model
    import word_problems

    rng, form = random.Random(0), word_problems.FORMS[name]
    # Rendered with a tokenizer of characters, which has all that matters here: the template.
    plain = tiny_model.make_tokenizer(TAGS, CHARACTERS, chat_template=CHAT_TEMPLATE)
    texts = [prompt(plain, form, problem.question(rng)) for problem in word_problems.split()[0]]
    texts.append(form.answer)
    words = {word for text in texts for word in re.findall(r" ?[A-Za-z]{2,}", text)}
    return tiny_model.make_tokenizer(TAGS, CHARACTERS, sorted(words), CHAT_TEMPLATE)


def prompt(tokenizer, form, question: str) -> str:
    """The prompt as `swift rlhf` renders it with the form's flags."""
    from swift_r1.data.prompts import PromptEncoder

    return PromptEncoder(tokenizer, wording=form.wording).render([{"role": "user", "content": question}])


def batches(tokenizer, name: str, seed: int) -> Iterator:
    """Endless batches of traces behind their prompts."""
    import warm_start
    import word_problems

    rng, form = random.Random(seed), word_problems.FORMS[name]
    problems = word_problems.split()[0]
    while True:
        chosen = [rng.choice(problems) for _ in range(warm_start.BATCH * warm_start.POOL)]
        prompts = [tokenizer(prompt(tokenizer, form, problem.question(rng)))["input_ids"] for problem in chosen]
        traces = [tokenizer(word_problems.write_trace(problem, form, rng))["input_ids"] for problem in chosen]
        token_ids = [p + t for p, t in zip(prompts, traces, strict=True)]
        weights = [[0.0] * len(p) + [1.0] * len(t) for p, t in zip(prompts, traces, strict=True)]
        yield from warm_start.cut(token_ids, weights, tokenizer, rng)


if __name__ == "__main__":
    sys.exit(main())
