"""Folders with small models of transformers and the tokenizer of tests.ranks.trained_models."""

from pathlib import Path
from typing import Any

import torch

from pipemega.data.tokens.tokenizers import load_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write(family: str, path: Path, text_folder: Path, **changes: Any) -> None:
    """Write a model "llama", "gpt2" or "t5" with its tokenizer to `path`."""
    import transformers

    file = text_folder / "text.tokenizer.json"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), eos_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    sizes = {
        "llama": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
        },
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "t5": {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
    }[family]
    end = tokenizer.eos_token_id
    config = transformers.CONFIG_MAPPING[family](
        vocab_size=load_tokenizer(file).vocab_size,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=end,
        **sizes | changes,
    )
    torch.manual_seed(1)
    mapping = "Seq2SeqLM" if family == "t5" else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{mapping}").from_config(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
