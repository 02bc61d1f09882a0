"""Model folders, loaded for training: the policy, the critic and the tokenizer."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swift_r1.errors import UsageError, one_line
from swift_r1.flags.adapters import CONFIG, WEIGHTS, AdapterArguments, adapter_config, adapters_base
from swift_r1.models.attention import use_packed_attention
from swift_r1.models.block_functions import use_block_functions
from swift_r1.models.expected import use_checkpoint_form
from swift_r1.models.lora import add_lora
from swift_r1.models.multimodal import is_multimodal, language_class
from swift_r1.models.shape import transformers_config
from swift_r1.models.weights import freeze

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("swift_r1.training")

_TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")
SAFE: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True}
"""For `from_pretrained`: no code of a model's folder is run or asked about at a terminal, and no pickle is read."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How bitsandbytes stores frozen weights of linear layers, except the output head, under trained adapters (QLoRA,
    arXiv 2305.14314): `--bnb_4bit_quant_type` and `--bnb_4bit_use_double_quant`."""

    kind: str = "nf4"
    double: bool = True

    def config(self, dtype: torch.dtype) -> Any:
        """Returns the config that computes in `dtype`. Raises UsageError where bitsandbytes is not installed."""
        from transformers import BitsAndBytesConfig

        if importlib.util.find_spec("bitsandbytes") is None:
            raise UsageError(
                "4-bit weights (--train_type qlora) need bitsandbytes: pip install bitsandbytes"
            )
        # On a CPU it looks for a compiled kernel that inference alone would use, and warns.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        return BitsAndBytesConfig(  # type: ignore[no-untyped-call]  # transformers has no types here
            load_in_4bit=True,
            bnb_4bit_quant_type=self.kind,
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=dtype,
        )


def load_model(
    path: str | Path,
    dtype: str | None,
    gradient_checkpointing: bool,
    trained: AdapterArguments | None = None,
    *,
    quantization: Quantization | None = None,
    attention: str | None = None,
    flag: str = "--model",
    towers: bool = False,
) -> PreTrainedModel:
    """Loads a causal LM and prepares it for training.

    Args:
        path: folder or id of the model, or of adapters, which transformers loads over their own model; `flag` names it.
        dtype: of its weights; None: as its config says.
        trained: the adapters that are added, or the weights that stay frozen; None: all weights are trained.
        quantization: how frozen weights under adapters are stored; None: as they are.
        attention: transformers' name of one; None: the config's.
        towers: with what reads images.

    Raises UsageError: transformers cannot load it, it lacks weights, or it has none of the modules to adapt or weights
    to freeze.
    """
    whole = adapters_base(str(path)) or path
    config = transformers_config(whole, flag)
    if towers and not is_multimodal(config):
        raise UsageError(f"rows have images, and {flag} {path} reads text alone")
    kind = language_class(config, towers)
    more: dict[str, Any] = {"attn_implementation": attention}
    try:
        if quantization is not None:
            compute = getattr(torch, dtype) if dtype else transformers_config(whole).dtype
            more["quantization_config"] = quantization.config(compute or torch.float32)
        # they are refused below, by name
        more |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
        loaded: Any = kind.from_pretrained(path, dtype=_dtype(dtype), **SAFE, **more)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(f"cannot load {flag} {path}: {one_line(error)}") from error

    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    lacking = sorted(info["missing_keys"]) + sorted(name for name, *_ in info["mismatched_keys"])
    if lacking:  # transformers makes them up
        others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise UsageError(
            f"cannot load {flag} {path}: its weights lack {lacking[0]}{others}, or have other sizes: "
            "does its config.json belong to them?"
        )
    if quantization is not None:
        for module in model.modules():
            # On a CPU bitsandbytes would repack the weights for good when the model generates.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # torch knows no such attribute
        _tell_unquantized(model)
    use_checkpoint_form(model, str(whole))
    prepare(model, gradient_checkpointing)
    if trained is not None and trained.train_type != "full":
        add_lora(model, trained)
    elif trained is not None:
        freeze(model, trained)
    return model


def _tell_unquantized(model: PreTrainedModel) -> None:
    """Says how much of a model in 4 bits stays as it is where bitsandbytes, for linear layers alone, leaves experts out."""
    sizes = [
        one.numel()
        for name, one in model.named_parameters()
        if ".experts." in name and one.dim() > 2
    ]
    if sizes:
        logger.warning(
            "%s of the weights stay in %s: experts, which are one tensor a layer, are not stored in 4 bits",
            f"{sum(sizes):,}",
            str(model.dtype).removeprefix("torch."),
        )


def load_critic(
    path: str | Path, dtype: str | None, gradient_checkpointing: bool, attention: str | None = None
) -> PreTrainedModel:
    """Loads the critic in `path`.

    It is a causal LM, which gets a new head of zeros (every value is 0 at first), or a sequence classifier of one
    label, as a checkpoint's `critic/` is, with the head it has. Raises UsageError: transformers cannot load it as a
    classifier, or it has several labels.
    """
    from transformers import AutoModelForSequenceClassification

    try:
        config: Any = transformers_config(path, "the critic from")
        trained_head = has_value_head(config)
        if trained_head and config.num_labels != 1:
            raise UsageError(
                f"--critic_model {path} gives {config.num_labels} numbers per token: a critic gives one"
            )
        model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=_dtype(dtype), attn_implementation=attention, **SAFE
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"cannot load the critic from {path}: {one_line(error)}") from error

    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear):
        raise UsageError(
            f"{type(model).__name__} has no linear `score`: this architecture cannot be a critic yet"
        )
    if not trained_head:
        with torch.no_grad():
            # Under ZeRO-3 each rank has its part.
            getattr(score.weight, "ds_tensor", score.weight).zero_()
    prepare(model, gradient_checkpointing)
    return model


def load_judging_model(path: str, dtype: str | None, adapters: str | None) -> PreTrainedModel:
    """Loads the reward model in `path`, with `adapters` merged into it and without gradients.

    It is a sequence classifier with the head that it or the adapters have, or a causal LM, which is asked. Raises
    UsageError: it cannot be loaded.
    """
    from transformers import AutoModelForSequenceClassification

    try:
        known = transformers_config(path, "--reward_model")
        classifies = has_value_head(known)
        if classifies:
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=_dtype(dtype), **SAFE
            )
        if adapters is not None:
            from huggingface_hub import snapshot_download
            from peft import PeftModel

            folder = Path(adapters).expanduser()
            if not folder.is_dir():
                folder = Path(snapshot_download(adapters, allow_patterns=[CONFIG, WEIGHTS]))
            # without it peft would take a pickle
            config = adapter_config("--reward_adapters", folder)
            if not classifies and config.get("task_type") == "SEQ_CLS":
                classifies = True
                model = AutoModelForSequenceClassification.from_pretrained(
                    path, dtype=_dtype(dtype), num_labels=1, **SAFE
                )
        if not classifies:
            model = language_class(known).from_pretrained(path, dtype=_dtype(dtype), **SAFE)
        if adapters is not None:
            model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"cannot load --reward_model {path}: {one_line(error)}") from error

    loaded: PreTrainedModel = model.requires_grad_(False).eval()
    return loaded


def has_value_head(config: Any) -> bool:
    """Says whether the model of this transformers config was saved with a classifier's head."""
    return any(
        name.endswith("ForSequenceClassification")
        for name in getattr(config, "architectures", None) or ()
    )


