"""Starts vLLM with the arguments that follow from the server's flags."""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from swift_r1.errors import UsageError, one_line
from swift_r1.flags.engine import passed_to_vllm
from swift_r1.flags.server import RolloutArguments
from swift_r1.plugins.tools.parsing import ToolCallParser
from swift_r1.runtime.libraries import large_imports, missing_for_vllm
from swift_r1.serving.engines.base import InferenceEngine, Replicas
from swift_r1.sync.transport import seconds_for

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger("swift_r1.serving.vllm")

_CPU_CACHE_BYTES = 2 << 30
_LATENT = "vLLM's latent attention (MLA) computes another distribution"
_SPARSE = "vLLM has no sparse attention"
_NOT_ON_A_CPU = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _SPARSE,
    "deepseek_v4": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "kimi_linear": "vLLM has no kernels of Kimi Linear",
    "lfm2_moe": "vLLM computes another distribution of a mixture of LFM2's",
    "gpt_oss": "vLLM's engine ends at the first completion of a gpt-oss",
}
"""Families that vLLM 0.32 does not serve there."""
_IMAGES_NOT_ON_A_CPU = {
    "aria": "vLLM's tower reads the padding of images that are not square",
    "gemma3": "vLLM lets no token of an image see those behind it",
}
_BF16_ON_A_CPU = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
"""Else its engine ends at the first completion."""
_VIDEO_PROCESSORS = {"smolvlm"}
"""Families whose processor reads videos too, by torchvision, and whose class in vLLM needs none."""
_WORKER = "swift_r1.serving.engines.vllm_worker.SwiftWorker"
_CPU_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
_DEVICES = "CUDA_VISIBLE_DEVICES"


def start_vllm(config: RolloutArguments, model_bytes: int) -> InferenceEngine:
    """Loads the model into new engine processes, one copy after another, which takes seconds to minutes. `model_bytes`, an
    upper bound of the size of all weights, sets the deadlines. Raises what the engine raises, UsageError for arguments
    that it does not accept."""
    missing = missing_for_vllm()
    if missing:
        raise UsageError(missing)
    from swift_r1.models.loading import load_tokenizer
    from swift_r1.models.multimodal import is_multimodal
    from swift_r1.models.shape import transformers_config
    from swift_r1.serving.engines.decoding import other_layers

    known = transformers_config(config.model)
    if config.max_images and not is_multimodal(known):
        raise UsageError(f"--vllm_limit_mm_per_prompt: --model {config.model} reads text alone")
    from vllm.platforms import current_platform

    has_gpu = not current_platform.is_cpu()
    refused = _NOT_ON_A_CPU | (_IMAGES_NOT_ON_A_CPU if config.max_images else {})
    why = None if has_gpu else refused.get(known.model_type)
    if why is not None:
        raise UsageError(
            f"--model {config.model}: {why} on a CPU: use the embedded engine (--use_vllm false), or a GPU"
        )
    _check_torchvision(config.model, known)
    if not has_gpu and other_layers(known.get_text_config()):
        # Of layers that keep a state vLLM caches prefixes only where it reads prompts in steps (see below).
        config = replace(config, vllm_enable_prefix_caching=False)
    if config.batch_invariant:
        if not has_gpu:
            raise UsageError(
                "--batch_invariant true: vLLM computes so on a GPU alone; on a CPU the embedded engine does (--use_vllm "
                "false)"
            )
        os.environ[_BATCH_INVARIANT] = "1"
    arguments = engine_arguments(config, has_gpu)
    if not has_gpu and known.model_type in _BF16_ON_A_CPU and arguments["dtype"] != "bfloat16":
        raise UsageError(
            f"--model {config.model}: vLLM computes the layers of {known.model_type} only in bfloat16 on a CPU: give "
            "--torch_dtype bfloat16, or use the embedded engine"
        )
    os.environ.update(engine_environment(os.environ, has_gpu, arguments["enforce_eager"]))
    with large_imports():
        from vllm.engine.arg_utils import AsyncEngineArgs

        from swift_r1.serving.engines.vllm import VllmEngine

    unknown = sorted(set(arguments) - {f.name for f in fields(AsyncEngineArgs)})
    if unknown:
        raise UsageError(
            f"--vllm_engine_kwargs: vLLM's engine has no argument {', '.join(unknown)}"
        )
    tokenizer = load_tokenizer(config.model)
    _give_tokenizer(arguments, tokenizer)
    if config.tool_call_parser is not None:
        # Before the engine loads for minutes.
        ToolCallParser(config.tool_call_parser, tokenizer)
    for name, value in engine_arguments(replace(config, vllm_engine_kwargs={}), has_gpu).items():
        if arguments[name] != value:
            logger.info(
                "--vllm_engine_kwargs: %s is %r, in place of %r", name, arguments[name], value
            )
    mode = "eager" if arguments["enforce_eager"] else "compiled"
    settings = ", ".join(f"{name} {value}" for name, value in arguments.items())
    logger.info("vLLM %s: %s", mode, settings)
    if config.vllm_enforce_eager is None and not has_gpu:
        logger.info(
            "eager: compiled mode (--vllm_enforce_eager false) pays for runs that generate for over 10 minutes"
        )
    engines: list[VllmEngine] = []
    try:
        for part in replica_environments(os.environ, config, has_gpu):
            # The engine's processes inherit this process's environment as it is when they start.
            os.environ.update(part)
            limit = seconds_for(config.update_timeout, model_bytes)
            engines.append(
                VllmEngine(_started(arguments, config.vllm_engine_kwargs, has_gpu), limit)
            )
    except BaseException:
        for engine in engines:
            engine.shutdown()
        raise
    return engines[0] if len(engines) == 1 else Replicas(engines)


