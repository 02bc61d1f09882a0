"""`swift sample`: answers of a model that its rewards find good, as rows for `swift sft`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from swift_r1.cli.forecast import tried
from swift_r1.errors import EXIT_OK
from swift_r1.flags.forecast import SampleArguments
from swift_r1.flags.parser import parse_arguments

_USAGE = """swift sample [config.yaml] --model M --dataset D --reward_funcs R --output_file FILE [...]

Takes the flags of a `swift rlhf` command. The model gives several answers to each prompt, with the run's engine (a
server, an engine beside the trainer, or the trainer itself), the run's rewards grade them, and the best or right ones
are written to FILE as rows with `messages` and the columns of the data: `swift sft --dataset FILE` learns them
(rejection sampling). Answers that were cut at --max_completion_length are not kept. See docs/sft.md."""
_EXAMPLES = """
swift sample --model models/smollm2-135m --external_plugins plugins/countdown.py \\
  --dataset 'countdown#1000' --reward_funcs external_countdown format --per_device_train_batch_size 8 \\
  --num_completions 16 --n_best_to_keep 2 --output_file right.jsonl
swift sample grpo.yaml --num_completions 32 --reward_threshold 0.5 --output_file good.jsonl
"""
ALWAYS = {"rlhf_type": "grpo"}
"""What the flags of `swift rlhf` that training alone needs are here where they are not given."""
HELP = (_USAGE, SampleArguments, _EXAMPLES, ("Sample",))


def run(words: Sequence[str]) -> int:
    """Runs the command. Raises as `swift rlhf`'s; returns the trainer's exit code where it failed."""
    parsed = parse_arguments(SampleArguments, words, recorded=ALWAYS)
    return tried(parsed, words, lambda folder, _: _say(folder, parsed.output_file))


def _say(folder: Path, output_file: str) -> int:
    from swift_r1.training.sampling import SAMPLED_FILE

    counts = json.loads((folder / SAMPLED_FILE).read_text(encoding="utf-8"))
    print(
        "{answers} answers to {prompts} prompts, {cut} cut at their length, {good} good enough; {kept} kept, of {solved} "
        "prompts, in ".format_map(counts)
        + output_file
    )
    if not counts["kept"]:
        print("nothing to learn from: a larger --model may give right answers, or easier prompts")
    return EXIT_OK
