"""`swift replay`: checks what a run has recorded and the flags, then becomes the trainer on those completions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from swift_r1.algorithms.methods import ESTIMATORS
from swift_r1.cli.memory import print_estimate
from swift_r1.cli.rlhf import environment_of, start
from swift_r1.data.images import images_of, rewards_column
from swift_r1.errors import UsageError, one_line
from swift_r1.flags.batch import processes_of
from swift_r1.flags.fields import flag_specs, shown_value
from swift_r1.flags.parser import is_flag, parse_arguments
from swift_r1.flags.plan import Plan, make_plan
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.world import World
from swift_r1.launch.colocate import on_this_machine
from swift_r1.launch.environment import has_gpu
from swift_r1.launch.run_folder import (
    check_same_run,
    find_checkpoint,
    make_run_folder,
    run_folder_faults,
    write_args,
)
from swift_r1.record.recorded import RecordedRun, Replay, row_columns
from swift_r1.runtime.files import read_text
from swift_r1.runtime.hardware import gpu_memory
from swift_r1.runtime.processes import say

_USAGE = """swift replay RUN [--flag value ...]

Trains again on the completions of a run. RUN is its folder; the run must have had --log_tokens all. The flags are the
run's own (args.json), changed by those given here. Nothing is generated: neither server nor data is needed. Without a
change the weights become the run's, bit for bit. Rewards are the recorded ones, unless --reward_funcs is given.

--max_steps ends it earlier, and --resume_from_checkpoint RUN/checkpoint-N starts it there. The folder is
RUN-replay/vN-<time>, or one in --output_dir; `swift report RUN REPLAY` compares the two. See docs/replay.md."""
_EXAMPLES = """
swift replay output/model/v0-20261121-120000
swift replay output/model/v0-20261121-120000 --learning_rate 2e-6 --loss_type dr_grpo
swift replay output/model/v0-20261121-120000 --resume_from_checkpoint output/model/v0-20261121-120000/checkpoint-40 \\
  --max_steps 41 --advantage_estimator rloo
