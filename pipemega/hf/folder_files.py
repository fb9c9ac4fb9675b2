"""The small files of a folder: config, generation config, tokenizer, preprocessor."""

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

GENERATION_CONFIG = "generation_config.json"

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "normalizer.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
)


def write_configs(model: Any, dtype: torch.dtype, folder: Path, source: Path | None) -> None:
    """Write config.json, and generation_config.json for a model that generates.

    Args:
        dtype: of the weights.
        source: its generation config is copied, if it has one.
    """
    config = deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if source is not None and (source / GENERATION_CONFIG).is_file():
        shutil.copy(source / GENERATION_CONFIG, folder)
    elif model.can_generate():
        model.generation_config.save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy the files of tokenizer and preprocessor; return their names."""
    copied = []
    for pattern in _TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copy(path, folder)
            copied.append(path.name)
    return copied
