"""Builds all parts of a training process from the arguments, and runs the loop.

The order matters: what forks or spawns (prompt workers, reward workers) comes before threads and DeepSpeed.
"""

from __future__ import annotations

import logging
import time
import uuid
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swift_r1.algorithms.config import CISPO_EPSILON_HIGH
from swift_r1.arguments import Plan, RlhfArguments, make_plan
from swift_r1.arguments.checks import seconds_of
from swift_r1.data.loading import load_rows
from swift_r1.data.prompts import PromptEncoder
from swift_r1.data.sampler import PromptSampler
from swift_r1.data.types import Prompt
from swift_r1.errors import UsageError
from swift_r1.plugins import load_plugins
from swift_r1.plugins.rollouts import multi_turns
from swift_r1.rewards.inline import rewards_for
from swift_r1.rewards.monitor import InvalidRewardMonitor
from swift_r1.rollout.client import RolloutClient
from swift_r1.rollout.engines.transformers import TransformersEngine
from swift_r1.rollout.identity import tokenizer_hash
from swift_r1.rollout.link import Expected, ServerLink
from swift_r1.rollout.protocol import SamplingParams
from swift_r1.tracking.console import RunConsole
from swift_r1.tracking.jsonl import JsonLines
from swift_r1.tracking.recorder import Recorder, RunRecorder, SilentRecorder
from swift_r1.tracking.reporters import open_reporters
from swift_r1.training.backends.base import Backend
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.checkpoints import set_aside_later
from swift_r1.training.distributed import Ranks, join_ranks
from swift_r1.training.evaluate import Evaluator
from swift_r1.training.loop import MainRank, Parts, Trainer
from swift_r1.training.lora import LoraSettings, trained_share
from swift_r1.training.multi_turn import MultiTurn, OneTurn, Stage, Turns
from swift_r1.training.optimizer import LearningRate, OptimizerConfig
from swift_r1.training.policy import load_model
from swift_r1.training.probes import check_fused_head, choose_cut
from swift_r1.training.prompts import PromptStream
from swift_r1.training.rng import seed_everything
from swift_r1.training.rollouts import EmbeddedRollouts, Rollouts, completion_seed
from swift_r1.training.run_lock import run_folder_held
from swift_r1.training.run_state import Fingerprint, RunState, truncate_logs
from swift_r1.training.saving import Saver
from swift_r1.training.server_rollouts import ServerRollouts
from swift_r1.training.stopping import OUT_OF_TIME, StopRequest
from swift_r1.training.turn_engine import Limits, Opening, TurnEngine
from swift_r1.training.watchdog import Watchdog

logger = logging.getLogger("swift_r1.training")


@dataclass(frozen=True)
class Start:
    """How a run begins.

    Attributes:
        run_dir: its folder.
        checkpoint: in it, to go on from; None to begin at the beginning, whatever the folder's logs hold.
        dataset: a hash of the training rows.
        time: when `swift rlhf` was started, seconds since the epoch.
    """

    run_dir: Path
    checkpoint: Path | None
    dataset: str
    time: float