def prepare(model: PreTrainedModel, gradient_checkpointing: bool) -> None:
    """Prepares a model that `from_pretrained` gave for training: our attention, block functions, no dropout.

    A policy is scored as it samples. With dropout its log-probs would be those of another policy at each call.
    """
    use_packed_attention(model)
    use_block_functions(model)
    dropout = False
    for module in model.modules():
        rates = ["p"] if isinstance(module, nn.Dropout) else []
        rates += [
            name
            for name, value in vars(module).items()
            if "drop" in name and isinstance(value, float)
        ]
        for name in rates:
            dropout = dropout or getattr(module, name) > 0
            setattr(module, name, 0.0)

    for name, parameter in model.named_parameters():
        # which keys are chosen has no gradient (DeepSeek-V3.2): no decay either
        if ".indexer." in name:
            parameter.requires_grad_(False)
    if dropout:
        logger.info(
            "%s is trained without its dropout: log-probs are those of the policy that samples",
            type(model).__name__,
        )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _dtype(name: str | None) -> Any:
    return getattr(torch, name) if name else "auto"


def as_readable_as_its_config(folder: Path) -> None:
    """Gives weights that `save_pretrained` wrote the mode of their config: safetensors lets only its own user read."""
    for weights in folder.glob("*.safetensors"):
        weights.chmod(next(folder.glob("*config.json")).stat().st_mode)


