"""Builds all parts of a training process from the arguments, and runs the loop.

The order matters: what forks or spawns (reward workers) comes before threads, the GPU and DeepSpeed.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import chain

import torch

from swift_r1.algorithms.rewards import Composition, from_flags
from swift_r1.data.conversations import Conversation
from swift_r1.data.prompts import Wording, tokenizer_of_run
from swift_r1.data.vocabulary import vocabulary_of
from swift_r1.errors import SwiftError, UsageError, describe, one_line
from swift_r1.flags import Plan, RunFlags, make_plan
from swift_r1.flags.forecast import ForecastArguments
from swift_r1.flags.run import Task
from swift_r1.flags.sft import SftArguments
from swift_r1.flags.training import seconds_of
from swift_r1.models.loading import load_tokenizer
from swift_r1.models.routing import routing_of
from swift_r1.plugins import load_plugins
from swift_r1.record.console import RunConsole
from swift_r1.record.events import Events, Kind
from swift_r1.record.lines import read_rows
from swift_r1.record.recorder import Recorder, RunRecorder
from swift_r1.record.reporters import BUILT_IN, open_reporters
from swift_r1.record.spans import Spans, Stopwatch
from swift_r1.record.token_record import GIB, TOKENS, TokenWriter, cut_record
from swift_r1.rollout.base import Rollouts
from swift_r1.rollout.prefetch import PrefetchedRounds, prefetches
from swift_r1.rollout.prompts import Position
from swift_r1.rollout.recheck import Recheck
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.rollout.rounds import RoundSampler
from swift_r1.rollout.scoring import Grading, Gradings
from swift_r1.runtime.libraries import quiet_libraries
from swift_r1.runtime.processes import run_folder_held
from swift_r1.runtime.ranks import Ranks, join_ranks, lost_peer
from swift_r1.runtime.stopping import NOT_BETTER, OUT_OF_TIME, StopRequest, Watchdog
from swift_r1.training import setup
from swift_r1.training.backends.base import Backend, ReferencePolicy
from swift_r1.training.batching import Batching
from swift_r1.training.bookkeeping import Bookkeeping
from swift_r1.training.checkpoint.folder import link_checkpoints, list_checkpoints, set_aside_later
from swift_r1.training.checkpoint.resume import Checkpoints, RunSummary
from swift_r1.training.checkpoint.saving import Saver
from swift_r1.training.checkpoint.state import Fingerprint, RunState, truncate_logs
from swift_r1.training.chord import Experts
from swift_r1.training.evaluation.evaluate import Evaluator, eval_sets
from swift_r1.training.inputs import Inputs, open_inputs
from swift_r1.training.loop import Trainer
from swift_r1.training.model_checks import choose_batching
from swift_r1.training.objectives import objective_of
from swift_r1.training.objectives.base import AnsweredRounds, AnswerEvaluator, Objective, of_answers
from swift_r1.training.recorded import RecordedRounds
from swift_r1.training.rehearsal import Rehearsal
from swift_r1.training.setup import Context, ModelFacts, Start
from swift_r1.training.shared_device import SharedDevice
from swift_r1.training.teachers import open_teacher
from swift_r1.training.turns import open_turns
from swift_r1.wire.protocol import RoutesAsked, SamplingParams, completion_seed

logger = logging.getLogger("swift_r1.training")
Rounds = RoundSampler | PrefetchedRounds | RecordedRounds


def run(args: RunFlags, start: Start, stop: StopRequest) -> int:
    """Builds all parts, trains, and returns the exit code."""
    quiet_libraries()
    _set_up_torch(args)
    if args.max_runtime is not None:
        stop.limit(seconds_of(args.max_runtime) - (time.time() - start.time))
    saved = RunState.read(start.checkpoint) if start.checkpoint else None
    if saved is not None:
        _check_threads(args, start, saved)
    with ExitStack() as cleanup, ExitStack() as start_up:
        rank = int(os.environ.get("RANK", "0"))
        spans = Spans(start.run_dir)
        tell = Events(start.run_dir)
        spans.step = tell.step = saved.step if saved else 0
        stopwatch = Stopwatch(spans.lane(f"rank-{rank}"))
        start_up.enter_context(stopwatch.timed("start"))
        watchdog = Watchdog(
            args.step_timeout, rank, lambda text: tell("failed", text, step=spans.step)
        )
        ranks = join_ranks(
            args.ddp_timeout,
            args.distributed,
            watchdog.progress,
            backend=args.ddp_backend,
            sequence_parallel_size=args.sequence_parallel_size,
        )
        cleanup.callback(ranks.close)
        cleanup.enter_context(watchdog)
        # Data, models, servers and trackers: every rank waits for the slowest at each of them.
        start_up.enter_context(ranks.busy())
        if ranks.is_rank0:
            cleanup.enter_context(run_folder_held(start.run_dir))
            _prepare_folder(args, start, saved)
        cleanup.callback(spans.flush)
        cleanup.push(lambda _type, error, _trace: _tell_failure(error, ranks, spans, tell))
        tokenizer = load_tokenizer(args.model)
        context = Context(
            args, start, saved, ranks, tokenizer, watchdog, cleanup, spans, stopwatch, tell, stop
        )
        data = Inputs()
        counts = None
        if ranks.is_rank0:
            data = open_inputs(context)
            counts = [torch.tensor([data.num_rows, *map(len, data.eval_prompts)])]
        ranks.use_device()  # workers of the data, which are forked, would hold its memory
        num_rows, *eval_sizes = ranks.broadcast(counts)[0].tolist()
        scheduled_steps = start.replay.scheduled_steps if start.replay is not None else None
        plan = make_plan(
            args, ranks.world_size, None if args.streaming else num_rows, scheduled_steps
        )
        if ranks.is_rank0:
            _tell_beginning(context, plan)
        trainer = _build(context, plan, data, eval_sizes)
        if start.checkpoint is not None:
            trainer.resume(start.checkpoint)
        start_up.close()
        stop.in_order(lambda text: trainer.recorder.event("stopping", text))
        summary = trainer.run()
        if isinstance(args, ForecastArguments):
            return summary.exit_code
        if ranks.is_rank0:
            _tell_end(context, plan, summary)
        trainer.recorder.finish(asdict(summary))
        return summary.exit_code


def _set_up_torch(args: RunFlags) -> None:
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory that was not written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # missing in torch's stub
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    # Otherwise a product that is cut along its sum adds the parts in 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _check_threads(args: RunFlags, start: Start, saved: RunState) -> None:
    """Raises UsageError where a run that promises the same bits would go on with another number of threads."""
    threads = torch.get_num_threads()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    exact = args.deterministic and saved.fingerprint.world_size == processes
    if exact and saved.fingerprint.threads != threads and not args.resume_force:
        raise UsageError(
            f"{start.checkpoint} was computed with {saved.fingerprint.threads} threads per process, here "
            f"there are {threads}, which changes the last bits: set OMP_NUM_THREADS={saved.fingerprint.threads}, or "
            "--resume_force true"
        )


def _prepare_folder(args: RunFlags, start: Start, saved: RunState | None) -> None:
    """Takes out of the run's folder what came after the state that the run goes on from."""
    truncate_logs(start.run_dir, saved.logs if saved and start.resumed else {})
    cut_record(start.run_dir, saved.step if saved else -1)
    set_aside_later(start.run_dir, saved.step if saved else 0)
    if args.create_checkpoint_symlink:
        link_checkpoints(start.run_dir, saved.outcome["best_step"] if saved else None)
    (start.run_dir / "summary.json").unlink(missing_ok=True)


