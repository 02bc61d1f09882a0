"""The flags of `swift rollout`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from swift_r1.flags.data import SAID_ONCE, check_kwargs
from swift_r1.flags.engine import EngineFlags, engine_kwargs_faults
from swift_r1.flags.fields import check_no_key, flag, flag_specs, scope_faults
from swift_r1.flags.parser import API_KEY_VARIABLE, Command
from swift_r1.flags.rollout import TurnArguments
from swift_r1.flags.training import DTYPES
from swift_r1.flags.world import World

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def host_faults(host: str, api_key: str | None) -> list[str]:
    """Says why a server may not listen there without a key."""
    if host in LOOPBACK or api_key:
        return []
    return [
        f"--host {host} accepts connections from other machines: set --api_key (or {API_KEY_VARIABLE}), or use "
        "127.0.0.1"
    ]


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    """Server."""

    model: str = flag(
        "", "folder of the model, or its Hugging Face id (required, except with --adapters)"
    )
    adapters: str | None = flag(
        None, "adapters (a checkpoint) to serve merged with --model (default: the model they name)"
    )
    host: str = flag(
        "127.0.0.1",
        "host to listen on; anything but localhost requires --api_key",
        ms_swift="0.0.0.0",
    )
    port: int = flag(8000, "port to listen on", at_least=1, at_most=65535)
    api_key: str | None = flag(
        None, "key that clients must show (better: in SWIFT_API_KEY)", secret=API_KEY_VARIABLE
    )
    ssl_certfile: str | None = flag(None, "certificate (PEM) for HTTPS, with --ssl_keyfile")
    ssl_keyfile: str | None = flag(None, "the certificate's key (PEM)")
    batch_invariant: bool = flag(
        False,
        "on a GPU: a token's numbers do not depend on what vLLM computes beside it (VLLM_BATCH_INVARIANT=1), which is "
        "slower",
    )
    max_pending_requests: int = flag(
        4096, "completions running or waiting; beyond that: 503", at_least=1
    )
    served_model_name: str | None = flag(None, "the model's name in /v1/models (default: --model)")
    tool_call_parser: str | None = flag(
        None,
        "vLLM's parser of the model's tool calls, by name (default: guessed from the chat template, a line says which)",
    )
    max_sessions: int = flag(4096, "sessions of agents at a time; beyond that: 503", at_least=1)
    session_timeout: float = flag(
        3600.0, "seconds without a call after which a session expires", more_than=0
    )
    session_memory: float = flag(
        2.0, "GiB that the records of all sessions may take; beyond that: 503", more_than=0
    )
    update_policy: str = flag(
        "wait",
        "what a weight update does with running generations: wait for them, or keep them running",
        choices=("wait", "keep"),
    )
    update_timeout: float = flag(
        120.0, "seconds without progress that end a weight update", more_than=0
    )
    client_grace: float = flag(
        5.0,
        "seconds that a weight update waits for other clients' generations; then they get 503",
        at_least=0,
    )


@dataclass(frozen=True, kw_only=True)
class VllmArguments(EngineFlags):
    """Engine (vLLM)."""

    torch_dtype: str | None = flag(
        None,
        "dtype of weights and computation (default: the model config's; float32 on a CPU without instructions for it)",
        choices=DTYPES,
        aliases=("dtype",),
    )
    max_model_len: int | None = flag(
        None,
        "longest prompt plus completion (default: the model's)",
        at_least=2,
        aliases=("vllm_max_model_len",),
    )
    vllm_gpu_memory_utilization: float = flag(
        0.9, "share of GPU memory for the engine", more_than=0, at_most=1
    )
    vllm_data_parallel_size: int = flag(
        1,
        "copies of the model, each with its own GPUs or part of the CPU",
        at_least=1,
        aliases=("data_parallel_size",),
    )
    vllm_engine_kwargs: dict[str, Any] = flag(
        {}, 'any other argument of vLLM\'s engine, as JSON: {"name": value}', check=check_no_key
    )


@dataclass(frozen=True, kw_only=True)
class EngineArguments(VllmArguments):
    """Engine (vLLM)."""

    seed: int = flag(42, "seed of the engine", at_least=0)


@dataclass(frozen=True, kw_only=True)
class ServerTurnArguments(TurnArguments):
    """Several turns: told to the trainer, which runs them."""

    external_plugins: list[str] = flag(
        [], "Python files that register the scheduler or environment; the trainer's too"
    )
    enable_thinking: bool | None = flag(
        None, "passed to the chat template, by the trainer too", SAID_ONCE
    )
    chat_template_kwargs: dict[str, Any] = flag(
        {}, "other arguments of the chat template, as JSON; the trainer's too", check=check_kwargs
    )
    max_length: int | None = flag(
        None, "longest prompt in tokens that the trainer takes", at_least=1
    )

    @property
    def turn_flags(self) -> dict[str, Any]:
        """The flags of several turns that are given, which the trainer learns."""
        values = {name: getattr(self, name) for name in flag_specs(ServerTurnArguments)}
        return {name: value for name, value in values.items() if value not in (None, [], {})}


@dataclass(frozen=True, kw_only=True)
class RolloutArguments(ServerTurnArguments, EngineArguments, ServerArguments, Command):
    """Every flag of `swift rollout`, flat: the attribute has the flag's name."""

    command: ClassVar[str] = "rollout"

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from scope_faults(self, given)
        if not self.model and not self.adapters:
            yield "--model is missing: folder of the model, or its Hugging Face id"
        if self.adapters and self.vllm_enable_lora:
            yield "--vllm_enable_lora true would put a trainer's adapters over those of --adapters: leave one out"
        yield from engine_kwargs_faults(type(self), self.vllm_engine_kwargs)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            yield "--ssl_certfile and --ssl_keyfile go together"
        if self.served_model_name == "":
            yield "--served_model_name is empty"

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        name = self.served_model_name or self.adapters or self.model
        return replace(
            self.with_secrets(environ),
            served_model_name=name,
            multi_turn_scheduler=self.scheduler_name,
            use_gym_env=self.plays_gym or self.use_gym_env,
            external_plugins=[
                str(Path(path).expanduser().absolute()) for path in self.external_plugins
            ],
        )
