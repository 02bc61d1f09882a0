"""`swift sft`: checks everything that can be checked without a model, then becomes the trainer of answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from swift_r1.cli.rlhf import train
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.sft import ALWAYS, GROUPS, SftArguments

_USAGE = """swift sft [config.yaml] --model M --dataset D [--flag value ...]

Teaches a model the answers in a data set, for example as a warm start before `swift rlhf`. A row has `messages` of
system, user, assistant and tool, or a question and its answer under other names; what the assistant says is learned.
Nothing is sampled, and there are no rewards. Batches, adapters, ZeRO, FSDP2, checkpoints and resuming are those of
`swift rlhf`. A checkpoint is the --model of what comes next. See docs/sft.md.

Pairs of answers are for `swift rlhf --rlhf_type dpo`, cpo, simpo and orpo; kto, rm and gkd are handed to ms-swift, where
it is installed."""
_EXAMPLES = """
swift sft --model models/smollm2-135m --dataset answers.jsonl --num_train_epochs 2 --per_device_train_batch_size 8
swift sft --model models/smollm2-135m --dataset answers.jsonl --train_type lora --split_dataset_ratio 0.05 --eval_steps 50
NPROC_PER_NODE=2 swift sft sft.yaml --deepspeed zero3 --packing true --max_length 4096
"""
HELP = (_USAGE, SftArguments, _EXAMPLES, GROUPS, SftArguments.refused)


def run(words: Sequence[str]) -> int:
    """Does not come back where training starts. Raises as `train`."""
    return train(words, partial(parse_arguments, SftArguments, words, recorded=ALWAYS))
