"""A language model from scratch that every engine loads: a 55-symbol tokenizer and a 0.6 M parameter Llama."""

from __future__ import annotations

import argparse
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<|pad|>", "<|end|>", "<|unk|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = string.digits + "+-*/()=>,. \n" + string.ascii_lowercase
# The content of each message and a newline; an answer ends with the end symbol, as it does when it is sampled.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
MAX_LENGTH = 512  # positions; prompt and completion of the demo take at most 176


def make_tokenizer(
    tags: Sequence[str] = TAGS,
    characters: str = CHARACTERS,
    words: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """One token a tag, a whole word of `words`, or a character; decoding gives back the exact text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [PAD, EOS, UNKNOWN, *tags, *words, *characters]
    pieces = [re.escape(tag) for tag in tags]
    pieces += [f"{re.escape(word)}(?![A-Za-z])" for word in sorted(words, key=len, reverse=True)]
    tokenizer = Tokenizer(
        models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*pieces, r"[\s\S]"])), behavior="isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=MAX_LENGTH,
    )


def make_model(
    seed: int,
    width: int = 128,
    layers: int = 3,
    heads: int = 4,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> LlamaForCausalLM:
    """Llama with head size 32 (the smallest vLLM serves on CPU) and tied embeddings, float32, random weights.

    Not Qwen2: `AutoTokenizer` gives every Qwen2 folder Qwen's own tokenizer, whatever its files say.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer or make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.06,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def save(
    model: LlamaForCausalLM, folder: str | Path, tokenizer: PreTrainedTokenizerFast | None = None
) -> None:
    """Writes model and tokenizer (the demo's, if none is given) as `from_pretrained` and vLLM read them."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)


def main(make_own_tokenizer: Callable[[], PreTrainedTokenizerFast] = make_tokenizer) -> None:
    """Writes the model with random weights, as the command's flags say."""
    parser = argparse.ArgumentParser(description="Write the model with random weights.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = make_own_tokenizer()
    save(make_model(arguments.seed, tokenizer=tokenizer), arguments.output_dir, tokenizer)


if __name__ == "__main__":
    main()