def _tell_beginning(context: Context, plan: Plan) -> None:
    saved = context.saved
    processes = context.ranks.world_size
    kind: Kind = "resumed" if context.start.resumed else "started"
    where = f"from checkpoint-{saved.step}" if saved else "from the beginning"
    if saved and saved.fingerprint.world_size != processes:
        where += f", processes: {processes} ({saved.fingerprint.world_size} before)"
    context.tell(kind, where, total_steps=plan.total_steps)


def _tell_end(context: Context, plan: Plan, summary: RunSummary) -> None:
    """Says why the run ends before its last step, and how it goes on."""
    reason = context.stop.reason
    runtime = context.args.max_runtime
    why = {
        OUT_OF_TIME: f"--max_runtime {runtime} is over after step {summary.steps} of {plan.total_steps}",
        NOT_BETTER: f"--early_stop_interval: no save since step {summary.best_step} was better",
    }.get(reason)
    if why is not None:
        logger.info(why)
        context.tell("stopping", why)
    if reason not in (0, NOT_BETTER):
        goes_on = "begins again: there is no checkpoint yet"
        if list_checkpoints(context.start.run_dir):
            goes_on = f"goes on after step {summary.steps}"
        logger.info("the same command with --resume_from_checkpoint last %s", goes_on)


def _tell_failure(error: BaseException | None, ranks: Ranks, spans: Spans, tell: Events) -> None:
    """Tells what ended the run; other ranks than 0 tell only what that one does not know."""
    if error is not None and (
        ranks.is_rank0 or not (isinstance(error, SwiftError) or lost_peer(error))
    ):
        text = one_line(error) if isinstance(error, SwiftError) else describe(error)
        tell("failed", text if ranks.is_rank0 else f"rank {ranks.rank}: {text}", step=spans.step)


