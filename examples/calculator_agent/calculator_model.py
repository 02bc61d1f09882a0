"""The model of this example: made from random weights, and taught what a call of the calculator looks like.

    python examples/calculator_agent/calculator_model.py --output_dir models/calculator/seed-0 --seed 0

It learns to write numbers and calls and to copy, from traces whose choices are all drawn (`arithmetic.write_trace`).
When to call, what to calculate and which number to answer is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import arithmetic

from swift_r1.flags.world import World
from swift_r1.launch.environment import has_gpu, trainer_environment, usable_cpus

# For tiny_model.py of examples/countdown_demo.
sys.path.append(str(Path(__file__).resolve().parents[1] / "countdown_demo"))
# set in the process that trains: its allocator must be there when Python starts
_INSIDE = "SWIFT_R1_CALCULATOR_MODEL"

STEPS = 1200
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    if _INSIDE not in os.environ:
        added = trainer_environment(
            os.environ, World(), offline=True, cpus=usable_cpus(), gpu=has_gpu(os.environ)
        )
        environment = {**os.environ, **added, _INSIDE: "1"}
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
    make(args.output_dir, args.seed, args.steps)
    return 0


def make(folder: Path, seed: int, steps: int) -> None:
    """Makes, teaches and saves the model."""
    import tiny_model
    import warm_start

    started = time.perf_counter()
    tokenizer = make_tokenizer()
    model = tiny_model.make_model(seed, tokenizer=tokenizer)
    warm_start.train(model, batches(tokenizer, seed), steps)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tiny_model.save(model, folder, tokenizer)
    made = {"steps": steps, "seed": seed, "seconds": time.perf_counter() - started}
    (folder / "warm_start.json").write_text(json.dumps(made, indent=2) + "\n")
    print(f"{folder}: {steps} supervised steps in {made['seconds']:.0f} s")


def make_tokenizer():
    """A token a tag, a piece of JSON, a word of a call, or a character."""
    import tiny_model

    return tiny_model.make_tokenizer(
        (*TAGS, *JSON_PIECES), CHARACTERS, (*WORDS, *DIGITS), CHAT_TEMPLATE
    )


def batches(tokenizer, seed: int) -> Iterator:
    """Endless batches of conversations, of which only the model's turns are learned."""
    import warm_start

    rng = random.Random(seed)
    asked = arithmetic.problems("train", rng)
    while True:
        token_ids, weights = [], []
        for _ in range(warm_start.BATCH * warm_start.POOL):
            ids, learned = [], []
            for text, own in turns(next(asked), rng, tokenizer.eos_token):
                piece = tokenizer(text)["input_ids"]
                ids += piece
                learned += [float(own)] * len(piece)
            token_ids.append(ids)
            weights.append(learned)
        yield from warm_start.cut(token_ids, weights, tokenizer, rng)


def turns(problem: arithmetic.Problem, rng: random.Random, end: str) -> Iterator[tuple[str, bool]]:
    """A trace as the chat template renders it, without the last end: texts, and whether they are the model's."""
    expressions, answer = arithmetic.write_trace(problem, rng)
    yield f"<tools>{NAME} {ARGUMENT}</tools>{problem.question}\n", False
    for expression in expressions:
        call = {"name": NAME, "arguments": {ARGUMENT: expression}}
        yield f"<tool_call>{json.dumps(call)}</tool_call>{end}", True
        yield f"<tool_response>{arithmetic.calculated(expression)}</tool_response>", False
    yield answer, True


if __name__ == "__main__":
    sys.exit(main())
