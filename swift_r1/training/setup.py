"""Opens what a training process works with, by the flags: policy, reference, critic, engine, scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from swift_r1.algorithms.methods import ESTIMATORS, LOSSES
from swift_r1.algorithms.ppo import PPOConfig
from swift_r1.algorithms.rewards import from_flags
from swift_r1.data.hubs import default_hub
from swift_r1.data.prompts import PromptEncoder, Wording
from swift_r1.data.vision import VisionProcessor
from swift_r1.errors import ServerUnreachable, UsageError
from swift_r1.flags import Plan, RunFlags
from swift_r1.flags.faults import image_faults
from swift_r1.flags.fields import flag_specs
from swift_r1.models import invariant
from swift_r1.models.loading import (
    Quantization,
    end_tokens,
    has_value_head,
    load_critic,
    load_model,
    load_tokenizer,
)
from swift_r1.models.lora import adapter_config
from swift_r1.models.policy import Critic, Policy
from swift_r1.models.shape import transformers_config
from swift_r1.models.vision import Vision
from swift_r1.models.weights import trained_parts, trained_share
from swift_r1.record.events import Events
from swift_r1.record.recorded import Replay
from swift_r1.record.recorder import Watch
from swift_r1.record.spans import Spans, Stopwatch
from swift_r1.rollout.base import EmbeddedRollouts, Rollouts
from swift_r1.rollout.image_probe import ImageProbe
from swift_r1.rollout.pool.pool import Membership, ServerPool
from swift_r1.rollout.pool.session import Expected, ServerSession, why_not_alike
from swift_r1.rollout.prefetch import prefetches
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.runtime.ranks import Ranks
from swift_r1.runtime.stopping import StopRequest, Watchdog
from swift_r1.serving.engines.checks import check_engine
from swift_r1.serving.engines.decoding import check_layers
from swift_r1.serving.engines.invariant import InvariantEngine
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.sync.transport import HTTP
from swift_r1.sync.writer import WeightWriter, saved_token
from swift_r1.training.backends import open_backend
from swift_r1.training.backends.base import Backend, ReferencePolicy
from swift_r1.training.checkpoint.state import RunState, seed_everything
from swift_r1.training.checkpoint.upload import HubFlags, Uploader
from swift_r1.training.model_checks import check_invariance, check_logprobs, check_routing
from swift_r1.training.optimizer import LearningRate
from swift_r1.training.ppo import TrainedCritic
from swift_r1.training.recorded import NothingGenerated
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import (
    AdapterConfig,
    ServerInfo,
    ServerRefused,
    UpdatePolicy,
    tokenizer_hash,
)
from swift_r1.wire.server_file import ready_servers

logger = logging.getLogger("swift_r1.training")


@dataclass(frozen=True)
class Start:
    """Says how a run begins."""

    run_dir: Path  # its folder
    # in it, or of the run that is replayed, to go on from; None to begin at the beginning, whatever the logs hold
    checkpoint: Path | None
    dataset: str  # a hash of the training rows
    time: float  # when `swift rlhf` was started, seconds since the epoch
    prepared: Mapping[str, str] = field(default_factory=dict)  # where the launcher has put the rows
    # its checkpoints have the dtype of the model's config, not that of training
    own_dtype: bool = False
    replay: Replay | None = None
    # What looks at a run's folder, which training does not know: the README.md of checkpoint-<step>, and what is
    # wrong with the log
    model_card: Callable[[Path, int], str] | None = None
    diagnosis: Callable[[Path], Watch] | None = None

    @property
    def resumed(self) -> bool:
        """Whether the run goes on in its own folder."""
        return self.checkpoint is not None and self.checkpoint.parent == self.run_dir


@dataclass(frozen=True)
class ModelFacts:
    """What leading a conversation needs to know of the policy.

    Example: `ModelFacts(ends=(151643, 151645), max_length=4096, vocab_size=151936)`
    """

    ends: tuple[int, ...]  # tokens that end a completion
    max_length: int | None  # tokens that a prompt and its completion may have in the engine
    vocab_size: int


@dataclass(frozen=True)
class Context:
    """What all parts of a training process are made from."""

    args: RunFlags
    start: Start
    saved: RunState | None  # what the run goes on from, if it does
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    watchdog: Watchdog
    cleanup: ExitStack  # closes at the end what is opened here
    spans: Spans
    stopwatch: Stopwatch  # of this rank
    tell: Events
    stop: StopRequest


def open_policy(context: Context, images: bool = False) -> Backend:
    """Returns the policy and its optimizer, with what reads `images`. Collective. Raises UsageError: the model cannot be
    loaded, adapted, frozen or trained as the flags say."""
    args = context.args
    ranks = context.ranks
    if args.generates and not args.use_vllm:
        check_layers(transformers_config(args.model).get_text_config())

    def load() -> PreTrainedModel:
        return load_model(
            args.model,
            args.torch_dtype,
            args.gradient_checkpointing,
            args,
            quantization=quantization_of(args),
            attention=args.attn_impl,
            towers=images,
        )

    _check_images(args, images)
    if args.batch_invariant and args.generates and not args.use_vllm:
        if ranks.device.type != "cpu":
            raise UsageError(
                "--batch_invariant true: trainer and embedded engine compute so on a CPU alone; on a GPU vLLM does "
                "(--use_vllm true)"
            )
        context.cleanup.enter_context(invariant.invariant_forward())
    seed_everything(args.seed)
    backend = open_backend(args, args.model, load, args.peak_learning_rate, ranks, Policy)
    if invariant.is_on() and backend.partitioned and args.takes_adapters:
        raise UsageError(
            f"--batch_invariant true with --train_type {args.train_type} under ZeRO-3 or FSDP2: the engine's copy has "
            "adapters merged, which rounds otherwise: use ZeRO-2, or no --deepspeed"
        )
    check_logprobs(backend)
    if args.router_replay_mode != "disabled":
        check_routing(backend, args.router_replay_mode)
    if ranks.is_rank0:
        logger.info("backend: %s", backend.describe())
        if args.takes_adapters or args.freezes:
            logger.info("--train_type %s: %s", args.train_type, trained_share(backend.model))
        if args.lora_dropout:
            logger.info(
                "--lora_dropout %g: completions and old log-probs are without it, so that ratio, kl and "
                "rollout/logp_diff of a training pass are off by its noise",
                args.lora_dropout,
            )
        note = ESTIMATORS[args.advantage_estimator].note
        if note is not None:
            logger.info("%s", note)
        if args.repetition_penalty != 1:
            logger.info(
                "--repetition_penalty %g: the engine samples from the penalised distribution, ratios are those of the "
                "policy without it; rollout/logp_diff has the difference, which is not corrected%s",
                args.repetition_penalty,
                " except by --rollout_importance_sampling_mode"
                if args.rollout_importance_sampling_mode
                else "",
            )
        cap = LOSSES[args.loss_type].cap if args.generates else None
        if cap is not None and args.epsilon_high is None:
            logger.info(
                "--loss_type %s caps the importance ratio at %g (--epsilon_high)",
                args.loss_type,
                cap,
            )
    return backend


def _check_images(args: RunFlags, images: bool) -> None:
    """Raises UsageError where flags do not go with rows that have images, or are about a tower and no row has any."""
    if images:
        faults = image_faults(args)
        if faults:
            raise UsageError(*faults)
        return
    specs = flag_specs(type(args))
    for name in ("freeze_vit", "freeze_aligner", "freeze_llm", "vit_lr", "aligner_lr"):
        if getattr(args, name) != specs[name].default:
            raise UsageError(f"--{name} {str(getattr(args, name)).lower()}: no row has images")


def open_vision(context: Context, backend: Backend, processor: VisionProcessor | None) -> Vision:
    """Returns what reads images for the policy; `processor` is rank 0's."""
    processor = processor or VisionProcessor.load(context.args.model, context.tokenizer)
    return Vision(processor, backend.model, together=context.ranks.world_size > 1)