def _build(context: Context, plan: Plan, data: Inputs, eval_sizes: Sequence[int]) -> Trainer:
    """Returns the loop with all its parts: engine, rounds, evaluation, models, checkpoints, log."""
    args = context.args
    start = context.start
    ranks = context.ranks
    stopwatch = context.stopwatch
    writers = setup.open_writers(context) if ranks.is_rank0 and start.replay is None else []
    images = bool(ranks.max(float(data.vision is not None)))
    backend = setup.open_policy(context, images)
    vision = setup.open_vision(context, backend, data.vision) if images else None
    ends = setup.completion_ends(context, backend)
    rollouts = setup.open_rollouts(context, backend, ends, writers, vision)
    recorder = _open_recorder(context, plan)
    run_id = _run_id(args, context.saved)
    reference = setup.open_reference(context, backend, images)
    critic = setup.open_critic(context, plan)
    critic_backend = critic.backend if critic is not None else None
    batching = choose_batching(args, backend, critic_backend, vision)
    rounds: Rounds | AnsweredRounds
    evaluator: Evaluator | AnswerEvaluator | None
    if isinstance(args, SftArguments):
        objective = objective_of(args, backend, reference)
        batching = of_answers(batching, objective.answers_per_row)
        rounds = AnsweredRounds(
            objective, data.prompts, plan.completions_per_round, batching, ranks, stopwatch
        )
        evaluator = _answer_evaluator(args, data, eval_sizes, objective, batching, ranks)
    else:
        rounds, evaluator = _sampled(
            context, plan, data, eval_sizes, backend, batching, rollouts, ends, recorder, run_id
        )
    models = [("loss", "", backend)]
    if critic is not None:
        models.append(("value_loss", "critic/", critic.backend))
    teacher = open_teacher(context, backend, batching)
    frozen = [model for model in (reference, getattr(teacher, "model", None)) if model is not None]
    device = SharedDevice(
        args, ranks.device, rollouts, [model for *_, model in models], frozen, stopwatch
    )
    learning_rate = setup.schedule_of(args, plan, args.peak_learning_rate)
    kind = Rehearsal if isinstance(args, ForecastArguments) else Trainer
    return kind(
        args=args,
        plan=plan,
        ranks=ranks,
        backend=backend,
        learning_rate=learning_rate,
        reference=reference,
        critic=critic,
        experts=Experts(args, data.experts, batching, ranks) if args.chord_sft_dataset else None,
        teacher=teacher,
        batching=batching,
        rounds=rounds,
        evaluator=evaluator,
        device=device,
        checkpoints=Checkpoints(
            saver=_open_saver(context, plan, backend, reference, critic_backend),
            learning_rate=learning_rate,
            critic=critic,
            rollouts=rollouts,
            recorder=recorder,
            monitor=data.monitor,
            choices=data.choices,
            run_id=run_id,
            fingerprint=Fingerprint(
                args.to_dict(), ranks.world_size, start.dataset, torch.get_num_threads()
            ),
        ),
        books=Bookkeeping(
            run_dir=start.run_dir,
            plan=plan,
            ranks=ranks,
            models=models,
            rollouts=rollouts,
            recorder=recorder,
            monitor=data.monitor,
            choices=data.choices,
            recheck=_recheck(args, data),
            stopwatch=stopwatch,
            timed=(
                *(["generate", "reward"] if args.generates else []),
                *(["teacher"] if teacher else []),
                "train",
                "sync",
                *device.timed,
            ),
            max_skipped_steps=args.max_skipped_steps,
        ),
        recorder=recorder,
        stop=context.stop,
        watchdog=context.watchdog,
        spans=context.spans,
        stopwatch=stopwatch,
    )


