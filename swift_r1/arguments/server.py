"""The flags of `swift rollout`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from swift_r1.arguments.fields import Scope, flag, flag_specs, scope_faults, spellings
from swift_r1.arguments.parser import API_KEY_VARIABLE, Command
from swift_r1.arguments.rollout import TurnArguments
from swift_r1.arguments.training import DTYPES
from swift_r1.arguments.world import World

_LORA = Scope(lambda args: args.vllm_enable_lora, "without --vllm_enable_lora true")
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM has kernels for; adapters of lower rank are padded."""
_OWN_ENGINES = "copies of the model are engines of their own"
RESERVED = {
    "logprobs_mode": "the trainer needs log-probs of the distribution that was sampled from",
    "worker_extension_cls": "new weights come in through it",
    "weight_transfer_config": "--weight_transport of swift rlhf says how weights come",
    "max_logprobs": "a completion has the log-prob of each of its own tokens",
    "quantization": "weights come from the trainer as it has them, 16 or 32 bits each",
    "tokenizer": "trainer and server must use the same tokens: use the model's",
    "skip_tokenizer_init": "trainer and server compare their tokenizers",
    "served_model_name": "use --served_model_name",
    "max_loras": "generations that an update does not wait for need two",
    "lora_modules": "adapters come from the trainer",
    "runner": "it generates",
    "data_parallel_backend": _OWN_ENGINES,
    "data_parallel_rank": _OWN_ENGINES,
    "data_parallel_size_local": _OWN_ENGINES,
    "data_parallel_address": _OWN_ENGINES,
}
"""vLLM's engine arguments that this server depends on, and why; the others are the user's."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    """Server."""

    model: str = flag("", "folder of the model, or its Hugging Face id (required, except with --adapters)")
    adapters: str | None = flag(
        None, "adapters (a checkpoint) to serve merged with --model (default: the model they name)"
    )
    host: str = flag("127.0.0.1", "address to listen on; any except loopback needs --api_key", ms_swift="0.0.0.0")
    port: int = flag(8000, "port to listen on", at_least=1, at_most=65535)
    api_key: str | None = flag(None, "key that clients must show (better: in SWIFT_API_KEY)", secret=True)
    ssl_certfile: str | None = flag(None, "certificate (PEM) for HTTPS, with --ssl_keyfile")
    ssl_keyfile: str | None = flag(None, "the certificate's key (PEM)")
    max_pending_requests: int = flag(4096, "completions running or waiting; beyond that: 503", at_least=1)
    served_model_name: str | None = flag(None, "the model's name in /v1/models (default: --model)")
    update_policy: str = flag(
        "wait",
        "what a weight update does with running generations: wait for them, abort them (503), keep them running",
        choices=("wait", "abort", "keep"),
    )
    update_timeout: float = flag(120.0, "seconds without progress that end a weight update", more_than=0)
    client_grace: float = flag(
        5.0, "seconds that a weight update waits for other clients' generations; then they get 503", at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class VllmArguments:
    """Engine (vLLM)."""

    torch_dtype: str | None = flag(
        None, "dtype of weights and computation (default: the model config's)", choices=DTYPES, aliases=("dtype",)
    )
    max_model_len: int | None = flag(
        None, "longest prompt plus completion (default: the model's)", at_least=2, aliases=("vllm_max_model_len",)
    )
    vllm_gpu_memory_utilization: float = flag(0.9, "share of GPU memory for the engine", more_than=0, at_most=1)
    vllm_enforce_eager: bool | None = flag(None, "no torch.compile and no CUDA graphs: starts sooner, runs slower")
    vllm_tensor_parallel_size: int = flag(1, "GPUs (or parts of a CPU) that share one copy of the model", at_least=1)
    vllm_data_parallel_size: int = flag(1, "copies of the model, each with its own GPUs or part of the CPU", at_least=1)
    vllm_enable_prefix_caching: bool = flag(True, "compute a group's shared prompt once")
    vllm_enable_lora: bool = flag(False, "take only the adapters from a trainer with --train_type lora")
    vllm_max_lora_rank: int = flag(
        16, "highest --lora_rank that vLLM accepts, with --vllm_enable_lora true", _LORA, choices=LORA_RANKS
    )
    vllm_engine_kwargs: dict[str, Any] = flag({}, 'any other argument of vLLM\'s engine, as JSON: {"name": value}')


@dataclass(frozen=True, kw_only=True)
class EngineArguments(VllmArguments):
    """Engine (vLLM)."""

    seed: int = flag(42, "seed of the engine", at_least=0)


@dataclass(frozen=True, kw_only=True)
class ToldArguments(TurnArguments):
    """Several turns: told to the trainer, which runs them."""

    external_plugins: list[str] = flag([], "Python files that register the scheduler or environment; the trainer's too")
    enable_thinking: bool | None = flag(None, "passed to the chat template by the trainer")
    max_length: int | None = flag(None, "longest prompt in tokens that the trainer takes", at_least=1)

    @property
    def told(self) -> dict[str, Any]:
        """Those that are given."""
        values = {spec.name: getattr(self, spec.name) for spec in flag_specs(ToldArguments).values()}
        return {name: value for name, value in values.items() if value not in (None, [])}


@dataclass(frozen=True, kw_only=True)
class RolloutArguments(ToldArguments, EngineArguments, ServerArguments, Command):
    """Every flag of `swift rollout`, flat: the attribute has the flag's name."""

    command: ClassVar[str] = "rollout"

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from scope_faults(self, given)
        if not self.model and not self.adapters:
            yield "--model is missing: folder of the model, or its Hugging Face id"
        if self.adapters and self.vllm_enable_lora:
            yield "--vllm_enable_lora true would put a trainer's adapters over those of --adapters: leave one out"
        known = spellings(type(self))
        for name in self.vllm_engine_kwargs:
            spec = known.get(f"vllm_{name}") or known.get(name)
            if spec is not None:
                yield f"--vllm_engine_kwargs holds {name!r}: use --{spec.name}"
            elif (why := RESERVED.get(name)) is not None:
                yield f"--vllm_engine_kwargs holds {name!r}, which is ours: {why}"
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            yield "--ssl_certfile and --ssl_keyfile go together"
        if self.served_model_name == "":
            yield "--served_model_name is empty"

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        name = self.served_model_name or self.adapters or self.model
        return replace(
            self.with_key(environ),
            served_model_name=name,
            multi_turn_scheduler=self.scheduler_name,
            use_gym_env=self.plays_gym or self.use_gym_env,
            external_plugins=[str(Path(path).expanduser().absolute()) for path in self.external_plugins],
        )

    def with_key(self, environ: Mapping[str, str]) -> Self:
        return replace(self, api_key=self.api_key or environ.get(API_KEY_VARIABLE) or None)
