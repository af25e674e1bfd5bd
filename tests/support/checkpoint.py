"""A whole checkpoint on disk: a tiny Llama and a byte tokenizer with a chat template."""

from __future__ import annotations

from pathlib import Path

from tiny import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(extra: int = 0, swap: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte, then EOS. `extra` tokens more; `swap` gives two bytes each other's id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swap:
        alphabet[0], alphabet[1] = alphabet[1], alphabet[0]
    names = [*alphabet, EOS, *(f"<|{i}|>" for i in range(extra))]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, chat_template=TEMPLATE)


def save_checkpoint(folder: Path, seed: int = 0, layers: int = 2, extra: int = 0, swap: bool = False) -> str:
    """Write model and tokenizer into `folder` and return it as a model name."""
    tokenizer = byte_tokenizer(extra, swap)
    model = tiny_llama(len(tokenizer), layers=layers, seed=seed, max_position_embeddings=256)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