def _sampled(
    context: Context,
    plan: Plan,
    data: Inputs,
    eval_sizes: Sequence[int],
    backend: Backend,
    batching: Batching,
    rollouts: Rollouts,
    ends: tuple[int, ...],
    recorder: Recorder,
    run_id: str,
) -> tuple[Rounds, Evaluator | None]:
    """Returns the rounds of completions that are sampled, or were, and their evaluation."""
    args = context.args
    facts = ModelFacts(ends, rollouts.max_model_length, backend.vocab_size)
    make_turns = open_turns(context, facts)
    tasks = args.tasks
    # with R3 the engine says which experts it chooses for the tokens
    routes = None
    if args.router_replay_mode == "R3":
        routes = RoutesAsked(**routing_of(backend.model).shape._asdict())

    def on_done(count: int) -> None:
        context.watchdog.progress("generation")
        recorder.phase_advance(count)

    sampler = RoundSampler(
        args=args,
        plan=plan,
        ranks=context.ranks,
        rollouts=rollouts,
        turns=make_turns(rollouts, context.ranks),
        shares={task.name: task.share for task in tasks},
        sampling={task.name: _sampling(task.args, ends) for task in tasks},
        run_id=run_id,
        prompts=data.prompts,
        gradings=_gradings(tasks, data),
        recorder=recorder,
        stopwatch=context.stopwatch,
        progress=context.watchdog.progress,
        on_done=on_done,
        routes=routes,
    )
    rounds: Rounds = sampler
    if context.start.replay is not None:
        rounds = _recorded_rounds(context, data, sampler, backend, batching)
    elif prefetches(args):
        assert isinstance(rollouts, ServerRollouts)
        rounds = PrefetchedRounds(sampler, rollouts, make_turns, context.spans)
        context.cleanup.callback(rounds.close)
    if not any(eval_sizes):
        return rounds, None
    prompts = data.eval_prompts or [[] for _ in eval_sizes]
    sets = eval_sets(
        tasks, sampler.sampling, prompts, eval_sizes, data.open_rewards, facts.max_length
    )
    return rounds, Evaluator(sets, sampler)


def _answer_evaluator(
    args: SftArguments,
    data: Inputs,
    eval_sizes: Sequence[int],
    objective: Objective,
    batching: Batching,
    ranks: Ranks,
) -> AnswerEvaluator | None:
    """Returns what measures held-out answers; None where there are none."""
    held_out = [one for one in chain(*data.eval_prompts) if isinstance(one, Conversation)]
    size = args.per_device_eval_batch_size
    evaluator = AnswerEvaluator(
        objective,
        held_out,
        sum(eval_sizes),
        size * ranks.data_parallel_size,
        replace(batching, completions=size * objective.answers_per_row),
        ranks,
    )
    return evaluator if evaluator.num_completions else None


