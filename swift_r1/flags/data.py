"""Flags of the prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift_r1.data.prompt_templates import (
    TEMPLATES,
    check_arguments,
    prompt_template,
    system_message,
)
from swift_r1.data.tools import AGENT_TEMPLATES
from swift_r1.errors import UsageError
from swift_r1.flags.fields import Scope, check_no_key, flag, resumable_flag

_STORED = Scope(
    lambda args: not args.streaming, "with --streaming true: rows are prepared as they come"
)
_CHOSEN = Scope(
    lambda args: not args.streaming, "with --streaming true, whose rows come in their own order"
)
_STREAMED = Scope(lambda args: args.streaming, "without --streaming true")
_PASSES = Scope(
    lambda args: not args.streaming, "with --streaming true, whose passes are not counted"
)
_IN_ORDER = Scope(
    lambda args: args.prompt_sampler == "uniform",
    "with --prompt_sampler {prompt_sampler}, which chooses prompts when they are needed",
    allow_default=True,
)
_NOT_READ = Scope(
    lambda args: not args.calls_tools,
    "with --tools or tool_scheduler, which read calls in the chat template's form",
)
_MIXED = Scope(lambda args: args.interleave_prob is not None, "without --interleave_prob")
_SHUFFLED = Scope(
    lambda args: args.dataset_shuffle or not args.streaming, "with --dataset_shuffle false"
)
_LIMITED = Scope(
    lambda args: args.max_length is not None or args.truncation_strategy == "delete",
    "without --max_length",
)
EVALUATED = Scope(
    lambda args: args.evaluates,
    "without --eval_steps (or --eval_on_start true)",
    allow_default=True,
)


# ms-swift's agent templates: those that say what the chat templates of models say, and others.
_CHAT_TEMPLATES = (
    "hermes hunyuan_hermes qwen3_coder qwen3_5 glm4 glm4_5 glm4_7 glm5_1 chatglm4 llama3 llama4 deepseek_v3_1 "
    "deepseek_v4 minimax_m2 minimax_m3 seed_oss gemma4 mistral kimi_k25 kimi_k3 minicpm5 youtu hy_v3 hy_v3_preview"
)
_NOT_HERE = "react_zh qwen_en qwen_zh qwen_en_parallel qwen_zh_parallel toolbench"

# Of `swift eval` too.
USE_HF = flag(
    None, "hub ids without a prefix are Hugging Face's (default: USE_HF, else ModelScope's)"
)
DATASET_INFO = flag([], "JSON files that register datasets, in ms-swift's form")
SYSTEM = flag(
    None,
    "system message of prompts without one: text (\\n: newline), or a .txt file",
    check=system_message,
)
TEMPLATE = flag(
    None, "r1, qwen_math, no, or a Jinja file, instead of the chat template", check=prompt_template
)


def check_kwargs(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a `--chat_template_kwargs` that cannot be."""
    check_no_key(values)
    check_arguments(values)