swift replay output/model/v0-20261121-120000 --external_plugins plugin.py --reward_funcs stricter
"""
_STEPS_PER_ROUND = "optimizer_steps_per_round"

_SAMPLED = [
    "steps_per_generation",
    "generation_batch_size",
    "num_mini_batches",
    "dynamic_sample",
    "max_resample_times",
]
_SAMPLED_GROUPS = ("Data", "Rollouts", "Several turns")
# the flags among those that are not of what was sampled
_MEMORY = ("offload_model", "offload_optimizer")
_EVALUATION = ("metric_for_best_model", "greater_is_better", "early_stop_interval")
_RUN = [
    "resume_from_checkpoint",
    "resume_force",
    "add_version",
    "push_to_hub",
    "view",
    "estimate",
    "max_runtime",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "max_epochs",
    "steps_per_generation",
    "num_mini_batches",
    "bf16",
    "fp16",
]
"""Flags of the recorded run that a replay has at their default; --torch_dtype says what the last two do."""


@dataclass(frozen=True, kw_only=True)
class ReplayArguments(RlhfArguments):
    """Replay."""

    command: ClassVar[str] = "replay"

    @property
    def normalizes_rounds(self) -> bool:
        """Whether advantages are computed from all of a round: a part of it would give others."""
        over_batch = (
            self.scale_rewards == "batch" or ESTIMATORS[self.advantage_estimator].over_batch
        )
        return over_batch or self.rlhf_type == "ppo"

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        whys = {name: why_not_replayed(name) for name in sorted(given)}
        wrong = {name for name, why in whys.items() if why is not None}
        yield from (f"--{name} {whys[name]}" for name in sorted(wrong))
        yield from super().faults(given - wrong, world)

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        args = replace(
            super().resolved(frozenset(flag_specs(type(self))), world, environ), given=given
        )
        by_ratio = "warmup_ratio" in given and "warmup_steps" not in given
        return replace(args, warmup_steps=None) if by_ratio else args


def why_not_replayed(name: str) -> str | None:
    """Says why a replay does not take a flag."""
    if name in _SAMPLED or (
        flag_specs(ReplayArguments)[name].group in _SAMPLED_GROUPS and name not in _MEMORY
    ):
        return "is of what was sampled, and that is recorded: leave it out"
    if name.startswith("eval_") or name in ("num_generations_eval", *_EVALUATION):
        return "is of evaluations, which a replay has none of: measure its checkpoints with `swift eval`"
    if name in ("num_train_epochs", "max_epochs"):
        return "does not say how long a replay is: it ends with the record, or at --max_steps"
    if name == "resume_only_model":
        return "begins a run of its own: use `swift rlhf`"
    return None


def recorded_flags(args: Mapping[str, Any], completions_per_round: int) -> dict[str, Any]:
    """Returns what flags of a replay have in the place of their defaults, from the run's args.json. Raises UsageError:
    they are of another version."""
    try:
        run = RlhfArguments.from_dict(args)
    except TypeError as error:
        raise UsageError(f"args.json is of another version: {error}") from error
    specs = flag_specs(RlhfArguments)
    values: dict[str, Any] = {}
    for name, spec in specs.items():
        is_default = name in _RUN or name in _EVALUATION or name.startswith("eval_")
        values[name] = spec.default if is_default else getattr(run, name)
    follows = {  # what follows from other flags, also from other values of them
        "scale_rewards": run.scale_rewards == run.default_scale,
        "reward_weights": set(run.reward_weights or ()) == {1.0},
        "critic_model": run.critic_model == run.model,
        "critic_learning_rate": run.critic_learning_rate == run.learning_rate,
    }
    values |= {name: None for name, does in follows.items() if does}
    return values | {
        "generation_batch_size": completions_per_round,
        "log_rollout_offpolicy_metrics": True,
    }


def taken_groups() -> list[str]:
    """Returns the groups whose flags a replay takes."""
    groups = dict.fromkeys(spec.group for spec in flag_specs(ReplayArguments).values())
    return [group for group in groups if group not in _SAMPLED_GROUPS]


HELP = (_USAGE, ReplayArguments, _EXAMPLES, taken_groups())


def run(words: Sequence[str]) -> int:
    """Does not come back where training starts. Raises UsageError: bad flags, a run that cannot be replayed so, a model
    that is not there."""
    if not words or is_flag(words[0]):
        raise UsageError(
            "the folder of the recorded run comes first: swift replay RUN [--flag value ...]"
        )
    recorded = RecordedRun.open(words[0])
    args = _arguments(recorded, words[1:])
    os.environ.update(args.process_variables)
    world, _ = World.from_environment(os.environ)
    if world.nnodes > 1:
        raise UsageError("a replay trains on one machine: leave NNODES out")
    gpu = has_gpu(os.environ)
    args, about_machine = on_this_machine(args, gpu)
    if args.estimate:
        memory = gpu_memory(os.environ, world.nproc_per_node) if gpu else None
        return print_estimate(args, world, gpu, memory)
    from swift_r1.launch.checks.preflight import model_files_faults, trainer_faults

    if args.mixture is not None:
        why = "a run with --mixture cannot be replayed, since the record does not say who judges which prompt"
        raise UsageError(f"{recorded.path}: {why}")
    if args.plays_agent:
        why = "a run with --agent or --env cannot be replayed, since an episode may have several sequences"
        raise UsageError(f"{recorded.path}: {why}")
    faults = [
        *run_folder_faults(args, world),
        *_reward_faults(recorded, args),
        *trainer_faults(args, world),
    ]
    faults += model_files_faults(args, os.environ)
    if faults:
        raise UsageError(*faults)
    changes = _changes(recorded, args, world)
    folder, checkpoint = _start(recorded, args, changes)
    if folder is not None:
        _check_replay(folder, recorded, checkpoint)
    args, plan = _planned(recorded, args, world, checkpoint)
    data = recorded.content["dataset_hash"]
    if folder is not None and checkpoint is not None:
        check_same_run(args, world, data, checkpoint)
    for line in (*args.about_flags, *about_machine, *_about(recorded, args, checkpoint, changes)):
        say(line, "replay")
    folder = folder or make_run_folder(args)
    replay = Replay(
        str(recorded.path),
        _scored_anew(args),
        plan.scheduled_steps,
        plan.dataset_size,
    )
    own_dtype = recorded.content["own_dtype"] and "torch_dtype" not in args.given
    args_json = write_args(
        folder, args, world, words, data, checkpoint, {}, plan, own_dtype, replay
    )
    start(args_json, environment_of(args, world, plan, folder, gpu), world)


def _arguments(recorded: RecordedRun, words: Sequence[str]) -> ReplayArguments:
    """Returns the run's flags, changed by those in `words`. Raises UsageError: bad flags."""
    flags = recorded_flags(recorded.args, recorded.plan["completions_per_round"])
    flags["output_dir"] = f"{recorded.path}-replay"
    if not os.environ.get("NPROC_PER_NODE"):
        flags["nproc_per_node"] = processes_of(recorded.args)
    return parse_arguments(ReplayArguments, words, recorded=flags)


