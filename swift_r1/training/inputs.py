"""What a run trains and is judged on: its prompts and its rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from swift_r1.data.choices import Choices
from swift_r1.data.conversations import ConversationEncoder, PreferenceEncoder
from swift_r1.data.experts import ExpertAnswers, load_answers
from swift_r1.data.loading import have_images, load_rows, stream_of
from swift_r1.data.prompts import Prompt, PromptEncoder, Wording
from swift_r1.data.registry import register_dataset_info
from swift_r1.data.sampler import PromptSampler, build_sampler
from swift_r1.data.vision import VisionProcessor
from swift_r1.data.vocabulary import vocabulary_of
from swift_r1.errors import UsageError
from swift_r1.flags import make_plan
from swift_r1.flags.preferences import PreferenceArguments
from swift_r1.flags.run import Task
from swift_r1.flags.sft import SftArguments
from swift_r1.models.shape import longest_prompt
from swift_r1.plugins import load_plugins
from swift_r1.plugins.environments.registering import register_environment
from swift_r1.plugins.tools.mcp_servers import register_servers
from swift_r1.record.metrics import JsonLines
from swift_r1.record.recorded import RecordedRun
from swift_r1.rewards.batch import RewardCaller
from swift_r1.rewards.monitor import InvalidRewardMonitor
from swift_r1.rollout.prefetch import prefetches
from swift_r1.rollout.prompts import (
    ChosenPrompts,
    MixedPrompts,
    Prompts,
    PromptStream,
    StreamedPrompts,
)
from swift_r1.rollout.reward_models import rewards_and_models
from swift_r1.rollout.scoring import OpenRewards
from swift_r1.training.checkpoint.state import PromptState
from swift_r1.training.evaluation.evaluate import eval_rewards, load_eval_prompts
from swift_r1.training.recorded import RecordedRewards
from swift_r1.training.setup import Context


@dataclass(frozen=True)
class Inputs:
    """Data and rewards, which only rank 0 has."""

    num_rows: int = 0  # of training
    prompts: MixedPrompts | None = None
    choices: Mapping[str, Choices] = field(default_factory=dict)  # with `--prompt_sampler`, by task
    # of each task those held out of its data, then those of each of its `--eval_datasets`
    eval_prompts: list[list[Prompt]] = field(default_factory=list)
    experts: ExpertAnswers | None = None  # of `--chord_sft_dataset`
    # the functions of the run and those that only the evaluation needs
    rewards: RewardCaller | None = None
    monitor: InvalidRewardMonitor | None = None
    vision: VisionProcessor | None = None  # of rows with images
    recorded: RecordedRun | None = None  # whose rounds are trained on, in the place of prompts

    def open_rewards(self, names: Sequence[str]) -> OpenRewards | None:
        """Returns what opens the rewards of these names for a round; None except on rank 0."""
        return None if self.rewards is None else partial(self.rewards.open, names=names)


def open_inputs(context: Context) -> Inputs:
    """Data and rewards, after the prompts that the run has taken; of a replay what another run has recorded. Raises
    UsageError where `--model` reads other tokens than the record has."""
    replay = context.start.replay
    if replay is not None:
        run = RecordedRun.open(replay.run)
        if not run.tokens.is_of(vocabulary_of(context.tokenizer)):
            raise UsageError(
                f"--model {context.args.model} has another tokenizer than the run in {run.path}"
            )
        return replace(
            _open_rewards(context, not replay.scored_anew),
            num_rows=replay.dataset_size or 0,
            recorded=run,
            vision=VisionProcessor.load(context.args.model, context.tokenizer)
            if run.has_images()
            else None,
        )
    args = context.args
    load_plugins(args.external_plugins)
    register_servers(args.mcp_servers)
    register_dataset_info(args.custom_dataset_info)
    found = Inputs(monitor=InvalidRewardMonitor(1.0, lambda _row: None))
    tasks = {task.name: _open_task(context, task) for task in args.tasks}
    prompts = MixedPrompts({name: one.prompts for name, one in tasks.items()})
    if not isinstance(args, SftArguments):
        found = _open_rewards(context)
    return replace(
        found,
        num_rows=sum(one.num_rows for one in tasks.values()),
        prompts=prompts,
        choices={name: one.choices for name, one in tasks.items() if one.choices is not None},
        eval_prompts=[prompts for one in tasks.values() for prompts in one.eval_prompts],
        vision=next((one.vision for one in tasks.values() if one.vision is not None), None),
    )


@dataclass(frozen=True)
class _TaskInputs:
    """The data of a task."""

    num_rows: int  # of training
    prompts: Prompts
    choices: Choices | None  # of another `--prompt_sampler` than uniform
    eval_prompts: list[list[Prompt]]  # held out, then those of each of `--eval_datasets`
    vision: VisionProcessor | None  # of rows with images


def _open_task(context: Context, task: Task) -> _TaskInputs:
    """Opens the data of a task, after the prompts that the run has taken."""
    args = task.args
    saved = context.saved
    if args.env is not None:
        register_environment(args.env, args.env_args, args.reward_env)
    flags = task.data_flags
    data = load_rows(flags, context.start.prepared)
    about = (Wording.of(args), longest_prompt(args), args.truncation_strategy)
    vision = partial(VisionProcessor.load, args.model, context.tokenizer)
    encoder = PromptEncoder(context.tokenizer, *about, vision)
    if isinstance(args, SftArguments):
        kind = PreferenceEncoder if isinstance(args, PreferenceArguments) else ConversationEncoder
        encoder = kind(context.tokenizer, *about, args.loss_scale, vision)
    rows = data.train if args.streaming else encoder.fitting(data.train)
    held_out = [
        prompt for row in encoder.fitting(data.eval, "held-out") if (prompt := encoder.encode(row))
    ]
    # those of streamed data are taken to be as the first ones, which `data` has
    images = have_images(data.train, data.eval)
    eval_prompts = [held_out, *load_eval_prompts(args, context.tokenizer, data.train)]
    plan = make_plan(args, context.ranks.world_size, len(rows))
    size = task.share.prompts or plan.prompts_per_round
    position = PromptState()
    choices = None
    # other data begins at its beginning
    if saved is not None and saved.fingerprint.dataset == context.start.dataset:
        position = saved.prompts.get(task.name, position)
    number = position.taken
    if args.streaming:
        stream = stream_of(flags, encoder.fits)
        prompts: Prompts = StreamedPrompts(stream, encoder, number, position.digest)
    elif args.prompt_sampler != "uniform":
        sampler = build_sampler(args.prompt_sampler, rows, args)
        ahead = args.max_staleness if prefetches(args) else 0
        choices = Choices(sampler, ahead, number, _chosen(context, position))
        prompts = ChosenPrompts(rows, encoder, choices, number)
    else:
        order = PromptSampler(
            len(rows),
            size,
            args.dataset_shuffle,
            int(args.data_seed or 0),
            args.dataloader_drop_last,
        )
        order.load_state_dict(order.state_dict() | {"drawn": number})
        prompts = PromptStream(rows, encoder, order)
    shown = images or any(one.images for one in chain(*eval_prompts))
    return _TaskInputs(len(rows), prompts, choices, eval_prompts, encoder.vision if shown else None)


def _chosen(context: Context, position: PromptState) -> str:
    """Returns the state of a sampler; empty where the saved run may have had another one."""
    args = context.args
    before = {} if context.saved is None else context.saved.fingerprint.args
    now = {"prompt_sampler": args.prompt_sampler, "mixture": args.mixture}
    return position.choices if all(before.get(name) == now[name] for name in now) else ""


def _open_rewards(context: Context, recorded: bool = False) -> Inputs:
    """The rewards: their functions, or in a replay what they gave; and the experts' answers."""
    args = context.args
    start = context.start
    cleanup = context.cleanup
    names = [*args.reward_funcs, *eval_rewards(args)]
    load = partial(load_plugins, args.external_plugins)
    # rewards are told where the run is, as by ms-swift
    own = replace(args, output_dir=str(start.run_dir))
    pool = (
        RecordedRewards(args, names)
        if recorded
        else rewards_and_models(own, names, load, context.spans, context.ranks.device)
    )
    cleanup.enter_context(pool).wait_ready()
    invalid = cleanup.enter_context(JsonLines(start.run_dir / "invalid_rewards.jsonl"))
    monitor = InvalidRewardMonitor(args.max_invalid_reward_ratio, invalid.write)
    experts = None
    if args.chord_sft_dataset:
        load()
        prompt = longest_prompt(args)
        longest = None if prompt is None else prompt + args.max_completion_length
        encoder = ConversationEncoder(
            context.tokenizer, Wording.of(args), longest, loss_scale="last_round"
        )
        experts = load_answers(args.chord_sft_dataset, args.data_flags, encoder)
    return Inputs(experts=experts, rewards=pool, monitor=monitor)