_FULL_TEMPLATE = Scope(
    lambda args: args.prompt_template not in TEMPLATES, "with --prompt_template {prompt_template}"
)
SAID_ONCE = Scope(
    lambda args: "enable_thinking" not in args.chat_template_kwargs,
    "with a --chat_template_kwargs that has it too",
)
THINKING = flag(
    None,
    "passed to the chat template (default: the template's own)",
    _FULL_TEMPLATE,
    SAID_ONCE,
)
ARGUMENTS = flag(
    {},
    'other arguments of the chat template, as JSON: {"reasoning_effort": "low"}; it must read each of them',
    _FULL_TEMPLATE,
    check=check_kwargs,
)


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Data."""

    dataset: list[str] = flag(
        [],
        "registered names, hub ids (hf:: or ms:: in front), files (jsonl, json, csv, parquet, txt) or folders, as "
        "id[:subset/...|all][#N]; #N takes N rows",
        required=True,
        unless=("env", "mixture"),
    )
    val_dataset: list[str] = resumable_flag(
        [], "held-out prompts for --eval_steps, written like --dataset", EVALUATED
    )
    split_dataset_ratio: float = flag(
        0.0,
        "share of --dataset that is held out",
        EVALUATED,
        at_least=0,
        at_most=0.9,
        instead_of=("val_dataset",),
    )
    interleave_prob: list[float] | None = flag(
        None,
        "mix datasets: draw each row's dataset with these probabilities, one per --dataset (default: all rows of all "
        "datasets)",
        more_than=0,
        at_most=1,
    )
    stopping_strategy: str = flag(
        "first_exhausted",
        "when a mixed pass ends: with the first data set that is used up, or with the last, the others repeated",
        _MIXED,
        choices=("first_exhausted", "all_exhausted"),
    )
    use_hf: bool | None = USE_HF
    custom_dataset_info: list[str] = DATASET_INFO
    columns: dict[str, Any] = flag({}, 'rename dataset columns: \'{"question": "query"}\'')
    agent_template: str | None = flag(
        None,
        "describes a row's tools in the system message, and how to call them: ReAct with Thought: (react_en) or "
        "in think tags (react_grpo); default: the chat template renders them",
        _NOT_READ,
        choices=AGENT_TEMPLATES,
        elsewhere=dict.fromkeys(
            _CHAT_TEMPLATES.split(),
            "is here the model's own chat template, which renders tools: leave the flag out",
        )
        | dict.fromkeys(
            _NOT_HERE.split(),
            "is not here: the chat template renders tools (leave the flag out), or react_en does",
        ),
        ms_swift="by model",
    )
    strict: bool = resumable_flag(
        False, "stop at a row that cannot be read or preprocessed, instead of leaving it out"
    )
    dataset_num_proc: int = resumable_flag(1, "processes that preprocess rows", _STORED, at_least=1)
    load_from_cache_file: bool = resumable_flag(
        True, "reuse preprocessed rows of the same data and code", _STORED, ms_swift="false"
    )
    streaming: bool = flag(False, "preprocess rows while training; needs --max_steps")
    shuffle_buffer_size: int = flag(
        1000, "rows among which --streaming shuffles", _STREAMED, _SHUFFLED, at_least=1
    )
    dataset_shuffle: bool = flag(
        True, "shuffle prompts in each epoch, and draw the rows of #N at random"
    )
    data_seed: int | None = flag(None, "seed of the data's order (default: --seed)", ms_swift="42")
    prompt_sampler: str = flag(
        "uniform",
        "which prompts come next: uniform (each once per epoch), difficulty (pass rates near one half first), "
        "or a class that a plugin registers",
        _CHOSEN,
    )
    max_pixels: int | None = flag(
        None,
        "pixels (width x height) of the largest image that the model sees as it is; larger ones are scaled down to it "
        "(default: MAX_PIXELS, else none are)",
        at_least=1,
    )
    min_pixels: int | None = flag(
        None,
        "pixels of the smallest image that the model sees as it is; smaller ones are scaled up to it (default: "
        "MIN_PIXELS, else none are)",
        at_least=1,
    )
    load_images_from_urls: bool = flag(
        False, "download images that rows name by http or https addresses", ms_swift="true"
    )
    system: str | None = SYSTEM
    prompt_template: str | None = TEMPLATE
    response_prefix: str = flag(
        "", "text that begins the model's turn, such as '<think>'; rewards see it too"
    )
    enable_thinking: bool | None = THINKING
    chat_template_kwargs: dict[str, Any] = ARGUMENTS
    max_length: int | None = flag(
        None,
        "longest prompt in tokens (default: what the model takes less the completion); see --truncation_strategy",
        at_least=1,
    )
    truncation_strategy: str = flag(
        "delete",
        "prompts over --max_length: delete leaves them out and counts them, left keeps their last tokens",
        _LIMITED,
        choices=("delete", "left"),
        ms_swift="left",
    )
    dataloader_drop_last: bool = flag(
        False,
        "drop prompts at the end of a pass that do not fill a round; otherwise the next pass fills it",
        _PASSES,
        _IN_ORDER,
    )


def pixels_of(environ: Mapping[str, str], name: str) -> int | None:
    """Returns the pixels that a variable of ms-swift's scripts says; UsageError where it says no number."""
    text = environ.get(name, "").strip()
    if text and not (text.isascii() and text.isdigit() and int(text)):
        raise UsageError(f"{name}={text} must be a whole number of pixels, 1 or more")
    return int(text) if text else None