def run(args: RlhfArguments, start: Start, stop: StopRequest) -> int:
    """Builds all parts, trains, and returns the exit code."""
    _quiet_libraries()
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
    with ExitStack() as cleanup:
        ranks = join_ranks(args.ddp_timeout, distributed=args.deepspeed is not None)
        cleanup.callback(ranks.close)
        watchdog = cleanup.enter_context(Watchdog(args.step_timeout, ranks.rank))
        if ranks.is_main:
            cleanup.enter_context(run_folder_held(run_dir))
            truncate_logs(run_dir, saved.logs if saved else {})
            set_aside_later(run_dir, saved.step if saved else 0)
            (run_dir / "summary.json").unlink(missing_ok=True)
        tokenizer = _load_tokenizer(args.model)
        main_rank, held_out, sizes = None, [], None
        if ranks.is_main:
            # Other data (--resume_force true) begins at its beginning.
            same_data = saved is not None and saved.fingerprint.dataset == start.dataset
            taken = saved.prompts_taken if saved and same_data else 0
            main_rank, held_out, num_rows = _main_rank(args, run_dir, tokenizer, ranks.world_size, taken, cleanup)
            sizes = [torch.tensor([num_rows, len(held_out)])]
        num_rows, num_held_out = ranks.broadcast(sizes)[0].tolist()
        plan = make_plan(args, ranks.world_size, num_rows)

        backend, vocab_size = _backend(args, ranks)
        ends = _end_tokens(backend.model, tokenizer)
        rollouts = _rollouts(args, ranks, backend, tokenizer, ends, vocab_size, cleanup)
        sampling = SamplingParams(
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            stop=tuple(args.stop_words),
            stop_token_ids=ends,
        )
        turns: Turns = OneTurn(rollouts)
        if args.multi_turn_scheduler is not None:
            stage = None
            if ranks.is_main:
                stage = _stage(args, tokenizer, ends, rollouts.max_model_length)
                cleanup.callback(stage.close)
            turns = MultiTurn(rollouts, ranks, stage)
        run_id = _run_id(args, saved)
        evaluator = None
        if num_held_out:
            evaluator = Evaluator(
                prompts=held_out,
                num_prompts=num_held_out,
                num_generations=args.num_generations_eval,
                chunk=max(1, args.per_device_eval_batch_size * ranks.world_size // args.num_generations_eval),
                sampling=sampling.model_copy(update={"temperature": args.eval_temperature}),
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
        reference = backend.reference() if args.beta > 0 else None
        moving = reference if args.sync_ref_model else None
        trainer = Trainer(
            Parts(
                args=args,
                plan=plan,
                ranks=ranks,
                backend=backend,
                reference=reference,
                rollouts=rollouts,
                turns=turns,
                learning_rate=_learning_rate(args, plan),
                sampling=sampling,
                cut=choose_cut(args, backend, vocab_size, ranks),
                evaluator=evaluator,
                recorder=recorder,
                saver=Saver(
                    run_dir, backend, moving, tokenizer, ranks, args.save_total_limit, not args.save_only_model
                ),
                stop=stop,
                watchdog=watchdog,
                run_id=run_id,
                fingerprint=Fingerprint(args.to_dict(), ranks.world_size, start.dataset, threads),
                main=main_rank,
            )
        )
        if start.checkpoint is not None:
            trainer.resume(start.checkpoint)
        outcome = trainer.run()
        if ranks.is_main and stop.reason == OUT_OF_TIME:
            logger.info(
                "--max_runtime %s is over after step %d of %d", args.max_runtime, outcome.steps, plan.total_steps
            )
        recorder.finish(outcome.to_dict())
        return outcome.exit_code


def _main_rank(
    args: RlhfArguments, run_dir: Path, tokenizer: Any, world_size: int, taken: int, cleanup: ExitStack
) -> tuple[MainRank, list[Prompt], int]:
    """Data after the first `taken` prompts, and rewards; also the held-out prompts and the number of training rows."""
    load_plugins(args.external_plugins)
    data = load_rows(args)
    encoder = PromptEncoder(tokenizer, args.system, args.max_length)
    rows = encoder.fitting(data.train)
    held_out = [prompt for row in encoder.fitting(data.eval, "held-out") if (prompt := encoder.encode(row))]
    plan = make_plan(args, world_size, len(rows))
    sampler = PromptSampler(len(rows), plan.prompts_per_round, args.dataset_shuffle, args.data_seed)
    sampler.load_state_dict(sampler.state_dict() | {"drawn": taken})
    prompts = PromptStream(rows, encoder, sampler, args.dataloader_num_workers)
    pool = cleanup.enter_context(rewards_for(args, args.reward_funcs, args.external_plugins))
    pool.wait_ready()
    invalid = cleanup.enter_context(JsonLines(run_dir / "invalid_rewards.jsonl"))
    monitor = InvalidRewardMonitor(args.max_invalid_reward_ratio, invalid.write)
    main_rank = MainRank(
        prompts=prompts,
        open_rewards=pool.open,
        monitor=monitor,
        decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
    )
    return main_rank, held_out, len(rows)


def _backend(args: RlhfArguments, ranks: Ranks) -> tuple[Backend, int]:
    lora = None
    if args.train_type == "lora":
        lora = LoraSettings(args.lora_rank, args.lora_alpha, tuple(args.target_modules))

    def load() -> nn.Module:
        return load_model(args.model, args.torch_dtype, args.gradient_checkpointing, lora)

    optimizer = OptimizerConfig(
        args.learning_rate,
        args.weight_decay,
        args.adam_beta1,
        args.adam_beta2,
        args.adam_epsilon,
        args.max_grad_norm,
    )
    seed_everything(args.seed)
    if args.deepspeed is None:
        model = load().to(ranks.device)
        if model.dtype == torch.float16:
            raise UsageError("training in float16 needs a loss scale, which is not there yet: --torch_dtype bfloat16")
        backend: Backend = LocalBackend(model, optimizer)
    else:
        from transformers import AutoConfig

        from swift_r1.training.backends.deepspeed import DeepSpeedBackend, read_config

        config_dtype = AutoConfig.from_pretrained(args.model).dtype or torch.float32
        dtype = getattr(torch, args.torch_dtype) if args.torch_dtype else config_dtype
        backend = DeepSpeedBackend(load, dtype, optimizer, read_config(args.deepspeed), ranks)
    vocab_size = backend.model.config.get_text_config().vocab_size
    check_fused_head(backend, vocab_size, ranks.device)
    if ranks.is_main and lora is not None:
        logger.info("--train_type lora: %s", trained_share(backend.model))
    if ranks.is_main and args.loss_type == "cispo" and args.epsilon_high is None:
        logger.info("--loss_type cispo caps the importance ratio at %g (--epsilon_high)", CISPO_EPSILON_HIGH)
    return backend, vocab_size


def _rollouts(
    args: RlhfArguments,
    ranks: Ranks,
    backend: Backend,
    tokenizer: Any,
    ends: tuple[int, ...],
    vocab_size: int,
    cleanup: ExitStack,
) -> Rollouts:
    if not args.use_vllm:
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
        return EmbeddedRollouts(TransformersEngine(backend.generation_model(), tokenizer, ends, pad), backend, ranks)
    link, version = None, None
    if ranks.is_main:
        client = cleanup.enter_context(RolloutClient(str(args.rollout_base_url), args.api_key))
        longest = args.max_length + args.max_completion_length if args.max_length else None
        expected = Expected(args.model, tokenizer_hash(tokenizer), vocab_size, longest)
        link = ServerLink(client, expected, args.vllm_server_timeout, args.weight_transport)
        version = [torch.tensor([link.first.weight_version])]
    return ServerRollouts(link, backend, ranks, int(ranks.broadcast(version)[0]), args.weight_check_steps)


def _stage(args: RlhfArguments, tokenizer: Any, ends: tuple[int, ...], model_length: int | None) -> Stage:
    """The scheduler of several turns, and what it asks the model through."""
    encoder = PromptEncoder(tokenizer, args.system)
    stage = Stage(str(args.multi_turn_scheduler), args.multi_turn_timeout)
    engine = TurnEngine(
        Opening(encoder, ends),
        lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
        Limits(model_length, args.completion_length_limit_scope == "total", args.max_turns, args.temperature),
        stage.notify,
    )
    gym = {"gym_env": args.gym_env, "context_manager": args.context_manager} if args.use_gym_env else {}
    stage.use(
        multi_turns[args.multi_turn_scheduler](
            infer_engine=engine, max_turns=args.max_turns, tokenizer=tokenizer, **gym
        )
    )
    return stage


def _learning_rate(args: RlhfArguments, plan: Plan) -> LearningRate:
    return LearningRate(
        args.lr_scheduler_type, args.learning_rate, plan.warmup_steps, plan.total_steps, args.lr_scheduler_kwargs
    )


def _run_id(args: RlhfArguments, saved: RunState | None) -> str:
    """What request ids begin with. A server answers a known id from memory, so there it is a new one at each start."""
    if saved is not None and not args.use_vllm:
        return saved.run_id
    if args.deterministic:
        return f"{completion_seed(args.seed, 'run'):x}"[:12]
    return uuid.uuid4().hex[:12]


def _load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load the tokenizer of --model {path}: {str(error).splitlines()[0]}") from error


def _end_tokens(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's and those of the model's generation config."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
    if not ends:
        raise UsageError("neither the tokenizer nor generation_config.json names an end token (eos_token_id)")
    return tuple(sorted(ends))


def _quiet_libraries() -> None:
    """Leaves our own log lines and other libraries' warnings; their progress bars and deprecations are noise."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("swift_r1").setLevel(logging.INFO)
    for name in ("DeepSpeed", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
