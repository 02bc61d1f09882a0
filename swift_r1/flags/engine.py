"""Flags of vLLM's engine: those of `swift rollout` and `swift eval`, and of the engines beside a trainer
(`--vllm_mode colocate`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swift_r1.flags.fields import Scope, flag_specs, resumable_flag, spellings

_STARTS = Scope(
    lambda args: args.starts_engine,
    "without --vllm_mode colocate: give it to `swift rollout`",
    allow_default=True,
)
_ADAPTERS = Scope(
    lambda args: args.takes_adapters,
    "without --train_type lora: all weights go there",
    allow_default=True,
)
_LORA = Scope(lambda args: args.vllm_enable_lora, "without --vllm_enable_lora true")
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has kernels for; adapters of lower rank are padded."""
_OWN_ENGINES = "copies of the model are engines of their own"
RESERVED = {
    "language_model_only": "--vllm_limit_mm_per_prompt says whether there are images",
    "logprobs_mode": "the trainer needs log-probs of the distribution that was sampled from",
    "worker_extension_cls": "new weights come in through it",
    "weight_transfer_config": "--weight_transport of swift rlhf says how weights come",
    "max_logprobs": "a completion has the log-prob of each of its own tokens",
    "speculative_config": "vLLM's log-probs of speculated tokens can be NaN (0.32, ngram)",
    "quantization": "weights come from the trainer as it has them, 16 or 32 bits each; the engine can keep them as "
    "fp8_per_tensor, fp8_per_channel or fp8_per_block",
    "tokenizer": "trainer and server must use the same tokens: use the model's",
    "skip_tokenizer_init": "trainer and server compare their tokenizers",
    "served_model_name": "use --served_model_name",
    "max_loras": "generations that an update does not wait for need two",
    "lora_modules": "adapters come from the trainer",
    "runner": "it generates",
    "trust_remote_code": "code that comes with a model is never run",
    "data_parallel_backend": _OWN_ENGINES,
    "data_parallel_rank": _OWN_ENGINES,
    "data_parallel_size_local": _OWN_ENGINES,
    "data_parallel_address": _OWN_ENGINES,
}
"""vLLM's engine arguments that the server depends on, and why; the others are the user's."""
_ONLINE = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
"""Values of `quantization` that vLLM makes of 16-bit weights itself, at each update."""


_MODALITIES = ("image", "video", "audio")


def check_limits(limits: Mapping[str, Any]) -> None:
    """Raises ValueError for what `--vllm_limit_mm_per_prompt` cannot hold."""
    for name, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} is {value!r}, and how many there may be is a whole number")
        if name not in _MODALITIES:
            raise ValueError(f"{name!r} is none of {', '.join(_MODALITIES)}")


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Engine (vLLM)."""

    # Each `vllm_x` is vLLM's engine argument `x` (`passed_to_vllm`); None leaves what vLLM chooses.
    vllm_enforce_eager: bool | None = resumable_flag(
        None, "no torch.compile and no CUDA graphs: starts sooner, runs slower", _STARTS
    )
    vllm_tensor_parallel_size: int = resumable_flag(
        1,
        "GPUs (or parts of a CPU) that share one copy of the model; colocate: one engine for so many processes",
        _STARTS,
        at_least=1,
        aliases=("tensor_parallel_size",),
    )
    vllm_enable_prefix_caching: bool = resumable_flag(
        True, "compute the shared prompt of a group once", _STARTS
    )
    vllm_enable_lora: bool = resumable_flag(
        False, "take only the adapters from a trainer with --train_type lora", _STARTS, _ADAPTERS
    )
    vllm_max_lora_rank: int = resumable_flag(
        16,
        "highest --lora_rank that vLLM accepts, with --vllm_enable_lora true (colocate: at least --lora_rank)",
        _STARTS,
        _LORA,
        choices=LORA_RANKS,
    )
    vllm_max_num_seqs: int | None = resumable_flag(
        None, "maximum completions an engine runs at once (default: vLLM's)", _STARTS, at_least=1
    )
    vllm_kv_cache_dtype: str | None = resumable_flag(
        None,
        "dtype of the cache of keys and values, such as fp8: more room, other log-probs",
        _STARTS,
    )
    vllm_disable_custom_all_reduce: bool | None = resumable_flag(
        None,
        "NCCL instead of vLLM's own sums over --vllm_tensor_parallel_size GPUs",
        _STARTS,
        ms_swift="true",
    )
    vllm_disable_cascade_attn: bool | None = resumable_flag(
        None, "no special attention kernel for shared prompts", _STARTS
    )

    vllm_limit_mm_per_prompt: dict[str, Any] = resumable_flag(
        {},
        'most images in a prompt, as {"image": 2}: without it the engine reads text alone, and loads no tower (colocate: '
        "as many as a row has); videos and sound are not read, however many it names",
        _STARTS,
        aliases=("limit_mm_per_prompt",),
        check=check_limits,
    )

    @property
    def max_images(self) -> int:
        """Returns how many images a prompt of the engine may have."""
        return int(self.vllm_limit_mm_per_prompt.get("image", 0))

    @property
    def starts_engine(self) -> bool:
        """Whether this command starts an engine with these flags."""
        return True

    @property
    def takes_adapters(self) -> bool:
        """Whether a trainer may send that engine adapters."""
        return True


def passed_to_vllm(flags: EngineFlags) -> dict[str, Any]:
    """vLLM's engine arguments among the flags, without those left to vLLM."""
    values = {name: getattr(flags, name) for name in flag_specs(EngineFlags)}
    del values["vllm_limit_mm_per_prompt"]
    images: dict[str, Any] = {"language_model_only": True}
    if flags.max_images:
        limits = {"image": flags.max_images, "video": 0, "audio": 0}
        # Kept in two processes, which must have seen the same requests in the same order: not where some are cancelled.
        images = {"limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0}
    return images | {
        name.removeprefix("vllm_"): value for name, value in values.items() if value is not None
    }


def changed_flags(flags: EngineFlags) -> dict[str, Any]:
    """Returns the flags that are not at their default."""
    specs = flag_specs(EngineFlags)
    return {name: value for name in specs if (value := getattr(flags, name)) != specs[name].default}


def engine_kwargs_faults(cls: type, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yields what `--vllm_engine_kwargs` of a command must not hold: what has a flag, and what we depend on."""
    known = spellings(cls)
    for name, value in kwargs.items():
        if name == "quantization" and value in _ONLINE:
            continue
        spec = known.get(f"vllm_{name}") or known.get(name)
        if spec is not None:
            yield f"--vllm_engine_kwargs holds {name!r}: use --{spec.name}"
        elif (why := RESERVED.get(name)) is not None:
            yield f"--vllm_engine_kwargs holds {name!r}, which is ours: {why}"
