"""`swift COMMAND ...`: routes to our commands, and hands those that are not ours to ms-swift.

ms-swift is run by module, never through its script, whose name is ours.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

from swift_r1.errors import (
    EXIT_CODES,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    EXIT_USAGE,
    SwiftError,
    UsageError,
)
from swift_r1.runtime.visible import harmless, log_visibly

COMMANDS = {
    "rlhf": "train a model with GRPO or PPO",
    "sft": "teach a model answers (supervised), as a warm start",
    "rollout": "serve a model and take its weight updates",
    "check": "test plugins, data and rewards without loading a model",
    "view": "show runs, live or finished, in the browser or the terminal",
    "eval": "evaluate a model on benchmarks, and compare two evaluations",
    "demo": "watch a small model learn from scratch in a few minutes",
    "init": "list starters, recipes and plugins, and write one into a folder",
    "launch": "start a run and its servers from one file, on this machine or many",
    "forecast": "say what a run would learn from, and keep right answers for swift sft",
    "why": "tell what is wrong with a run, on what evidence, and what to try",
    "replay": "train again on a recorded run's completions, with different flags",
    "report": "write the results of runs into one file that you can send",
    "merge-lora": "merge LoRA adapters into their base model",
    "doctor": "check this machine and installation",
}
_FIRST = 8  # of them have a line in the help
# The others work without the extra `cpu` or `gpu`, as long as they load no tokenizer (`swift check --model`).
LOAD_MODELS = ("rlhf", "sft", "forecast", "rollout", "eval", "replay", "merge-lora", "demo")
_OF_EXTRAS = ("torch", "transformers", "accelerate", "peft")
MS_SWIFT_COMMANDS = (
    "pt",
    "infer",
    "sample",
    "app",
    "deploy",
    "export",
    "web-ui",
    "megatron",
)
_OTHER_NAMES = {
    "train": "rlhf",
    "finetune": "sft",
    "grpo": "rlhf",
    "ppo": "rlhf",
    "serve": "rollout",
    "evaluate": "eval",
}
# the commands of README.md
EXAMPLE = r"""swift rollout --model models/smollm2-135m --max_model_len 256
NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model models/smollm2-135m --torch_dtype bfloat16 --deepspeed zero2 \
  --external_plugins examples/smollm2_countdown/plugin.py --dataset countdown_two \
  --reward_funcs solved answer_tag --reward_weights 1 0.1 --response_prefix '<answer>' --stop_words '</answer>' \
  --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --num_generations 8 \
  --per_device_train_batch_size 64 --max_completion_length 16 --max_steps 60 \
  --learning_rate 1e-5 --lr_scheduler_type constant_with_warmup --warmup_ratio 0.05"""
_HELP_FLAGS = ("-h", "--help", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `swift` command. Returns its exit code; errors of the user are printed as one line per fault."""
    if argv is None and not sys.flags.safe_path:
        # so that what multiprocessing starts does not import from the current folder: see `module_words`
        os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])
    words = list(sys.argv[1:] if argv is None else argv)
    log_visibly(logging.WARNING)
    if not words or words[0] in _HELP_FLAGS:
        print(_help())
        return EXIT_OK if words else EXIT_USAGE
    if words[0] in ("--version", "-V", "version"):
        from swift_r1.runtime.libraries import own_version

        print(f"swift-r1 {own_version()}")
        return EXIT_OK
    command = words[0].replace("_", "-")
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return _run(command, words[1:])
    except SwiftError as error:
        for line in str(error).splitlines():
            print(f"swift {command}: {harmless(line)}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, _Terminated) as stop:
        print(f"swift {command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(stop, KeyboardInterrupt) else EXIT_TERMINATED
    except BrokenPipeError:
        # `swift rlhf --help | head`: the reader has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


class _Terminated(BaseException):
    """SIGTERM came; like Ctrl-C, it lets what was begun be cleaned up."""


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise _Terminated


def _run(command: str, words: list[str]) -> int:
    from swift_r1.flags.algorithm import MS_SWIFT_RLHF_TYPES
    from swift_r1.flags.parser import given_value
    from swift_r1.flags.preferences import PREFERENCE_TYPES

    rlhf_type = given_value(words, "rlhf_type") if command == "rlhf" else None
    if command in MS_SWIFT_COMMANDS or rlhf_type in MS_SWIFT_RLHF_TYPES:
        to_ms_swift(command, words, rlhf_type)
    if command in COMMANDS:
        module = importlib.import_module(f"swift_r1.cli.{command.replace('-', '_')}")
        if not {"-h", "--help"}.intersection(words):
            if command in LOAD_MODELS and find_spec("torch") is None:
                raise UsageError(_wanting("torch"))
            try:
                return int(module.run(words))
            except ModuleNotFoundError as error:
                if error.name not in _OF_EXTRAS:
                    raise
                raise UsageError(_wanting(error.name)) from error
        from swift_r1.cli.help import command_help

        print(command_help(*(module.PREFERENCES if rlhf_type in PREFERENCE_TYPES else module.HELP)))
        return EXIT_OK
    near = difflib.get_close_matches(command, [*COMMANDS, *MS_SWIFT_COMMANDS, *_OTHER_NAMES], n=1)
    hint = (
        f"did you mean `swift {_OTHER_NAMES.get(near[0], near[0])}`?"
        if near
        else "`swift --help` lists the commands"
    )
    raise UsageError(f"unknown command {command!r}: {hint}")


def _wanting(library: str) -> str:
    return f"{library} is not installed: pip install 'swift-r1[cpu]', or 'swift-r1[gpu]' on a machine with NVIDIA GPUs"


def to_ms_swift(command: str, words: Sequence[str], rlhf_type: str | None) -> NoReturn:
    """Replaces this process by ms-swift's command; UsageError where that is not installed."""
    from swift_r1.launch.environment import replace_process
    from swift_r1.plugins.ms_swift import is_installed

    if not is_installed():
        words_given = command if rlhf_type is None else f"rlhf --rlhf_type {rlhf_type}"
        raise UsageError(
            f"`swift {words_given}` is done by ms-swift, which is not installed: pip install 'ms-swift>=4.6,<5'"
        )
    print(f"swift {command}: handed to ms-swift", file=sys.stderr)
    replace_process("swift.cli.main", (command, *words), os.environ)


def _help() -> str:
    from swift_r1.flags.algorithm import MS_SWIFT_RLHF_TYPES
    from swift_r1.runtime.libraries import own_version

    ours = "\n".join(f"  swift {name:<8} {COMMANDS[name]}" for name in [*COMMANDS][:_FIRST])
    codes = textwrap.fill(
        f"Exit codes: {'; '.join(f'{code} {why}' for code, why in EXIT_CODES.items())}.", 118
    )
    return f"""swift-r1 {own_version()}: R1-Zero style reinforcement learning, driven by plugins

{ours}
  more:          {", ".join([*COMMANDS][_FIRST:])}

`swift COMMAND --help` says what a command does, and lists its flags; `swift --version` prints the version.
Handed to ms-swift where it is installed: {", ".join(MS_SWIFT_COMMANDS)},
and `swift rlhf` of another --rlhf_type ({", ".join(MS_SWIFT_RLHF_TYPES)}). Of its `swift sft`, ours takes the
flags of text models (docs/sft.md); `python -m swift.cli.main sft` runs its own.

A small model learns Countdown in 4 minutes with `swift demo`. A real one, which `make smollm2` makes, in 20 minutes on
two cores, with the server and, in a second terminal, two trainer processes:
{textwrap.indent(EXAMPLE, "  ")}

{codes}"""
