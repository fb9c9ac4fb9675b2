"""Fine-tunes small models on texts on any mesh; test_finetuning.py starts it."""

import json
from pathlib import Path
from typing import Any

import torch

from pipemega import build_mesh, build_model, initialize
from pipemega.config import load
from pipemega.data.tokens.build_datasets import DataRequest, build_datasets
from pipemega.data.tokens.tokenizers import FastTokenizer

LENGTH = 24
WORDS = "to be or not to be that is the question"

GPT = {
    "num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": LENGTH,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.0,
}

Result = tuple[list[float], float, dict[str, Any]]
"""Losses of the steps, loss of all validation samples, parameters."""


def write_records(folder: Path) -> Path:
    """Write a tokenizer and instructions of different lengths."""
    (folder / "tokenizer.json").write_text(FastTokenizer.train([WORDS] * 9, 270).to_json())
    words = WORDS.split()
    records = [
        {"prompt": " ".join(words[: 1 + i % 3]), "response": " ".join(words[i % 4 : i % 9 + 3])}
        for i in range(40)
    ]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def config_of(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Return a config; each change is merged into its section."""
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "seed": 7,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "model": dict(GPT),
        "data": {
            "format": "instruction",
            "path": str(folder / "records.jsonl"),
            "tokenizer": str(folder / "tokenizer.json"),
            "cache_path": str(folder / "cache"),
            "split": "7,3,0",
        },
    }
    for key, value in changes.items():
        is_model = key == "model" and "type" in value
        config[key] = value if is_model else {**config.get(key, {}), **value}
    return config


def train(
    folder: Path, changes: dict[str, Any], steps: int = 3, save_after: int | None = None
) -> Result:
    """Train in fp64, after the checkpoint in `folder` if there is one; save after some steps."""
    torch.set_default_dtype(torch.float64)
    try:
        return _train(folder, changes, steps, save_after)
    finally:
        torch.set_default_dtype(torch.float32)


def _train(folder: Path, changes: dict[str, Any], steps: int, save_after: int | None) -> Result:
    config = load(config_of(folder, changes))
    mesh = build_mesh(config)
    assert config.model is not None
    vocabulary = config.model.vocabulary()
    data = build_datasets(
        config.data,
        DataRequest(
            LENGTH, 7, None, None, vocab_size=vocabulary if isinstance(vocabulary, int) else "auto"
        ),
    )
    model = build_model(config, mesh, data.vocab_size)
    engine, *_ = initialize(model, config, data.train, mesh=mesh)
    checkpoints = folder / "checkpoints"
    if save_after is None and checkpoints.exists():
        engine.load_checkpoint(str(checkpoints))
    losses = []
    while engine.global_steps < steps:
        losses.append(engine.train_batch())
        if engine.global_steps == save_after:
            engine.save_checkpoint(str(checkpoints))
            break
    parameters = {name: value.numpy() for name, value in engine.parameter_state().items()}
    return losses, engine.evaluate(data.valid), parameters