def open_critic(context: Context, plan: Plan) -> TrainedCritic | None:
    """PPO's critic, all of whose weights are trained; None without PPO. Collective. Raises UsageError: the model cannot
    be loaded as a critic, or reads other tokens than the policy."""
    args = context.args
    ranks = context.ranks
    if args.rlhf_type != "ppo":
        return None
    path = str(args.critic_model)
    rate = float(args.critic_learning_rate or 0.0)
    check_tokens(path, "--critic_model", context.tokenizer)

    def load() -> PreTrainedModel:
        return load_critic(path, args.torch_dtype, args.gradient_checkpointing, args.attn_impl)

    backend = open_backend(args, path, load, rate, ranks, Critic)
    if ranks.is_rank0:
        head = (
            "its own value head"
            if has_value_head(transformers_config(path))
            else "a new value head of zeros"
        )
        logger.info("critic: %s with %s; %s", path, head, trained_share(backend.model))
        logger.info("critic's backend: %s", backend.describe())
    return TrainedCritic(backend, schedule_of(args, plan, rate), from_flags(PPOConfig, args))


def completion_ends(context: Context, backend: Backend) -> tuple[int, ...]:
    """The tokens that end a completion, in training and wherever a checkpoint is used."""
    tokenizer = context.tokenizer
    prompts = PromptEncoder(tokenizer, wording=Wording.of(context.args))
    found = (prompts.turn_end, prompts.call_end)
    turn_ends = {one for one in found if one is not None} - {tokenizer.eos_token_id}
    ends = end_tokens(backend.model, tokenizer, turn_ends)
    if context.ranks.is_rank0 and turn_ends:
        logger.info(
            "completions end at the chat template's %s too",
            " and ".join(tokenizer.convert_ids_to_tokens(sorted(turn_ends))),
        )
    assert backend.model.generation_config is not None
    backend.model.generation_config.eos_token_id = list(ends) if len(ends) > 1 else ends[0]
    return ends


