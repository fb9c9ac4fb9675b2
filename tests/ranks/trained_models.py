"""Trains small models, saves them, and runs `pipemega evaluate` and `generate` on them."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch

import pipemega
from pipemega.cli import main
from pipemega.data.tokens.prepare import PrepareOptions, prepare
from pipemega.training.pretrain import load_datasets
from pipemega.training.validation import output_shard
from tests.ranks.generation_runs import LLAMA

# Many different tokens in few documents.
TEXTS = [f"document {i}: " + " ".join(f"w{(i * j) % 17}" for j in range(40)) for i in range(12)]

CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "seed": 5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "mesh": {"device": "cpu"},
    "model": {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "seq_length": 24,
        "make_vocab_size_divisible_by": 8,
        "init_method_std": 0.2,
        **LLAMA,
    },
    "data": {"split": "70,30,0"},
    "training": {"train_steps": 2},
}


def write_text(folder: Path) -> None:
    """Write text.jsonl, and its token files with a tokenizer of 300 tokens."""
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "text.jsonl").write_text("\n".join(lines))
    prepare([str(folder / "text.jsonl")], folder / "text", PrepareOptions(vocab_size=300))


def train(folder: Path, **changes: Any) -> pipemega.Engine:
    """Train a model as pretrain_gpt.py does, and save it in folder/run; in one process."""
    paths = {"data": {"data_path": str(folder / "text")}, "checkpoint": {"save": f"{folder}/run"}}
    config = pipemega.load_config(_merged(_merged(CONFIG, paths), changes))
    mesh = pipemega.build_mesh(config)
    data = load_datasets(config, mesh)
    model = pipemega.build_model(config, mesh, data.vocab_size)
    engine, *_ = pipemega.initialize(model, config, data.train, mesh=mesh)
    pipemega.Trainer(engine).fit()
    return engine


def _merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in changes.items():
        is_section = isinstance(value, dict) and "type" not in value
        merged[key] = {**merged.get(key, {}), **value} if is_section else value
    return merged


def command(*words: object) -> tuple[int, str]:
    """Run a command of the command line on this rank; return its exit code and its output."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main([str(word) for word in words])
    return code, text.getvalue()


def log_probabilities(engine: pipemega.Engine, tokens: list[int]) -> torch.Tensor:
    """Return the log probability of each token but the first, each in its whole context."""
    outputs, shard = engine.infer([torch.tensor([tokens[:-1]])]), output_shard(engine)
    assert outputs is not None
    assert shard is not None
    logits = shard.gather(outputs[0])[0]  # without the padding of the vocabulary
    chosen = torch.tensor(tokens[1:])[:, None]
    return logits.float().log_softmax(-1).gather(1, chosen)[:, 0]
