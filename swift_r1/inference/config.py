"""What the server needs to know, taken from the flags of `swift rollout`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from swift_r1.errors import UsageError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The flags that the server obeys; names are those of the command line.

    Attributes:
        model: Hugging Face folder (or name) of the base weights, served as version 0.
        merged: `model` was made of `--adapters` for this server alone, which removes it at its end.
        torch_dtype: `float32`, `bfloat16`, `float16`; `None` is the model config's.
        max_model_len: longest prompt plus completion in tokens; `None` is the model's own limit.
        vllm_enforce_eager: `None` decides: eager without a GPU (starts in a third of the time), compiled with one.
        vllm_gpu_memory_utilization: share of the GPU's memory for weights and cache; without a GPU the cache is
            `kv_cache_memory_bytes` of `vllm_engine_kwargs`, 2 GiB unless given.
        vllm_tensor_parallel_size: devices that share one copy of the model.
        vllm_data_parallel_size: copies of the model, each an engine of its own.
        vllm_engine_kwargs: any further argument of vLLM's engine; it wins over ours, and a line says so.
        vllm_enable_lora: take LoRA adapters of rank `vllm_max_lora_rank` at most without the rest of the model.
        served_model_name: the name in `/info`; `None` is `model`.
        update_policy: what a commit does with running generations: `wait` for them, `abort` them, or `keep` them going
            on the new weights.
        update_timeout: seconds that an open update may stand still, and that any wait for an update may take.
        client_grace: seconds that an update or the engine's sleep waits for work that is not its trainer's own; then
            that is stopped.
        max_pending_requests: most completions that are generated or wait to be; what goes beyond gets 503.
        ssl_certfile, ssl_keyfile: PEM files for HTTPS; both or none.
        max_n: most completions a request may ask for.
    """

    model: str
    merged: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    torch_dtype: str | None = None
    max_model_len: int | None = None
    vllm_enforce_eager: bool | None = None
    vllm_gpu_memory_utilization: float = 0.9
    vllm_tensor_parallel_size: int = 1
    vllm_data_parallel_size: int = 1
    vllm_engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    vllm_enable_prefix_caching: bool = True
    vllm_enable_lora: bool = False
    vllm_max_lora_rank: int = 16
    trust_remote_code: bool = False
    seed: int = 42
    served_model_name: str | None = None
    update_policy: str = "wait"
    update_timeout: float = 120.0
    client_grace: float = 5.0
    max_pending_requests: int = 4096
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    max_n: int = 1024

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> ServerConfig:
        """Takes the known names out of the resolved flags, which `swift rollout` has already checked.

        Raises:
            UsageError: if no model is named.
        """
        if not args.get("model"):
            raise UsageError("swift rollout needs --model")
        names = {f.name for f in fields(cls)}
        known = {name: value for name, value in args.items() if name in names}
        if known.get("vllm_engine_kwargs") is None:
            known.pop("vllm_engine_kwargs", None)
        # The file of resolved flags never holds the key.
        known["api_key"] = known.get("api_key") or os.environ.get("SWIFT_API_KEY") or None
        return cls(**known)

    @property
    def loopback(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")

    def check(self) -> None:
        """Raises UsageError for a server that anyone on the network could use."""
        if not self.loopback and not self.api_key:
            raise UsageError(
                f"--host {self.host} is reachable from other machines: give --api_key, or keep to 127.0.0.1"
            )