def open_reference(
    context: Context, backend: Backend, images: bool = False
) -> ReferencePolicy | None:
    """The reference policy, where a KL needs one. Collective."""
    args = context.args
    ranks = context.ranks
    if not args.wants_reference:
        return None
    if args.offload_ref_model and ranks.is_rank0 and ranks.device.type == "cpu":
        logger.info(
            "--offload_ref_model true does nothing here: without a GPU the reference is in host memory anyway"
        )
    offload = args.offload_ref_model and ranks.device.type != "cpu"
    path = args.ref_model
    load = None
    if path is not None:
        check_tokens(path, "--ref_model", context.tokenizer)

        def load() -> PreTrainedModel:
            model = load_model(
                path,
                args.torch_dtype,
                gradient_checkpointing=False,
                flag="--ref_model",
                towers=images,
            )
            if type(model) is not type(backend.model):
                names = type(model).__name__, type(backend.model).__name__
                raise UsageError(
                    f"--ref_model {path} is a {names[0]} and the policy a {names[1]}: they must be alike"
                )
            return model

    return backend.reference(offload, load)


def check_tokens(path: str, flag: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UsageError where the model in `path` reads other tokens than the policy writes."""
    own = load_tokenizer(path, flag)
    if tokenizer_hash(own) != tokenizer_hash(tokenizer):
        raise UsageError(
            f"{flag} {path} has another tokenizer than --model: it would read other words"
        )


def quantization_of(args: RunFlags) -> Quantization | None:
    return (
        Quantization(args.bnb_4bit_quant_type, args.bnb_4bit_use_double_quant)
        if args.quant_bits
        else None
    )


def open_writers(context: Context) -> list[WeightWriter]:
    """The leases on the rollout servers' weights, from now to the end of the run. On rank 0, before a model is
    loaded: another trainer may hold one. The launcher has taken them already, and saved their token.

    With `--sleep_level`, engines that can give their memory back for the loading.
    """
    args = context.args
    writers = [_held(context, url) for url in args.rollout_base_urls or _ready_servers(args)]
    for writer in writers if args.sleep_level else ():
        try:
            if writer.client.info().can_sleep:
                writer.sleep(args.sleep_level)
        except (ServerUnreachable, ServerRefused) as error:
            # as a lost server, it is brought back by the first push
            logger.warning("the engine stays awake while the model is loaded: %s", error)
    return writers


def _writer(context: Context, url: str) -> WeightWriter:
    policy: UpdatePolicy | None = "keep" if prefetches(context.args) else None
    client = RolloutClient(url, context.args.api_key)
    return WeightWriter(client, token=saved_token(context.start.run_dir), policy=policy)


def _held(context: Context, url: str) -> WeightWriter:
    """Returns a writer with the lease, which is given back when the run ends, however it does."""
    writer = _writer(context, url)
    context.cleanup.callback(writer.client.close)
    context.cleanup.callback(writer.close)
    writer.hold(context.args.vllm_server_timeout)
    return writer


def _ready_servers(args: RunFlags) -> dict[str, ServerInfo]:
    """Returns the servers of `--vllm_server_file`; none without one. Raises as `ready_servers`."""
    if args.vllm_server_file is None:
        return {}
    return ready_servers(args.vllm_server_file, args.api_key, args.vllm_server_timeout, logger.info)


def open_rollouts(
    context: Context,
    backend: Backend,
    ends: tuple[int, ...],
    writers: Sequence[WeightWriter],
    vision: Vision | None = None,
) -> Rollouts:
    """Returns what generates. `writers` are of servers, on rank 0."""
    args = context.args
    ranks = context.ranks
    tokenizer: Any = context.tokenizer
    if context.start.replay is not None or not args.generates:
        return NothingGenerated()
    if not args.use_vllm:
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
        kind = InvariantEngine if args.batch_invariant else TransformersEngine
        engine = kind(backend.generation_model(), tokenizer, ends, pad, vision)
        check_engine(engine)
        if args.batch_invariant:
            check_invariance(engine, backend)
        return EmbeddedRollouts(engine, backend, ranks)
    pool = None
    limits = None
    if writers:
        pool = _open_pool(context, backend, writers)
        first = pool.first
        limits = [torch.tensor([first.max_lora_rank or 0, first.own_base, first.can_sleep])]
    max_rank, own_base, can_sleep = ranks.broadcast(limits)[0].tolist()
    adapter = _sent_adapter(context, backend, max_rank, bool(own_base))
    probe = None
    if vision is not None and trained_parts(backend.model) != {"llm"}:
        probe = ImageProbe(vision)
    return ServerRollouts(
        pool, backend, ranks, args.weight_check_steps, adapter, bool(can_sleep), probe
    )


def _open_pool(context: Context, backend: Backend, writers: Sequence[WeightWriter]) -> ServerPool:
    """Returns the servers, which must serve the policy as the run needs it; on rank 0."""
    args = context.args
    longest = args.max_length + args.max_completion_length if args.max_length else None
    groups = [args.num_generations]
    groups += [task.args.num_generations_eval or 0 for task in args.tasks]
    groups += [one.num_generations for one in args.eval_tasks()]
    expected = Expected(
        args.model,
        tokenizer_hash(context.tokenizer),
        backend.vocab_size,
        longest,
        max(groups),
        args.router_replay_mode == "R3",
        args.batch_invariant,
    )
    compare = {"true": True, "false": False, "auto": None}[args.weight_delta]
    transport = HTTP if compare else args.weight_transport
    timeout = args.vllm_server_timeout
    file = args.vllm_server_file
    if file is None:
        sessions = [ServerSession(writer, expected, timeout, transport) for writer in writers]
    else:
        sessions = _first_sessions(context, writers, expected, transport)
    pool = ServerPool(
        sessions,
        timeout,
        transport,
        compare,
        args.weight_fanout,
        spans=context.spans,
        tell=context.tell,
        source=file,
        stopping=lambda: context.stop.signalled,
    )
    context.cleanup.callback(pool.close)
    if file is not None:
        first = pool.first

        def newcomer(url: str) -> ServerSession:
            return ServerSession(
                _writer(context, url), expected, timeout, transport, first, newcomer=True
            )

        context.cleanup.callback(Membership(Path(file), pool, newcomer).close)
    if args.sleep_level and not pool.first.can_sleep:
        logger.info(
            "--sleep_level %d has no effect on a server that cannot sleep: it can on a GPU, started with "
            """--vllm_engine_kwargs '{"enable_sleep_mode": true}'""",
            args.sleep_level,
        )
    return pool


def _sent_adapter(
    context: Context, backend: Backend, max_rank: int, own_base: bool
) -> AdapterConfig | None:
    """Returns the adapters that go to the servers in the place of whole weights, where these take some, up to
    `max_rank`; None where whole weights go. Raises UsageError: they do not take these."""
    args = context.args
    if not max_rank or not args.takes_adapters:
        return None
    # The server's base weights are not the trainer's 4-bit ones, so adapters over them are another policy; and vLLM
    # knows no magnitudes (DoRA), no modules beside the adapters, and none of a tower.
    alone = (
        quantization_of(args) is None
        and args.low_rank_alone
        and trained_parts(backend.model) == {"llm"}
    )
    if not alone:
        if context.ranks.is_rank0:
            logger.info(
                "whole weights go to the rollout server: it would make another policy of these adapters alone"
            )
        return None
    if args.lora_rank > max_rank:
        raise UsageError(
            f"--lora_rank {args.lora_rank} is more than the rollout server takes: start it with "
            f"--vllm_max_lora_rank {args.lora_rank} or more, or without --vllm_enable_lora"
        )
    if not own_base:
        servers = args.vllm_server_file or ", ".join(args.rollout_base_urls)
        raise UsageError(
            f"a rollout server of {servers} holds whole weights that another run has pushed, and adapters need its "
            "own: start it again"
        )
    if context.ranks.is_rank0:
        logger.info(
            "adapters alone go to the rollout server, which takes them up to rank %d", max_rank
        )
    return adapter_config(backend.model, args)


def _first_sessions(
    context: Context, writers: Sequence[WeightWriter], expected: Expected, transport: str
) -> list[ServerSession]:
    """Returns sessions with the servers of `--vllm_server_file` that are ready by now and alike; others join later, or
    are refused."""
    args = context.args
    known = {one.client.base_url: one for one in writers}
    sessions = list[ServerSession]()
    for url, info in _ready_servers(args).items():
        if why_not_alike([*((one.url, one.first) for one in sessions), (url, info)]) is not None:
            continue
        writer = known.pop(url, None) or _held(context, url)
        sessions.append(ServerSession(writer, expected, args.vllm_server_timeout, transport, info))
    for gone in known.values():
        gone.close()
    return sessions


def open_uploader(context: Context) -> Uploader | None:
    """Returns what sends checkpoints to a hub, on rank 0 with `--push_to_hub`."""
    args = context.args
    if not args.push_to_hub or not context.ranks.is_rank0:
        return None
    hub = default_hub(args.use_hf)
    repo = str(args.hub_model_id)
    flags = HubFlags(hub, repo, args.hub_private_repo, args.hub_strategy, args.hub_timeout)
    return Uploader(flags, context.watchdog.progress)


def schedule_of(args: RunFlags, plan: Plan, peak: float) -> LearningRate:
    return LearningRate(
        args.lr_scheduler_type,
        peak,
        plan.warmup_steps,
        plan.scheduled_steps,
        args.lr_scheduler_kwargs,
    )
