"""Starts vLLM with the arguments that a server's flags amount to."""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.rollout.config import ServerConfig
from swift_r1.rollout.engines.environment import engine_environment
from swift_r1.rollout.engines.vllm import VllmEngine

logger = logging.getLogger("swift_r1.rollout.vllm")

_CPU_CACHE_BYTES = 2 << 30
_WORKER = "swift_r1.rollout.engines.vllm_worker.SwiftWorker"


def start_vllm(config: ServerConfig) -> VllmEngine:
    """Loads the model into new engine processes. Blocks for seconds to minutes; call it off the event loop.

    Raises:
        UsageError: for an engine argument that vLLM does not have.
        Exception: what vLLM raised (no memory, broken model folder, ...).
    """
    from vllm.platforms import current_platform

    has_gpu = not current_platform.is_cpu()
    arguments = engine_arguments(config, has_gpu)
    os.environ.update(engine_environment(os.environ, has_gpu, arguments["enforce_eager"]))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    unknown = sorted(set(arguments) - {f.name for f in fields(AsyncEngineArgs)})
    if unknown:
        raise UsageError(f"--vllm_engine_kwargs: vLLM's engine has no argument {', '.join(unknown)}")
    logger.info("vLLM %s: %s", "compiled" if not arguments["enforce_eager"] else "eager", arguments)
    return VllmEngine(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), config.update_timeout)


def engine_arguments(config: ServerConfig, has_gpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for this configuration.

    Log-probs are "processed": of the distribution that was sampled from, after temperature.
    """
    eager = config.vllm_enforce_eager if config.vllm_enforce_eager is not None else not has_gpu
    arguments: dict[str, Any] = {
        "model": config.model,
        "dtype": config.torch_dtype or _config_dtype(config),
        "seed": config.seed,
        "enforce_eager": eager,
        "tensor_parallel_size": config.vllm_tensor_parallel_size,
        "enable_prefix_caching": config.vllm_enable_prefix_caching,
        "trust_remote_code": config.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": _WORKER,
        "disable_log_stats": True,
    }
    if config.vllm_enable_lora:
        # Two: generations that an update does not wait for end with the adapter that they began with.
        arguments |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": config.vllm_max_lora_rank}
    if config.max_model_len is not None:
        arguments["max_model_len"] = config.max_model_len
    if has_gpu:
        arguments["gpu_memory_utilization"] = config.vllm_gpu_memory_utilization
        arguments["weight_transfer_config"] = {"backend": "nccl"}
    else:
        arguments["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
        # A seeded request whose prompt is read in two steps kills vLLM's CPU engine (0.32: "CPU Generator does not
        # use offset"): a prompt waits for a step that has room for all of it.
        arguments["enable_chunked_prefill"] = False
    return arguments | dict(config.vllm_engine_kwargs)


def _config_dtype(config: ServerConfig) -> str:
    """The dtype of the model's config: vLLM's "auto" would serve a float32 model in bfloat16, unasked."""
    from transformers import AutoConfig

    dtype = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code).dtype
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")
