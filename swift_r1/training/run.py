"""Builds all parts of a training process from the arguments, and runs the loop.

The order matters: what forks or spawns (prompt workers, reward workers) comes before threads and DeepSpeed.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from swift_r1.arguments import RlhfArguments, make_plan
from swift_r1.arguments.checks import seconds_of
from swift_r1.data.dataset_info import register_dataset_info
from swift_r1.data.loading import load_rows, stream_of
from swift_r1.data.prompts import PromptEncoder, Wording, tokenizer_of_run
from swift_r1.data.sampler import PromptSampler
from swift_r1.errors import UsageError
from swift_r1.models.files import end_tokens, load_tokenizer
from swift_r1.plugins import load_plugins
from swift_r1.rewards.inline import rewards_for
from swift_r1.rewards.monitor import InvalidRewardMonitor
from swift_r1.runtime.quiet import quiet_libraries
from swift_r1.runtime.ranks import join_ranks
from swift_r1.runtime.run_lock import run_folder_held
from swift_r1.runtime.stopping import OUT_OF_TIME, StopRequest
from swift_r1.runtime.watchdog import Watchdog
from swift_r1.sampling.multi_turn import MultiTurn, OneTurn, Turns
from swift_r1.sampling.prefetch import generates_ahead
from swift_r1.sampling.prompts import Prompts, PromptStream, StreamedPrompts
from swift_r1.tracking.console import RunConsole
from swift_r1.tracking.jsonl import JsonLines
from swift_r1.tracking.recorder import Recorder, RunRecorder, SilentRecorder
from swift_r1.tracking.reporters import open_reporters
from swift_r1.training.checkpoint.folder import set_aside_later
from swift_r1.training.checkpoint.run_state import Fingerprint, RunState, truncate_logs
from swift_r1.training.checkpoint.saving import Saver
from swift_r1.training.context import MainRank, Parts
from swift_r1.training.eval_sets import eval_rewards, eval_sets, held_out_prompts, load_eval_prompts
from swift_r1.training.evaluate import Evaluator
from swift_r1.training.loop import Trainer
from swift_r1.training.model_checks import choose_cut
from swift_r1.training.open_critic import open_critic
from swift_r1.training.setup import (
    let_sleep,
    open_backend,
    open_reference,
    open_rollouts,
    open_stage,
    open_writers,
    quantization_of,
    schedule_of,
)
from swift_r1.wire.protocol import SamplingParams, completion_seed

logger = logging.getLogger("swift_r1.training")


@dataclass(frozen=True)
class Start:
    """How a run begins.

    Attributes:
        run_dir: its folder.
        checkpoint: in it, to go on from; None to begin at the beginning, whatever the folder's logs hold.
        dataset: a hash of the training rows.
        prepared: where the launcher has put the rows.
        time: when `swift rlhf` was started, seconds since the epoch.
    """

    run_dir: Path
    checkpoint: Path | None
    dataset: str
    time: float
    prepared: Mapping[str, str] = field(default_factory=dict)


def run(args: RlhfArguments, start: Start, stop: StopRequest) -> int:
    """Builds all parts, trains, and returns the exit code."""
    quiet_libraries()
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory that was not written.
        torch.utils.deterministic.fill_uninitialized_memory = False
    if args.max_runtime is not None:
        stop.limit(seconds_of(args.max_runtime) - (time.time() - start.time))
    run_dir, saved = start.run_dir, RunState.read(start.checkpoint) if start.checkpoint else None
    threads = torch.get_num_threads()
    if saved and args.deterministic and saved.fingerprint.threads != threads and not args.resume_force:
        raise UsageError(
            f"{start.checkpoint} was computed with {saved.fingerprint.threads} threads a process, here are {threads}, "
            f"which changes the last bits: set OMP_NUM_THREADS={saved.fingerprint.threads}, or --resume_force true"
        )
    with ExitStack() as cleanup, ExitStack() as start_up:
        watchdog = Watchdog(args.step_timeout, int(os.environ.get("RANK", "0")))
        ranks = join_ranks(args.ddp_timeout, args.deepspeed is not None, watchdog.progress)
        cleanup.callback(ranks.close)
        cleanup.enter_context(watchdog)
        # Data, models, servers and trackers: every rank waits for the slowest at each of them.
        start_up.enter_context(ranks.busy())
        if ranks.is_main:
            cleanup.enter_context(run_folder_held(run_dir))
            truncate_logs(run_dir, saved.logs if saved else {})
            set_aside_later(run_dir, saved.step if saved else 0)
            (run_dir / "summary.json").unlink(missing_ok=True)
        tokenizer = load_tokenizer(args.model)
        main_rank, counts = None, None
        if ranks.is_main:
            # Other data (--resume_force true) begins at its beginning.
            same_data = saved is not None and saved.fingerprint.dataset == start.dataset
            taken = (saved.prompts_taken, saved.prompts_digest) if saved and same_data else (0, "")
            main_rank, num_rows = _main_rank(args, start, tokenizer, ranks.world_size, taken, cleanup)
            counts = [torch.tensor([num_rows, *map(len, main_rank.eval_prompts)])]
        num_rows, *eval_sizes = ranks.broadcast(counts)[0].tolist()
        plan = make_plan(args, ranks.world_size, None if args.streaming else num_rows)

        writers = open_writers(args, run_dir, cleanup) if ranks.is_main else []
        let_sleep(writers, args.sleep_level)
        backend, vocab_size = open_backend(args, ranks)
        turn_end = PromptEncoder(tokenizer, wording=Wording.of(args)).turn_end
        ends = end_tokens(backend.model, tokenizer, turn_end)
        if ranks.is_main and turn_end not in (None, tokenizer.eos_token_id):
            logger.info("completions end at the chat template's %s too", tokenizer.convert_ids_to_tokens(turn_end))
        # What ended completions in training ends them wherever a checkpoint is used.
        backend.model.generation_config.eos_token_id = list(ends) if len(ends) > 1 else ends[0]
        rollouts = open_rollouts(args, ranks, backend, tokenizer, ends, vocab_size, writers, cleanup)
        sampling = SamplingParams(
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            stop=tuple(args.stop_words),
            stop_token_ids=ends,
        )
        turns: Turns = OneTurn(rollouts)
        if args.multi_turn_scheduler is not None:
            stage = None
            if ranks.is_main:
                stage = open_stage(args, tokenizer, ends, rollouts.max_model_length)
                cleanup.callback(stage.close)
                if main_rank and generates_ahead(args):
                    ahead = open_stage(args, tokenizer, ends, rollouts.max_model_length)
                    cleanup.callback(ahead.close)
                    main_rank = replace(main_rank, stage_ahead=ahead)
            turns = MultiTurn(rollouts, ranks, stage)
        run_id = _run_id(args, saved)
        evaluator = None
        if any(eval_sizes):
            prompts, rewards = (main_rank.eval_prompts, main_rank.rewards) if main_rank else (None, None)
            evaluator = Evaluator(
                sets=eval_sets(args, sampling, prompts, eval_sizes, rewards, rollouts.max_model_length),
                # A server orders its requests itself.
                batch_size=None if args.use_vllm else args.per_device_eval_batch_size * ranks.world_size,
                run_id=run_id,
                seed=args.seed,
            )
        recorder: Recorder = SilentRecorder()
        if ranks.is_main:
            reporters = open_reporters(args.report_to, run_dir, args.run_name, args.to_dict())
            console = RunConsole(plan.total_steps)
            recorder = cleanup.enter_context(
                RunRecorder(run_dir, console, reporters, args.logging_steps, args.log_completions)
            )
        reference = open_reference(args, backend, ranks)
        moving = reference if args.sync_ref_model else None
        critic = open_critic(args, plan, ranks, tokenizer) if args.rlhf_type == "ppo" else None
        trainer = Trainer(
            Parts(
                args=args,
                plan=plan,
                ranks=ranks,
                backend=backend,
                reference=reference,
                critic=critic,
                rollouts=rollouts,
                turns=turns,
                learning_rate=schedule_of(args, plan, args.peak_learning_rate),
                sampling=sampling,
                cut=choose_cut(args, backend, vocab_size, ranks, critic and critic.backend),
                evaluator=evaluator,
                recorder=recorder,
                saver=Saver(
                    run_dir,
                    backend,
                    moving,
                    tokenizer_of_run(tokenizer, Wording.of(args)),
                    ranks,
                    args.save_total_limit,
                    not args.save_only_model,
                    quantization_of(args),
                    critic and critic.backend,
                    watchdog.progress,
                ),
                stop=stop,
                watchdog=watchdog,
                run_id=run_id,
                fingerprint=Fingerprint(args.to_dict(), ranks.world_size, start.dataset, threads),
                main=main_rank,
            )
        )
        cleanup.callback(trainer.collector.close)
        if start.checkpoint is not None:
            trainer.resume(start.checkpoint)
        start_up.close()
        stop.in_order()
        outcome = trainer.run()
        if ranks.is_main and stop.reason == OUT_OF_TIME:
            logger.info(
                "--max_runtime %s is over after step %d of %d", args.max_runtime, outcome.steps, plan.total_steps
            )
        recorder.finish(outcome.to_dict())
        return outcome.exit_code


def _main_rank(
    args: RlhfArguments, start: Start, tokenizer: Any, world_size: int, taken: tuple[int, str], cleanup: ExitStack
) -> tuple[MainRank, int]:
    """Data after the prompts `taken` (their number and hash), and rewards; also the number of training rows."""
    load_plugins(args.external_plugins)
    register_dataset_info(args.custom_dataset_info)
    data = load_rows(args, start.prepared)
    encoder = PromptEncoder(tokenizer, None, args.max_length, Wording.of(args), args.truncation_strategy)
    rows = data.train if args.streaming else encoder.fitting(data.train)
    eval_prompts = [held_out_prompts(data.eval, encoder), *load_eval_prompts(args, tokenizer, data.train)]
    size = make_plan(args, world_size, len(rows)).prompts_per_round
    number, digest = taken
    if args.streaming:
        stream = stream_of(args, size, encoder.fits)
        prompts: Prompts = StreamedPrompts(stream, encoder, number, digest, size, args.dataloader_num_workers)
    else:
        sampler = PromptSampler(len(rows), size, args.dataset_shuffle, args.data_seed)
        sampler.load_state_dict(sampler.state_dict() | {"drawn": number})
        prompts = PromptStream(rows, encoder, sampler, args.dataloader_num_workers)
    cleanup.callback(prompts.close)
    pool = cleanup.enter_context(rewards_for(args, [*args.reward_funcs, *eval_rewards(args)], args.external_plugins))
    pool.wait_ready()
    invalid = cleanup.enter_context(JsonLines(start.run_dir / "invalid_rewards.jsonl"))
    monitor = InvalidRewardMonitor(args.max_invalid_reward_ratio, invalid.write)
    main_rank = MainRank(
        prompts=prompts,
        rewards=pool,
        open_rewards=lambda state: pool.open(state, args.reward_funcs),
        eval_prompts=eval_prompts,
        monitor=monitor,
        decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
    )
    return main_rank, len(rows)


def _run_id(args: RlhfArguments, saved: RunState | None) -> str:
    """What request ids begin with. A server answers a known id from memory, so there it is a new one at each start."""
    if saved is not None and not args.use_vllm:
        return saved.run_id
    if args.deterministic:
        return f"{completion_seed(args.seed, 'run'):x}"[:12]
    return uuid.uuid4().hex[:12]