def _check_torchvision(model: str, known: Any) -> None:
    """Raises UsageError where vLLM's class for a model, or its processor, needs torchvision, which is not here. Some
    that read text alone do too: they stand in one file with a multimodal one."""
    if find_spec("torchvision") is not None:
        return
    from vllm.model_executor.models.registry import ModelRegistry

    [architecture, *_] = known.architectures or [""]
    found: Any = ModelRegistry.models.get(architecture)
    try:
        if found is not None:
            import_module(found.module_name)
        # of some that vLLM reads without: what reads videos is a part of the processor
        needed = known.model_type in _VIDEO_PROCESSORS
    except ModuleNotFoundError as error:
        needed = error.name == "torchvision"
    if needed:
        raise UsageError(
            f"--model {model}: vLLM's class {architecture} needs torchvision, also for texts: install the build that "
            "belongs to this torch, or use the embedded engine"
        )


def _give_tokenizer(arguments: dict[str, Any], tokenizer: Any) -> None:
    """Has vLLM load `tokenizer` where by itself it would build another one of the model's files."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(arguments["model"], trust_remote_code=False)
    if type(own) is not type(tokenizer):
        folder = TemporaryDirectory(prefix="swift-r1-tokenizer-")
        atexit.register(folder.cleanup)  # until then vLLM's processes may load it again
        tokenizer.save_pretrained(folder.name)
        arguments.setdefault("tokenizer", folder.name)


def _started(arguments: Mapping[str, Any], given: Mapping[str, Any], has_gpu: bool) -> AsyncLLM:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.ompmultiprocessing import OMPProcessManager
    from vllm.v1.engine.async_llm import AsyncLLM

    # vLLM chooses by it how much it does at once: on an H100 1,024 sequences and 16,384 tokens a step for generation
    # offline, 128 and 2,048 for a caller that does not say.
    context = UsageContext.LLM_CLASS if has_gpu else None
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config(usage_context=context)
    except (ValueError, TypeError, NotImplementedError) as error:
        # pydantic's errors are ValueErrors
        named = f"--vllm_engine_kwargs {json.dumps(given)}" if given else "these arguments"
        raise UsageError(f"vLLM does not take {named}: {one_line(error)}") from error
    # This may be the process that computes: it gets the threads and CPUs that vLLM gives a worker (nothing on a GPU).
    with OMPProcessManager(config).configure_omp_envs(0, 0):
        return AsyncLLM.from_vllm_config(
            config, disable_log_stats=bool(arguments["disable_log_stats"])
        )


def engine_environment(
    environment: Mapping[str, str], has_gpu: bool, eager: bool
) -> dict[str, str]:
    """Variables to add for the engine's processes, except those that the user has set and the launcher's own
    (`swift_r1.launch.environment`)."""
    # Spawned, they inherit none of this process's threads and locks.
    wanted = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # else those that vLLM starts by `python -m` import from the current folder (see `module_words`)
        "PYTHONSAFEPATH": "1",
    }
    if eager and not has_gpu:
        # Else one helper of the sampler is compiled: 10 s at the first request, and it needs a C++ compiler.
        wanted["TORCH_COMPILE_DISABLE"] = "1"
    if has_gpu:
        # vLLM imports FlashInfer for its sampler at the start, and never samples with it where seeds are given and
        # log-probs are those after the temperature, as ours are.
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        # DeepGEMM compiles its kernels with nvcc at the start, which few machines have; vLLM has others.
        wanted["VLLM_USE_DEEP_GEMM"] = "0"
    return {name: value for name, value in wanted.items() if name not in environment}


def replica_environments(
    environ: Mapping[str, str], config: RolloutArguments, has_gpu: bool
) -> list[dict[str, str]]:
    """Returns the variables in which the copies of the model differ: its GPUs, or its part of the CPU. Raises
    UsageError where there are too few GPUs."""
    copies = config.vllm_data_parallel_size
    each = config.vllm_tensor_parallel_size
    if copies == 1:
        return [{}]
    if has_gpu:
        import torch

        visible = environ.get(_DEVICES)
        name = _DEVICES
        separator = ","
        parts = (
            visible.split(",")
            if visible
            else [str(one) for one in range(torch.cuda.device_count())]
        )
        needed = copies * each
        if len(parts) < needed:
            raise UsageError(
                f"{copies} copies of {each} GPUs each need {needed} GPUs, and {len(parts)} are here"
            )
    else:
        name = _CPU_BINDING
        separator = "|"
        parts = environ.get(_CPU_BINDING, "").split("|")
        if len(parts) != copies * each:
            return [{}] * copies  # the user's own binding
    return [{name: separator.join(parts[one * each : (one + 1) * each])} for one in range(copies)]


def engine_arguments(config: RolloutArguments, has_gpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for this configuration."""
    arguments: dict[str, Any] = {
        "model": config.model,
        "dtype": config.torch_dtype or _config_dtype(config),
        "seed": config.seed,
        "enforce_eager": not has_gpu,
        **passed_to_vllm(config),
        "trust_remote_code": False,
        "load_format": "safetensors",  # else a model without them is read from pickles
        # of the distribution that was sampled from, after temperature
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": _WORKER,
        "disable_log_stats": True,
    }
    if config.vllm_enable_lora:
        # generations that an update does not wait for end with the one that they began with
        arguments["max_loras"] = 2
    if config.max_model_len is not None:
        arguments["max_model_len"] = config.max_model_len
    if has_gpu:
        arguments["gpu_memory_utilization"] = config.vllm_gpu_memory_utilization
        arguments["weight_transfer_config"] = {"backend": "nccl"}
        # dense 16-bit models call none of what would be compiled
        arguments["enable_flashinfer_autotune"] = False
    else:
        arguments["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
        # Only whole blocks of a prompt are shared by its group: with vLLM's 128 tokens, none of a short prompt.
        arguments["block_size"] = 32
        # A seeded request whose prompt is read in two steps kills vLLM's CPU engine (0.32: "CPU Generator does not
        # use offset").
        arguments["enable_chunked_prefill"] = False
        if (
            config.vllm_tensor_parallel_size
            * config.vllm_engine_kwargs.get("pipeline_parallel_size", 1)
            == 1
        ):
            # In vLLM's engine process: it would spin for a worker's answers on the CPUs that the worker computes with,
            # and the worker's libraries take seconds to load. Not "uni", which vLLM overrules on a CPU.
            arguments["distributed_executor_backend"] = (
                "vllm.v1.executor.uniproc_executor.UniProcExecutor"
            )
    return arguments | dict(config.vllm_engine_kwargs)


def _config_dtype(config: RolloutArguments) -> str:
    """The dtype of the model's config: vLLM's "auto" would serve a float32 model in bfloat16."""
    from swift_r1.models.shape import transformers_config

    dtype = transformers_config(config.model).dtype
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")
