"""Builds the parts of a training process that depend on the flags: model and backend, engine, stage, schedule."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from swift_r1.algorithms.config import CISPO_EPSILON_HIGH
from swift_r1.arguments import Plan, RlhfArguments
from swift_r1.data.prompts import PromptEncoder, Wording
from swift_r1.errors import ServerUnreachable, UsageError
from swift_r1.inference.engines.kv_cache import check_layers
from swift_r1.inference.engines.transformers import TransformersEngine
from swift_r1.models.freezing import Freezing
from swift_r1.models.lora import LoraSettings, adapter_config, trained_share
from swift_r1.models.policy import load_model
from swift_r1.models.quantization import Quantization
from swift_r1.plugins.rollouts import multi_turns
from swift_r1.runtime.ranks import Ranks
from swift_r1.sampling.base import EmbeddedRollouts, Rollouts
from swift_r1.sampling.multi_turn import Stage
from swift_r1.sampling.pool.client import RolloutClient
from swift_r1.sampling.pool.pool import ServerPool
from swift_r1.sampling.pool.session import Expected, ServerSession
from swift_r1.sampling.prefetch import generates_ahead
from swift_r1.sampling.remote import ServerRollouts
from swift_r1.sampling.turn_engine import Limits, Opening, TurnEngine
from swift_r1.training.backends.base import Backend, ReferencePolicy
from swift_r1.training.backends.deepspeed_config import read_config
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.checkpoint.rng import seed_everything
from swift_r1.training.model_checks import check_engine, check_logprobs
from swift_r1.training.optimizer import LearningRate, OptimizerConfig
from swift_r1.weights.transport import HTTP
from swift_r1.weights.writer import WeightWriter, saved_token
from swift_r1.wire.http_errors import ServerRefused
from swift_r1.wire.protocol import UpdatePolicy, tokenizer_hash

logger = logging.getLogger("swift_r1.training")


def open_backend(args: RlhfArguments, ranks: Ranks) -> tuple[Backend, int]:
    """The policy and its optimizer, and the size of its vocabulary. Collective.

    Raises:
        UsageError: the model cannot be loaded, adapted, frozen or trained as the flags say.
    """
    lora, quantization, freezing = lora_of(args), quantization_of(args), freezing_of(args)
    if not args.use_vllm:
        check_layers(AutoConfig.from_pretrained(args.model).get_text_config())

    def load() -> nn.Module:
        return load_model(
            args.model,
            args.torch_dtype,
            args.gradient_checkpointing,
            lora,
            quantization=quantization,
            freezing=freezing,
        )

    optimizer = optimizer_of(args, args.peak_learning_rate)
    seed_everything(args.seed)
    if args.deepspeed is None:
        backend: Backend = LocalBackend(load().to(ranks.device), optimizer)
    else:
        from swift_r1.training.backends.deepspeed import DeepSpeedBackend

        config_dtype = AutoConfig.from_pretrained(args.model).dtype or torch.float32
        dtype = getattr(torch, args.torch_dtype) if args.torch_dtype else config_dtype
        config = read_config(args.deepspeed)
        backend = DeepSpeedBackend(load, dtype, optimizer, config, ranks, quantization is not None)
    vocab_size = backend.model.config.get_text_config().vocab_size
    check_logprobs(backend, vocab_size, ranks.device)
    if ranks.is_main:
        logger.info("backend: %s", json.dumps(backend.describe()))
        if lora is not None or freezing is not None:
            logger.info("--train_type %s: %s", args.train_type, trained_share(backend.model))
        if args.advantage_estimator == "reinforce_plus_plus":
            logger.info(
                "--advantage_estimator reinforce_plus_plus has the batch's mean as its baseline, as in the paper; "
                "ms-swift's has the group's, which is reinforce_plus_plus_baseline here"
            )
        if args.loss_type == "cispo" and args.epsilon_high is None:
            logger.info("--loss_type cispo caps the importance ratio at %g (--epsilon_high)", CISPO_EPSILON_HIGH)
    return backend, vocab_size


def open_reference(args: RlhfArguments, backend: Backend, ranks: Ranks) -> ReferencePolicy | None:
    """The reference policy, where a KL needs one. Collective."""
    if not args.wants_reference:
        return None
    if args.offload_ref_model and ranks.is_main and ranks.device.type == "cpu":
        logger.info("--offload_ref_model true does nothing here: without a GPU the reference is in host memory anyway")
    return backend.reference(args.offload_ref_model and ranks.device.type != "cpu")


def optimizer_of(args: RlhfArguments, learning_rate: float) -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate,
        args.weight_decay,
        args.adam_beta1,
        args.adam_beta2,
        args.adam_epsilon,
        args.max_grad_norm,
        args.optim,
    )


def lora_of(args: RlhfArguments) -> LoraSettings | None:
    if args.train_type == "full":
        return None
    return LoraSettings(args.lora_rank, args.lora_alpha, tuple(args.target_modules))


def quantization_of(args: RlhfArguments) -> Quantization | None:
    return Quantization(args.bnb_4bit_quant_type, args.bnb_4bit_use_double_quant) if args.quant_bits else None


def freezing_of(args: RlhfArguments) -> Freezing | None:
    freezing = Freezing(
        tuple(args.freeze_parameters),
        args.freeze_parameters_regex,
        args.freeze_parameters_ratio,
        tuple(args.trainable_parameters),
    )
    return None if freezing == Freezing() else freezing


def open_writers(args: RlhfArguments, run_dir: Path, cleanup: ExitStack) -> list[WeightWriter]:
    """The leases on the rollout servers' weights, from now to the end of the run. On the main rank, before a model is
    loaded: another trainer may hold one. The launcher has taken them already, and saved their token."""
    writers = []
    for url in args.rollout_base_urls:
        client = cleanup.enter_context(RolloutClient(url, args.api_key))
        policy: UpdatePolicy | None = "keep" if generates_ahead(args) else None
        writers.append(WeightWriter(client, token=saved_token(run_dir), policy=policy))
        cleanup.callback(writers[-1].close)
        writers[-1].hold(args.vllm_server_timeout)
    return writers


def let_sleep(writers: Sequence[WeightWriter], level: int) -> None:
    """Engines beside the trainer give their memory back before a model is loaded; 0: they do not."""
    for writer in writers if level else ():
        try:
            writer.sleep(level)
        except (ServerUnreachable, ServerRefused) as error:  # as a lost server, it is brought back by the first push
            logger.warning("the engine stays awake while the model is loaded: %s", error)


def open_pool(args: RlhfArguments, expected: Expected, writers: Sequence[WeightWriter]) -> ServerPool:
    compare = {"true": True, "false": False, "auto": None}[args.weight_delta]
    transport = HTTP if compare else args.weight_transport
    sessions = [ServerSession(writer, expected, args.vllm_server_timeout, transport) for writer in writers]
    return ServerPool(sessions, args.vllm_server_timeout, transport, compare)


def open_rollouts(
    args: RlhfArguments,
    ranks: Ranks,
    backend: Backend,
    tokenizer: Any,
    ends: tuple[int, ...],
    vocab_size: int,
    writers: Sequence[WeightWriter],
    cleanup: ExitStack,
) -> Rollouts:
    """What generates. `writers` are of servers, on the main rank."""
    if not args.use_vllm:
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
        engine = TransformersEngine(backend.generation_model(), tokenizer, ends, pad)
        check_engine(engine, vocab_size)
        return EmbeddedRollouts(engine, backend, ranks)
    pool, limits = None, None
    if writers:
        longest = args.max_length + args.max_completion_length if args.max_length else None
        groups = (args.num_generations, args.num_generations_eval, *(one.num_generations for one in args.eval_tasks()))
        expected = Expected(args.model, tokenizer_hash(tokenizer), vocab_size, longest, max(groups))
        pool = open_pool(args, expected, writers)
        cleanup.callback(pool.close)
        limits = [torch.tensor([pool.first.max_lora_rank or 0, pool.first.own_base])]
    max_rank, own_base = ranks.broadcast(limits)[0].tolist()
    adapter, lora = None, lora_of(args)
    # The server's base is not of 4 bits: merged with that of the trainer it is the policy, on its own it is not.
    if lora is not None and max_rank and quantization_of(args) is None:
        if lora.rank > max_rank:
            raise UsageError(
                f"--lora_rank {lora.rank} is more than the rollout server takes: start it with --vllm_max_lora_rank "
                f"{lora.rank} or more, or without --vllm_enable_lora"
            )
        if not own_base:
            raise UsageError(
                f"a rollout server of {', '.join(args.rollout_base_urls)} holds whole weights that another run has "
                "pushed, and adapters need its own: start it anew"
            )
        adapter = adapter_config(backend.model, lora)
        if ranks.is_main:
            logger.info("adapters alone go to the rollout server, which takes them up to rank %d", max_rank)
    return ServerRollouts(pool, backend, ranks, args.weight_check_steps, adapter)


def open_stage(args: RlhfArguments, tokenizer: Any, ends: tuple[int, ...], model_length: int | None) -> Stage:
    """The scheduler of several turns, and what it asks the model through."""
    encoder = PromptEncoder(tokenizer, wording=Wording.of(args))
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


def schedule_of(args: RlhfArguments, plan: Plan, peak: float) -> LearningRate:
    return LearningRate(args.lr_scheduler_type, peak, plan.warmup_steps, plan.total_steps, args.lr_scheduler_kwargs)
