"""The model of this example: a Qwen3-VL of 0.4 M random weights, with its tokenizer and processor.

python examples/counting/sighted_model.py --output_dir models/counting/random-0 --seed 0
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

# For tiny_model.py of examples/countdown_demo.
sys.path.append(str(Path(__file__).resolve().parents[1] / "countdown_demo"))

IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
WORDS = ("how", "many", "discs")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)


def main() -> None:
    import tiny_model
    import torch
    from transformers import (
        AutoModelForMultimodalLM,
        Qwen2VLImageProcessorPil,
        Qwen3VLConfig,
    )

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = tiny_model.make_tokenizer(IMAGE, words=WORDS, chat_template=CHAT_TEMPLATE)
    width = 64
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "initializer_range": 0.06,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "out_hidden_size": width,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.06,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE[1]),
        video_token_id=tokenizer.convert_tokens_to_ids(IMAGE[3]),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(IMAGE[0]),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(IMAGE[2]),
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(args.seed)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    tiny_model.save(model, args.output_dir, tokenizer)
    sizes = {"shortest_edge": 64, "longest_edge": 64 * 64}  # pixels
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=sizes)
    processor.save_pretrained(args.output_dir)
    names = {"processor_class": "Qwen3VLProcessor"}
    (args.output_dir / "processor_config.json").write_text(json.dumps(names) + "\n")
    print(f"{args.output_dir}: {sum(one.numel() for one in model.parameters()):,} weights")


if __name__ == "__main__":
    main()
