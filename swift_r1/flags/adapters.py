"""The flags of adapters; and folders of adapters as peft writes them: checkpoints of ours, ms-swift's and others'."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.flags.fields import Scope, check_pattern, flag, shown_value
from swift_r1.flags.training import DTYPES, ModelArguments

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
WEIGHTS = "adapter_model.safetensors"
_PLAIN_STARTS = (True, False, "true", "false", "gaussian", "orthogonal", "eva", None)
"""Values of `init_lora_weights` that leave the model under the adapters as it is."""
_NOT_OURS = [
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "trainable_token_indices",
    "use_qalora",
    "layer_replication",
    "target_parameters",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "use_bdlora",
]


def adapter_config(flag: str, folder: str | Path) -> Mapping[str, Any]:
    """Returns the content of adapter_config.json. Raises UsageError, naming the flag: the folder holds no adapters."""
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
        raise UsageError(
            f"{flag} {folder} holds no adapters ({CONFIG} and {WEIGHTS}): give the folder of a checkpoint of "
            "--train_type lora or qlora"
        )
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UsageError(f"{flag} {folder}: {CONFIG} is not a JSON object")
    return content


def adapters_base(model: str) -> str | None:
    """Returns the base model of a folder of adapters (a checkpoint of `--train_type lora`); None for a whole model."""
    path = Path(model).expanduser() / CONFIG
    return (
        str(json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"])
        if path.is_file()
        else None
    )


KIND = (
    "lora_rank",
    "lora_alpha",
    "target_modules",
    "target_regex",
    "use_rslora",
    "use_dora",
    "modules_to_save",
)
"""Flags that say what adapters are: those of `--adapters` decide them."""


def adapter_flags(flag: str, folder: str | Path) -> dict[str, Any]:
    """Returns the flags that say what the adapters in a folder are. Raises UsageError, naming the flag: they are none,
    or of a kind that cannot be trained here."""
    config = adapter_config(flag, folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UsageError(
            f"{flag} {folder} holds adapters of the kind {kind}: only LoRA is done here"
        )
    faults = [f"{name} {json.dumps(config[name])}" for name in _NOT_OURS if config.get(name)]
    if config.get("bias", "none") != "none":
        faults.append(f"bias {config['bias']}")
    init = config.get("init_lora_weights")
    if init not in _PLAIN_STARTS:
        faults.append(f"init_lora_weights {init}, which changed the model under them")
    if faults:
        raise UsageError(
            f"{flag} {folder} has {', '.join(faults)}, which cannot be trained on here: merge them into a model "
            "(peft's merge_and_unload) and give that as --model"
        )
    targets = config["target_modules"]
    return {
        "lora_rank": config["r"],
        "lora_alpha": config["lora_alpha"],
        "target_modules": [ALL_LINEAR] if isinstance(targets, str) else sorted(targets),
        "target_regex": targets if isinstance(targets, str) else None,
        "use_rslora": bool(config.get("use_rslora")),
        "use_dora": bool(config.get("use_dora")),
        "modules_to_save": sorted(config.get("modules_to_save") or ()),
    }


def _folder(flag: str) -> Callable[[str], object]:
    return lambda folder: adapter_flags(flag, folder)


def _starts_as_identity(name: str) -> None:
    if name not in ("true", "gaussian"):
        raise ValueError(
            f"{name}: adapters begin as the identity over the model as it is, since that is the reference: use true or "
            "gaussian"
        )


_ADAPTERS = Scope(
    lambda args: args.train_type != "full", "with --train_type {train_type}: use lora"
)
_QUANTIZED = Scope(
    lambda args: (
        args.train_type == "qlora" or (args.train_type == "lora" and args.quant_bits is not None)
    ),
    "with --train_type {train_type}: use qlora",
)


@dataclass(frozen=True, kw_only=True)
class AdapterArguments(ModelArguments):
    """Adapters."""

    lora_rank: int = flag(
        8, "rank of the adapters of --train_type lora and qlora", _ADAPTERS, at_least=1
    )
    lora_alpha: int = flag(
        32, "the adapters' product is scaled by --lora_alpha / --lora_rank", _ADAPTERS, at_least=1
    )
    target_modules: list[str] = flag(
        [ALL_LINEAR],
        "modules that get adapters; all-linear: every linear layer except the output head",
        _ADAPTERS,
    )
    target_regex: str | None = flag(
        None,
        "pattern that full names of modules with adapters match",
        _ADAPTERS,
        check=check_pattern,
        instead_of=("target_modules",),
    )
    modules_to_save: list[str] = flag(
        [],
        "modules that are trained whole beside the adapters (ends of their names; all-embedding, all-norm), in the "
        "place of the model's own",
        _ADAPTERS,
    )
    lora_dropout: float = flag(
        0.0,
        "share of each adapter's inputs that is dropped where a gradient is computed; completions, old log-probs and "
        "the reference have none, so that ratios are off by this noise",
        _ADAPTERS,
        at_least=0,
        less_than=1,
        ms_swift="0.05, in old log-probs too",
    )
    use_rslora: bool = flag(False, "scale by --lora_alpha / sqrt(--lora_rank) instead", _ADAPTERS)
    use_dora: bool = flag(
        False,
        "DoRA: train the length of each output's weights apart from their direction",
        _ADAPTERS,
    )
    init_weights: str = flag(
        "true",
        "initial values of A (B is 0): as in a linear layer, or gaussian",
        _ADAPTERS,
        check=_starts_as_identity,
        synonyms={"true": "true"},
    )
    lora_dtype: str | None = flag(
        None,
        "adapters have float32 masters and compute in --torch_dtype: float32 or that",
        _ADAPTERS,
        choices=DTYPES,
    )
    lorap_lr_ratio: float | None = flag(
        None, "LoRA+: B's learning rate as a multiple of --learning_rate", _ADAPTERS, more_than=0
    )
    adapters: list[str] = flag(
        [],
        "folder of adapters (a checkpoint of this project, ms-swift or peft) that training begins with; they decide "
        "rank, alpha and modules, and --model is the model under them",
        _ADAPTERS,
        check=_folder("--adapters"),
    )
    ref_adapters: list[str] = flag(
        [],
        "folder of adapters of the reference (default: --model alone)",
        _ADAPTERS,
        check=_folder("--ref_adapters"),
    )
    quant_bits: int | None = flag(
        None, "bits of the weights under the adapters: 4", _ADAPTERS, at_least=4, at_most=4
    )
    quant_method: str = flag(
        "bnb", "library that stores 4-bit weights: bitsandbytes", _QUANTIZED, choices=("bnb",)
    )
    bnb_4bit_quant_type: str = flag(
        "nf4", "the 16 numbers that 4 bits stand for", _QUANTIZED, choices=("nf4", "fp4")
    )
    bnb_4bit_compute_dtype: str | None = flag(
        None, "dtype that 4-bit weights compute in: --torch_dtype", _QUANTIZED, choices=DTYPES
    )
    bnb_4bit_use_double_quant: bool = flag(
        True, "store the scales of 4-bit weights in 8 bits", _QUANTIZED
    )

    def adapter_faults(self, given: frozenset[str]) -> Iterator[str]:
        """Yields what the flags say against each other and against the folders."""
        if not self.target_modules:
            yield "--target_modules names no module to adapt: all-linear means every linear one"
        for name, dtype, others in (
            ("lora_dtype", self.lora_dtype, ("float32",)),
            ("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype, ()),
        ):
            if dtype not in (None, self.dtype, *others):
                yield f"--{name} {dtype} is not --torch_dtype, in which all of the model computes: leave it out"
        for name in ("adapters", "ref_adapters"):
            if len(getattr(self, name)) > 1:
                yield f"--{name} takes one folder: merge the others into the model first (swift merge-lora)"
        own = self.given_adapters(given)
        for name in sorted(given & own.keys()):
            if getattr(self, name) != own[name]:
                folder = self.start_adapters[0]
                value = shown_value(own[name])
                yield f"--adapters {folder} has --{name} {value}: leave it out, or give that"
        if (
            self.ref_adapters
            and adapter_flags("--ref_adapters", self.ref_adapters[0])["modules_to_save"]
        ):
            yield (
                f"--ref_adapters {self.ref_adapters[0]} has modules_to_save: merge them (swift merge-lora) and give "
                "the result as --ref_model"
            )

    @property
    def low_rank_alone(self) -> bool:
        """Whether the adapters are nothing but `B A`, which is what vLLM takes as an adapter."""
        return not self.use_dora and not self.modules_to_save

    def adapts(self, module: str) -> bool:
        """Says whether the linear layer of this name gets an adapter."""
        if self.target_regex is not None:
            return re.fullmatch(self.target_regex, module) is not None
        ends = tuple(f".{target}" for target in self.target_modules)
        return self.target_modules == [ALL_LINEAR] or f".{module}".endswith(ends)

    @property
    def start_adapters(self) -> list[str]:
        """`--adapters`, or the checkpoint in their place."""
        return self.adapters

    def given_adapters(self, given: frozenset[str]) -> dict[str, Any]:
        """Returns the flags that `--adapters` decides. A given all-linear stays: loading finds out whether it is so."""
        own = adapter_flags("--adapters", self.start_adapters[0]) if self.start_adapters else {}
        linear = "target_modules" in given and self.target_modules == [ALL_LINEAR]
        return {
            name: value
            for name, value in own.items()
            if not (linear and name.startswith("target_"))
        }