def load_tokenizer(path: str, flag: str = "--model") -> Any:
    """Loads the tokenizer of a model folder (or id). Raises UsageError, naming the flag, where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = _as_its_file(AutoTokenizer.from_pretrained(path, trust_remote_code=False), path)
        if not tokenizer.chat_template and (older := _cached(path, "chat_template.json")):
            tokenizer.chat_template = json.loads(older.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        # the last three: of a class that the files do not belong to
        raise UsageError(
            f"cannot load the tokenizer of {flag} {path}: {one_line(error)}"
        ) from error
    return tokenizer


def _as_its_file(tokenizer: Any, path: str) -> Any:
    """Returns the tokenizer that tokenizer.json describes, under whichever class the config puts it.

    transformers 5 keeps of the file no more than the vocabulary and builds the rest as the class does: a byte-level one
    under `LlamaTokenizerFast` loses all spaces.
    """
    from tokenizers import Tokenizer
    from transformers import PythonBackend, TokenizersBackend

    file = _cached(path, "tokenizer.json")
    if file is None or not isinstance(tokenizer, PythonBackend | TokenizersBackend):
        return tokenizer  # mistral-common's reads a file of its own
    stored: Any = Tokenizer.from_file(str(file))
    built = getattr(tokenizer, "backend_tokenizer", None)
    # compared as they are pickled
    if built is not None and all(
        getattr(built, part).__getstate__() == getattr(stored, part).__getstate__()
        for part in _TOKENIZER_PARTS
    ):
        return tokenizer
    logger.info(
        "%s: its tokenizer.json is used, which its tokenizer_class %s would build otherwise",
        path,
        type(tokenizer).__name__,
    )
    kept: Any = TokenizersBackend.from_pretrained(path)
    for name, token in tokenizer.special_tokens_map.items():
        # that the class knows without the config
        if getattr(kept, name, None) is None and stored.token_to_id(str(token)) is not None:
            setattr(kept, name, token)
    return kept


def _cached(path: str, name: str) -> Path | None:
    """Returns a file of a model folder (or id); None where there is none."""
    from transformers.utils.hub import cached_file

    lenient = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    file = cached_file(path, name, local_files_only=True, **lenient)
    return None if file is None else Path(file)


def end_tokens(
    model: PreTrainedModel, tokenizer: Any, turn_ends: Iterable[int | None] = ()
) -> tuple[int, ...]:
    """Returns the tokens that end a completion: the tokenizer's, those of the model's generation config, and
    `turn_ends`, the template's. Raises UsageError: there is none."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ends = {
        tokenizer.eos_token_id,
        *turn_ends,
        *(configured if isinstance(configured, list) else [configured]),
    } - {None}
    if not ends:
        raise UsageError(
            "neither the tokenizer nor generation_config.json names an end token (eos_token_id)"
        )
    return tuple(sorted(ends))