def _open_recorder(context: Context, plan: Plan) -> Recorder:
    """Returns what writes the run's files, on rank 0; one that writes nothing elsewhere."""
    args = context.args
    run_dir = context.start.run_dir
    diagnosis = context.start.diagnosis
    if not context.ranks.is_rank0:
        return Recorder()
    if not BUILT_IN.issuperset(args.report_to):
        load_plugins(args.external_plugins)  # a replay has not done it
    logged, _ = read_rows(run_dir / "logging.jsonl")  # of a run that goes on
    first = next((row["reward"] for row in logged if row.get("reward") is not None), None)
    recorder = RunRecorder(
        run_dir,
        RunConsole(plan.total_steps, None, first, context.start.replay is not None),
        open_reporters(args.tracker_flags, run_dir, args.to_dict()),
        args.logging_steps,
        args.log_completions,
        first_step=args.logging_first_step,
        token_writer=TokenWriter(
            run_dir / TOKENS, args.log_tokens_limit * GIB, partial(vocabulary_of, context.tokenizer)
        ),
        events=context.tell,
        watch=diagnosis(run_dir) if diagnosis is not None else None,
    )
    return context.cleanup.enter_context(recorder)


def _sampling(args: RunFlags, ends: tuple[int, ...]) -> SamplingParams:
    """Returns how the completions of a task are sampled."""
    return SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        structured_outputs_regex=args.structured_outputs_regex,
        stop=tuple(args.stop_words),
        stop_token_ids=ends,
    )


def _gradings(tasks: Sequence[Task], data: Inputs) -> Gradings | None:
    """Returns how the completions of each task are judged, on rank 0."""
    if data.rewards is None:
        return None
    return {
        task.name: Grading(
            partial(data.rewards.open, names=task.args.reward_funcs),
            from_flags(Composition, task.args),
            task.args.counts_by_turns,
        )
        for task in tasks
    }


def _recheck(args: RunFlags, data: Inputs) -> Mapping[str, Recheck]:
    """Returns what asks the rewards of each task again; nothing where none are to be asked, or they are a record."""
    gradings = _gradings(args.tasks, data)
    if gradings is None or data.prompts is None or not args.recheck_rewards:
        return {}
    return {
        task.name: Recheck(gradings[task.name].open_rewards, data.prompts.columns_beside)
        for task in args.tasks
        if task.args.reward_funcs
    }


def _recorded_rounds(
    context: Context,
    data: Inputs,
    sampler: RoundSampler,
    backend: Backend,
    batching: Batching,
) -> RecordedRounds:
    """Returns the rounds of the run that is replayed, after those that were trained on already."""
    saved = context.saved
    begun = (0, Position())
    if saved is not None:
        before = saved.prompts[""]
        begun = (saved.rounds, Position(before.taken, before.digest))
    fresh = saved is None or (saved.round is None and not context.start.resumed)
    return RecordedRounds(sampler, backend, batching, data.recorded, data.rewards, begun, fresh)


def _open_saver(
    context: Context,
    plan: Plan,
    backend: Backend,
    reference: ReferencePolicy | None,
    critic: Backend | None,
) -> Saver:
    """Returns what writes checkpoints; rank 0 says where the disk has no room for them."""
    args = context.args
    saver = Saver(
        context.start.run_dir,
        backend,
        reference if args.sync_ref_model else None,
        tokenizer_of_run(context.tokenizer, Wording.of(args)),
        context.ranks,
        keep=args.save_total_limit,
        with_state=not args.save_only_model,
        quantization=setup.quantization_of(args),
        critic=critic,
        progress=context.watchdog.progress,
        links=args.create_checkpoint_symlink,
        uploader=setup.open_uploader(context),
        own_dtype=context.start.own_dtype,
        model_card=context.start.model_card,
    )
    if context.ranks.is_rank0 and not isinstance(args, ForecastArguments):
        saves = -(-plan.total_steps // args.save_steps) if args.save_strategy == "steps" else 1
        lacking = saver.lack_of_room(min(saves, args.save_total_limit or saves), args.optim)
        if lacking is not None:
            logger.warning(lacking)
    return saver


def _run_id(args: RunFlags, saved: RunState | None) -> str:
    """Returns what request ids begin with. A server answers a known id from memory, so there each start has a new
    one."""
    if saved is not None and not args.use_vllm:
        return saved.run_id
    if args.deterministic:
        return f"{completion_seed(args.seed, 'run'):x}"[:12]
    return uuid.uuid4().hex[:12]