def _scored_anew(args: ReplayArguments) -> bool:
    return not args.given.isdisjoint({"reward_funcs", "reward_model"})


def _reward_faults(recorded: RecordedRun, args: ReplayArguments) -> Iterator[str]:
    """Says why rewards cannot be computed anew."""
    if not _scored_anew(args):
        return
    if args.multi_turn_scheduler is not None:
        yield "--reward_funcs: what rewards of several turns are called with is not recorded: leave it out"
        return
    from swift_r1.launch.checks.names import reward_model_faults, reward_name_faults
    from swift_r1.launch.checks.preflight import column_faults
    from swift_r1.plugins import load_plugins

    load_plugins(args.external_plugins)
    yield from reward_name_faults(args)
    yield from reward_model_faults(args)
    row = recorded.first_row()
    yield from column_faults(args, [row_columns(row) | rewards_column(images_of(row))])


def _changes(recorded: RecordedRun, args: ReplayArguments, world: World) -> list[str]:
    """Says what may change what is learned."""
    specs = flag_specs(ReplayArguments)
    before = recorded.args
    lines = []
    for name in sorted(args.given - {"max_steps"}):
        old = before.get(name)
        new = getattr(args, name)
        if old != new and not specs[name].info.may_change:
            lines.append(f"--{name} {shown_value(old)} became {shown_value(new)}")
    processes = processes_of(recorded.args)
    if processes != world.size:
        lines.append(f"{processes} processes became {world.size}")
    return lines


def _start(
    recorded: RecordedRun, args: ReplayArguments, changes: Sequence[str]
) -> tuple[Path | None, Path | None]:
    """Returns the folder to go on in, None for a new one, and the checkpoint to go on from: the recorded run's, or of a
    replay that was killed. Raises UsageError: it is broken, of neither, or does not go with the flags."""
    named = Path(args.resume_from_checkpoint or "").absolute()
    if args.resume_from_checkpoint is None or named.resolve().parent != recorded.path:
        return find_checkpoint(args)
    from swift_r1.training.checkpoint.folder import fault_of
    from swift_r1.training.checkpoint.state import RunState

    fault = fault_of(named)
    if fault:
        raise UsageError(f"--resume_from_checkpoint {args.resume_from_checkpoint}: {fault}")
    faults = run_folder_faults(replace(args, resume_from_checkpoint=None), World())
    if faults:
        raise UsageError(*faults)
    if changes and RunState.read(named).round is not None:
        raise UsageError(
            f"{named} was saved in the middle of a round, which only the run's own flags can go on with:",
            *changes,
        )
    return None, named


