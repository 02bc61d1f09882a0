"""Faults of arguments about data, prompts and evaluations; as `checks.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swift_r1.arguments.parser import Fault
from swift_r1.errors import UsageError

if TYPE_CHECKING:
    from swift_r1.arguments.rlhf import RlhfArguments


def wording_faults(args: Any) -> Iterator[Fault]:
    """A `--system` file that is none; a `--prompt_template` that is none, or that leaves `--enable_thinking` unread."""
    from swift_r1.data.prompt_templates import TEMPLATES, prompt_template, system_message

    try:
        system_message(args.system)
    except UsageError as error:
        yield Fault(str(error), ("system",))
    if args.prompt_template is not None:
        if args.prompt_template in TEMPLATES and args.enable_thinking is not None:
            yield Fault(
                f"--enable_thinking has no effect with --prompt_template {args.prompt_template}", ("enable_thinking",)
            )
        try:
            prompt_template(args.prompt_template)
        except UsageError as error:
            yield Fault(str(error), ("prompt_template",))


def data_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Data flags that go together, or that nothing would read."""
    if args.streaming:
        if args.max_steps <= 0:
            yield Fault("--streaming true needs --max_steps: how long streamed data is, is not known", ("max_steps",))
        if args.split_dataset_ratio:
            yield Fault("--streaming true cannot split rows off: give --val_dataset", ("split_dataset_ratio",))
        for name in ("dataset_num_proc", "load_from_cache_file"):
            if name in given:
                yield Fault(f"--{name} has no effect with --streaming true: rows are prepared as they come", (name,))
    elif "shuffle_buffer_size" in given:
        yield Fault("--shuffle_buffer_size has no effect without --streaming true", ("shuffle_buffer_size",))
    if args.streaming and "shuffle_buffer_size" in given and not args.dataset_shuffle:
        yield Fault("--shuffle_buffer_size has no effect with --dataset_shuffle false", ("shuffle_buffer_size",))
    yield from wording_faults(args)
    if args.truncation_strategy != "delete" and args.max_length is None:
        yield Fault(
            f"--truncation_strategy {args.truncation_strategy} has no effect without --max_length",
            ("truncation_strategy",),
        )


def best_checkpoint_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """The metric that checkpoints are compared by must be there at every save."""
    name = args.metric_for_best_model
    if name is None:
        if "greater_is_better" in given:
            yield Fault("--greater_is_better has no effect without --metric_for_best_model", ("metric_for_best_model",))
        return
    known = ["accuracy", "reward", *(f"rewards/{reward}/mean" for reward in args.reward_names)]
    if name not in known:
        yield Fault(f"--metric_for_best_model {name}: it must be one of {', '.join(known)}", ("reward_funcs",))
    if args.eval_unit == "rollout":
        yield Fault("--metric_for_best_model needs --eval_unit step", ("eval_unit",))
    elif args.eval_steps is None or args.save_steps % args.eval_steps:
        yield Fault(
            f"--metric_for_best_model needs an evaluation at every save: --save_steps {args.save_steps} must be a "
            f"multiple of --eval_steps{'' if args.eval_steps is None else f' {args.eval_steps}'}",
            ("eval_steps", "save_steps"),
        )


def evaluation_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Flags of evaluation need evaluation to happen."""
    if args.eval_steps is None and not args.eval_on_start:
        names = (
            "val_dataset",
            "split_dataset_ratio",
            "per_device_eval_batch_size",
            "eval_limit",
            "eval_unit",
            "eval_datasets",
            "num_generations_eval",
            "eval_temperature",
            "eval_top_p",
            "eval_max_completion_length",
        )
        unused = [f"--{name}" for name in names if name in given and getattr(args, name) not in ([], 0.0)]
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            yield Fault(f"{', '.join(unused)} {verb} no effect without --eval_steps (or --eval_on_start true)")
    if args.val_dataset and args.split_dataset_ratio:
        yield Fault("give either --val_dataset or --split_dataset_ratio, not both")
    if "eval_unit" in given and args.eval_steps is None:
        yield Fault("--eval_unit has no effect without --eval_steps", ("eval_steps", "eval_unit"))
    try:
        args.eval_tasks()
    except UsageError as error:
        yield from (Fault(fault, ("eval_datasets", "prompt_template")) for fault in error.faults)
