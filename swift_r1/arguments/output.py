"""Flags of what a run writes, shows and evaluates."""

from __future__ import annotations

from dataclasses import dataclass

from swift_r1.arguments.fields import flag


@dataclass(frozen=True, kw_only=True)
class OutputArguments:
    """Output and evaluation."""

    output_dir: str | None = flag(None, "folder of the runs (default: output/<model name>)")
    add_version: bool = flag(True, "make a new folder vN-<time> in --output_dir for each run")
    logging_steps: int = flag(5, "steps between two lines of metrics", at_least=1)
    save_steps: int = flag(500, "steps between two checkpoints", at_least=1)
    save_total_limit: int | None = flag(None, "checkpoints kept; older ones are removed", at_least=1)
    metric_for_best_model: str | None = flag(
        None,
        "keep the best checkpoint by this metric of the evaluations: accuracy, reward or rewards/<name>/mean",
        ms_swift="reward",
    )
    greater_is_better: bool = flag(True, "whether the best checkpoint is the one where that is largest")
    save_only_model: bool = flag(False, "checkpoints without state/, which cannot be resumed from")
    resume_from_checkpoint: str | None = flag(
        None,
        "go on in the same run folder: from a checkpoint's path, or from `last`, the newest whole checkpoint of the "
        "newest run in --output_dir (from the beginning where there is none)",
    )
    resume_force: bool = flag(False, "resume although flags, data or processes are not those of the checkpoint")
    eval_steps: int | None = flag(
        None,
        "steps between two evaluations (default: none)",
        at_least=1,
        ms_swift="--save_steps, where there are held-out rows",
    )
    eval_unit: str = flag(
        "step", "what --eval_steps counts: optimizer steps, or rounds of completions", choices=("step", "rollout")
    )
    eval_on_start: bool = flag(False, "evaluate before the first step too")
    eval_datasets: list[str] = flag(
        [],
        "benchmarks and data sets to evaluate on, each whole and judged by its own reward: gsm8k math500#100, "
        "gsm8k=FILE, or a JSON object (docs/evaluation.md); nothing is then held out of --dataset",
        objects=True,
    )
    eval_limit: int | None = flag(
        None,
        "held-out prompts an evaluation uses at most (default: 64), and the first so many of each of --eval_datasets "
        "(default: all)",
        at_least=1,
    )
    num_generations_eval: int | None = flag(
        None, "completions a prompt in evaluation (default: --num_generations)", at_least=1
    )
    eval_temperature: float | None = flag(None, "temperature in evaluation (default: --temperature)", at_least=0)
    eval_top_p: float = flag(1.0, "top-p in evaluation", more_than=0, at_most=1)
    eval_max_completion_length: int | None = flag(
        None, "longest completion in evaluation (default: --max_completion_length)", at_least=1
    )
    log_completions: bool = flag(False, "show completions and send them to the trackers")
    report_to: list[str] = flag(["tensorboard"], "trackers", choices=("none", "tensorboard", "wandb", "swanlab"))
    run_name: str | None = flag(None, "name of the run in the trackers (default: the run folder's)")