def _check_replay(folder: Path, recorded: RecordedRun, checkpoint: Path | None) -> None:
    """Raises UsageError: the folder to go on in is not a replay of this run, or begins elsewhere than `checkpoint`."""
    try:
        content = json.loads(read_text(folder / "args.json"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / 'args.json'}: {one_line(error)}") from error
    if content.get("replay") is None or content["replay"]["run"] != str(recorded.path):
        raise UsageError(
            f"--resume_from_checkpoint: {folder} is not a replay of {recorded.path}: give another --output_dir"
        )
    if checkpoint is None and content["resumed_from"] is not None:
        raise UsageError(
            f"--resume_from_checkpoint: {folder} was to begin after {content['resumed_from']} and has no checkpoint "
            "of its own: name that one, and another --output_dir"
        )


def _planned(
    recorded: RecordedRun, args: ReplayArguments, world: World, checkpoint: Path | None
) -> tuple[ReplayArguments, Plan]:
    """Returns the plan up to the end of the record or `--max_steps`, and the arguments with that as their `max_steps`.
    The learning rate is that of a run as long as the recorded one was to be. Raises UsageError: what is recorded does
    not go that far, or not with these flags."""
    step, rounds, begun = _begins(checkpoint)
    before = recorded.plan
    size = recorded.plan["dataset_size"]
    plan = make_plan(replace(args, max_steps=recorded.scheduled_steps), world.size, size)
    if plan.completions_per_round != before["completions_per_round"]:
        raise UsageError(
            f"a round of the record has {before['completions_per_round']} completions, and these flags make it "
            f"{plan.completions_per_round}: change --gradient_accumulation_steps, --per_device_train_batch_size or the "
            "number of processes so that they agree"
        )
    per_round = plan.optimizer_steps_per_round
    whole = recorded.whole_rounds(rounds)
    alike = all(
        getattr(plan, name) == before[name]
        for name in ("completions_per_optimizer_step", _STEPS_PER_ROUND)
    )
    if alike:
        scheduled = recorded.scheduled_steps
        last = there = min(recorded.last_step(step), scheduled)
        if (
            args.normalizes_rounds
            or before["completions_per_optimizer_step"] % before["num_generations"]
        ):
            last = min(last, (rounds + whole) * per_round)
    else:  # steps are counted otherwise than in the run
        ends = step - begun + per_round if begun else step
        scheduled = ends + (before["rounds"] - rounds) * per_round
        last = there = ends + whole * per_round
    end = args.max_steps if "max_steps" in args.given and args.max_steps > 0 else last
    if last < there and max(end, step + 1) > last:
        raise UsageError(
            f"these flags need whole rounds of {per_round} steps, and the last one that {recorded.path} has ends with "
            f"step {last}"
        )
    if last <= step or (end > last and alike):
        raise UsageError(
            recorded.why_not(last + 1 if alike else rounds * before[_STEPS_PER_ROUND] + 1)
        )
    if not step < end <= last:
        raise UsageError(
            f"--max_steps {end}: with these flags the replay has steps {step + 1} to {last}"
        )
    args = replace(args, max_steps=end)
    return args, make_plan(args, world.size, size, scheduled)


def _begins(checkpoint: Path | None) -> tuple[int, int, int]:
    """Returns how many steps and rounds come before a replay, and how many steps of the round that it begins in."""
    if checkpoint is None:
        return 0, 0, 0
    from swift_r1.training.checkpoint.state import RunState

    state = RunState.read(checkpoint)
    return state.step, state.rounds, 0 if state.round is None else state.round["done"]


def _about(
    recorded: RecordedRun, args: ReplayArguments, checkpoint: Path | None, changes: Sequence[str]
) -> Iterator[str]:
    """Yields the lines for the start: what is replayed, and whether that is off-policy."""
    rewards = "scored anew" if _scored_anew(args) else "with the recorded rewards"
    where = "" if checkpoint is None else f" after {checkpoint.name}"
    yield f"the completions of {recorded.path}{where}, {rewards}, up to step {args.max_steps}"
    yield from changes
    if changes or _scored_anew(args):
        yield (
            "once weights differ from the run's, its completions are no longer the policy's own (off-policy): "
            "rollout/ess_token, ess_seq, ratio_mean and ratio_max say how far off"
        )
    else:
        yield "no flag of the training is changed: the weights become those of the run"
