"""Flags of what a run writes and evaluates."""

from __future__ import annotations

from dataclasses import dataclass

from swift_r1.flags.data import EVALUATED
from swift_r1.flags.fields import Scope, resumable_flag

_BEST = Scope(
    lambda args: args.metric_for_best_model is not None, "without --metric_for_best_model"
)
LAST = "last"  # of `--resume_from_checkpoint`: the newest checkpoint of the newest run
_RESUMES = Scope(
    lambda args: args.resume_from_checkpoint is not None, "without --resume_from_checkpoint"
)
_VIEWED = Scope(lambda args: args.view, "without --view true")
_STEPS = Scope(lambda args: args.evaluation == "steps", "without --eval_steps")
_EVAL_STEPS = Scope(lambda args: args.evaluation == "steps", "with --eval_strategy {eval_strategy}")
_SAVE_STEPS = Scope(
    lambda args: args.save_strategy == "steps", "with --save_strategy {save_strategy}"
)
_RECORDED = Scope(lambda args: args.log_tokens != "none", "with --log_tokens none")
_SAMPLED = Scope(lambda args: args.log_tokens == "sample", "with --log_tokens {log_tokens}")
STRATEGIES = ("no", "steps", "epoch")


@dataclass(frozen=True, kw_only=True)
class OutputArguments:
    """Output and evaluation."""

    output_dir: str | None = resumable_flag(
        None, "folder of the runs (default: output/<model name>)"
    )
    add_version: bool = resumable_flag(
        True, "make a new folder vN-<time> in --output_dir for each run"
    )
    logging_steps: int = resumable_flag(5, "steps between two lines of metrics", at_least=1)
    logging_first_step: bool = resumable_flag(True, "a line of metrics for the first step too")
    log_tokens: str = resumable_flag(
        "sample",
        "of which completions every token is recorded, with what the loss saw and did of it (tokens/ in the run "
        "folder): all, some, or none",
        choices=("all", "sample", "none"),
    )
    log_tokens_groups: float = resumable_flag(
        2.0,
        "groups of an optimizer step that are recorded, about: one at least, and the same prompts whenever they come",
        _SAMPLED,
        more_than=0,
    )
    log_tokens_limit: float = resumable_flag(
        2.0,
        "most GiB of the steps' files; over it those of every second step go, and so again, evenly over the run",
        _RECORDED,
        more_than=0,
    )
    view: bool = resumable_flag(
        False,
        "show the run on a page of this machine while it trains, as `swift view` does; needs swift-r1[view]",
    )
    view_port: int = resumable_flag(
        7860,
        "port of that page; where it is taken, the next free one",
        _VIEWED,
        at_least=1,
        at_most=65515,
    )
    save_strategy: str = resumable_flag(
        "steps",
        "checkpoints: every --save_steps, at the end of each pass over the prompts, or no; the end of the run, planned "
        "or not, always leaves one",
        choices=STRATEGIES,
    )
    save_steps: int = resumable_flag(500, "steps between two checkpoints", _SAVE_STEPS, at_least=1)
    save_total_limit: int | None = resumable_flag(
        None, "checkpoints kept; older ones are removed", at_least=1
    )
    metric_for_best_model: str | None = resumable_flag(
        None,
        "keep the checkpoint that is best by it: accuracy, reward or rewards/<name>/mean",
        ms_swift="reward",
    )
    greater_is_better: bool = resumable_flag(
        True, "whether the best checkpoint has that metric largest", _BEST
    )
    early_stop_interval: int | None = resumable_flag(
        None,
        "end the run with the save after which so many in a row were not better by that metric",
        _BEST,
        at_least=1,
    )
    create_checkpoint_symlink: bool = resumable_flag(
        False,
        "links `last`, and with --metric_for_best_model `best`, in the run folder to those checkpoints",
    )
    save_only_model: bool = resumable_flag(
        False, "checkpoints without state/, which cannot be resumed from"
    )
    resume_from_checkpoint: str | None = resumable_flag(
        None,
        "continue in the same run folder: from a checkpoint's path, or from `last`, the newest whole checkpoint of the "
        "newest run in --output_dir (from the beginning where there is none)",
    )
    resume_only_model: bool = resumable_flag(
        False,
        "begin a new run with the weights of the checkpoint that --resume_from_checkpoint names: step 0, a new "
        "optimizer, all of the data; the reference stays --model",
        _RESUMES,
        ms_swift="skips the data that the checkpoint's run has seen",
    )
    resume_force: bool = resumable_flag(False, "resume although flags or data differ", _RESUMES)
    eval_strategy: str | None = resumable_flag(
        None,
        "evaluations: every --eval_steps, at the end of each pass over the prompts, or no (default: steps where "
        "--eval_steps is given, else no)",
        choices=STRATEGIES,
        aliases=("evaluation_strategy",),
        ms_swift="as --save_strategy",
    )
    eval_steps: int | None = resumable_flag(
        None, "steps between two evaluations (default: --save_steps)", _EVAL_STEPS, at_least=1
    )
    eval_unit: str = resumable_flag(
        "step",
        "what --eval_steps counts: optimizer steps, or rounds",
        EVALUATED,
        _STEPS,
        choices=("step", "rollout"),
    )
    eval_on_start: bool = resumable_flag(False, "evaluate before the first step too")
    eval_datasets: list[str] = resumable_flag(
        [],
        "benchmarks and data sets to evaluate on, each whole and judged by its own reward: gsm8k math500#100, "
        "gsm8k=FILE, or a JSON object (docs/evaluation.md); nothing is then held out of --dataset",
        EVALUATED,
        objects=True,
    )
    eval_limit: int | None = resumable_flag(
        None,
        "use at most this many held-out prompts (default: 64), and only the first of each of --eval_datasets (default: "
        "all)",
        EVALUATED,
        at_least=1,
    )
    num_generations_eval: int | None = resumable_flag(
        None,
        "completions per prompt in evaluation (default: --num_generations)",
        EVALUATED,
        at_least=1,
    )
    eval_temperature: float | None = resumable_flag(
        None, "its temperature (default: --temperature)", EVALUATED, at_least=0
    )
    eval_top_p: float = resumable_flag(
        1.0, "top-p in evaluation", EVALUATED, more_than=0, at_most=1
    )
    eval_max_completion_length: int | None = resumable_flag(
        None,
        "longest completion in evaluation (default: --max_completion_length)",
        EVALUATED,
        at_least=1,
    )

    @property
    def evaluation(self) -> str:
        """`--eval_strategy`, or what follows from `--eval_steps` where it is not given."""
        return self.eval_strategy or ("no" if self.eval_steps is None else "steps")

    @property
    def evaluates(self) -> bool:
        """Whether anything is evaluated."""
        return self.evaluation != "no" or self.eval_on_start
