"""Whether a model can be loaded, told before anything heavy starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift_r1.data.hubs import is_hub_id, why_unreachable
from swift_r1.models.tied_head import second_head
from swift_r1.runtime.files import read_text, regular
from swift_r1.runtime.hardware import CPU, cpu_multiplies

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_NOT_TEXT = ("vision_config", "audio_config", "speech_config")
_NEEDS_TOWERS = {"gemma3n"}  # which embeds tokens of a text too by what belongs to its towers
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "tokenizer*"]
_LONGEST_HEADER = 100_000_000  # bytes; safetensors reads no longer one


def is_local(model: str) -> bool:
    """Says whether the model is a folder on this machine."""
    return Path(model).expanduser().is_dir()


def model_faults(
    model: str, environ: Mapping[str, str], flag: str = "--model", spread: int = 1
) -> list[str]:
    """Returns what is wrong with the model that `flag` names, [] where it can be loaded. A hub id is downloaded into
    the hub's cache. `spread` is `--sequence_parallel_size`."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder_faults(model, path, flag, spread)
    if path.exists():
        return [f"{flag} {model} is a file: give the folder that holds config.json and the weights"]
    if not is_hub_id(model) or path.parent.is_dir():
        return [f"{flag} {model}: there is no such folder (looked in {Path.cwd()})"]
    return _hub_faults(model, environ, flag, spread)


def config_dtype(model: str) -> str | None:
    """Returns the dtype that the config of the model folder names; None where it names none or cannot be read yet."""
    config = config_of(Path(model).expanduser())
    dtype: str | None = config.get("dtype") or config.get("torch_dtype")
    return dtype


def dtype_here(
    model: str, given: str | None, gpu: bool, cpuinfo: str = CPU
) -> tuple[str | None, str | None]:
    """Returns the `--torch_dtype` of this machine, and the line about it: where none is given, a model of 16 bits
    computes in float32 on a CPU that has no instructions for its dtype."""
    dtype = given or config_dtype(model) or "bfloat16"
    if gpu or cpu_multiplies(dtype, cpuinfo):
        return given, None
    slower = f"this CPU has no instructions for {dtype}, which is several times slower here"
    if given is not None:
        return given, f"--torch_dtype {given}: {slower} than float32"
    return "float32", f"the model computes in float32 (--torch_dtype float32): {slower}"


def family_faults(model: str, family: str | None) -> list[str]:
    """Returns what is wrong with `--model_type`, ms-swift's word for a family (`qwen2_5`), for a model folder: it must
    begin as the config's (`qwen2`) does. One that cannot be read yet is left to the loader."""
    own = config_of(Path(model).expanduser()).get("model_type")
    if family is None or own is None or _letters(family).startswith(_letters(own)):
        return []
    return [
        f"--model_type {family}: --model {model} is a {own} by its config.json, which decides: leave it out"
    ]


def _letters(word: str) -> str:
    return "".join(filter(str.isalnum, word.lower()))


def config_of(folder: Path) -> dict[str, Any]:
    """Reads the config of a model folder; empty where it cannot be read."""
    try:
        content = json.loads(read_text(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _config_faults(model: str, path: Path, flag: str, spread: int) -> list[str]:
    """Kinds of models that cannot be trained here, told by their config; one that cannot be read is left to the loader,
    which says why."""
    config = config_of(path)
    stored = config.get("quantization_config")
    why = _not_text(config, flag)
    if why:
        return [f"{flag} {model} {why}"]
    if isinstance(stored, dict) and stored and stored.get("quant_method") != "bitsandbytes":
        method = stored.get("quant_method", "?")
        return [
            f"{flag} {model} is stored quantized ({method}), which cannot be trained: save it in 16 bits first"
        ]
    if "AutoConfig" in (config.get("auto_map") or {}) and not _has_own_class(
        config.get("model_type")
    ):
        return [
            f"{flag} {model} brings its own code, which is never run: transformers has no {config.get('model_type')}"
        ]
    why = second_head(str(path)) if config.get("tie_word_embeddings") else None
    if why:
        return [f"{flag} {model}: {why}"]
    heads = (config.get("text_config") or config).get("num_attention_heads")
    if isinstance(heads, int) and heads < 1:
        return [
            f"{flag} {model} has {heads} attention heads by its config.json (num_attention_heads)"
        ]
    if isinstance(heads, int) and heads % spread:
        return [
            f"--sequence_parallel_size {spread} does not divide the {heads} attention heads of {flag} {model}"
        ]
    return []


def _not_text(config: Mapping[str, Any], flag: str) -> str | None:
    """Says why a multimodal model cannot read and write texts alone here; None where it can, and for a text model."""
    parts = [name for name in config if name.endswith(_NOT_TEXT)]
    kind = config.get("model_type")
    if not parts:
        return None
    if flag == "--critic_model":
        return f"is a {kind} with a {parts[0]}, and a critic is a text model: give one with the same tokenizer"
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    if (
        kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        and "text_config" in config
        and kind not in _NEEDS_TOWERS
    ):
        return None
    return f"is not a text model ({kind} with a {parts[0]}), nor one whose language model transformers can run alone"


def _has_own_class(model_type: object) -> bool:
    """Says whether transformers itself has the model; takes a second."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _folder_faults(model: str, path: Path, flag: str, spread: int) -> list[str]:
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        missing.append("weights (*.safetensors)")
    if not any((path / name).is_file() for name in _TOKENIZER):
        missing.append("a tokenizer (tokenizer.json)")
    if missing:
        return [f"{flag} {model} is not a model folder: it lacks {', '.join(missing)}"]
    odd = [
        file.name
        for file in sorted(path.iterdir())
        if file.exists() and not file.is_file() and not file.is_dir()
    ]
    if odd:
        return [f"{flag} {model}: {', '.join(odd)}: not a regular file"]
    cut = [file.name for file in sorted(path.glob("*.safetensors")) if not _is_whole(file)]
    if cut:
        return [
            f"{flag} {model}: {', '.join(cut)} cut short, or no safetensors: copy or download again"
        ]
    return _config_faults(model, path, flag, spread)


def _is_whole(file: Path) -> bool:
    """Says whether a safetensors file is as long as its header says; the loader tells of one that cannot be opened."""
    try:
        size = file.stat().st_size
        with open(file, "rb", opener=regular) as content:
            length = int.from_bytes(content.read(8), "little")
            header = (
                json.loads(content.read(length)) if length <= min(size - 8, _LONGEST_HEADER) else {}
            )
        ends = [
            entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
        ]
    except OSError:
        return True
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False
    return size == 8 + length + max(ends, default=0)


def _hub_faults(model: str, environ: Mapping[str, str], flag: str, spread: int) -> list[str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    absent = f"{flag} {model} is neither a folder here nor in the Hugging Face cache"
    offline = environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    for cache_only in (True, False):
        try:
            folder = snapshot_download(model, allow_patterns=_PATTERNS, local_files_only=cache_only)
            return _config_faults(model, Path(folder), flag, spread)
        except HFValidationError:
            return [f"{flag} {model}: there is no such folder, and it is not a Hugging Face id"]
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else "?"
            return [
                f"{absent}, and huggingface.co answered {status}: check the name (and HF_TOKEN for gated models)"
            ]
        except OSError:
            if cache_only and offline:
                return [f"{absent}, and HF_HUB_OFFLINE is set: give a folder"]
            if cache_only and why_unreachable("hf") is not None:
                break
    return [f"{absent}, and huggingface.co cannot be reached: give a folder"]
