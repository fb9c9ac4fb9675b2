"""Make a tiny Llama with random weights, its tokenizer, and chats that ask for sums.

    python examples/finetune_llama/make_weights.py

It stands for a folder of weights that you have: the folder has the files of `save_pretrained`.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte."""
    alphabet = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({token: at for at, token in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|pad|>", eos_token="<|end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def chat(first: int, second: int) -> dict[str, list[dict[str, str]]]:
    question = {"role": "user", "content": f"What is {first} plus {second}?"}
    return {"messages": [question, {"role": "assistant", "content": str(first + second)}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/finetune_llama"))
    folder = parser.parse_args().folder
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "weights")
    make_model(tokenizer).save_pretrained(folder / "weights")
    sums = [(a, b) for a in range(20) for b in range(20)]
    random.Random(0).shuffle(sums)
    for name, part in (("train", sums[40:]), ("valid", sums[:40])):
        lines = (json.dumps(chat(*pair)) for pair in part)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {folder}/weights, {folder}/train.jsonl and {folder}/valid.jsonl")


if __name__ == "__main__":
    main()
