"""Runs the steps of pretrain_gpt.py with a Hugging Face model, from a folder with a tokenizer."""

from pathlib import Path
from typing import Any

import pipemega
from pipemega.data.tokens.tokenizers import FastTokenizer
from pipemega.training.pretrain import flops_per_token, load_datasets

TEXT = Path(__file__).parents[3] / "LICENSE"
LENGTH, BATCH = 32, 8


def make_folder(folder: Path) -> None:
    """Write a tiny Llama with a tokenizer of 300 tokens."""
    import transformers

    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = FastTokenizer.train([TEXT.read_text()], 300)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())


def train(folder: str, mesh_sizes: dict[str, int], pretrained: bool) -> dict[str, Any]:
    """Train two steps; return the losses, FLOPs per token, and the samples of the first step."""
    config = pipemega.load_config(
        {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 2,
            "mesh": {**mesh_sizes, "device": "cpu"},
            "model": {"type": "hf", "path": f"{folder}/model", "pretrained": pretrained},
            "data": {"corpus": str(TEXT), "cache_path": f"{folder}/cache", "split": "1,0,0"},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "training": {"train_steps": 2, "eval_interval": 0, "progress": False},
        }
    )
    assert config.data.tokenizer == f"{folder}/model"
    mesh = pipemega.build_mesh(config)
    data = load_datasets(config, mesh)
    assert data.train is not None
    net = pipemega.build_model(config, mesh, data.vocab_size)
    engine, *_ = pipemega.initialize(net, config, data.train, mesh=mesh)
    flops = flops_per_token(config, mesh, data.vocab_size)
    samples = [data.train[i] for i in range(BATCH)]
    return {
        "losses": [engine.train_batch() for _ in range(2)],
        "flops": flops,
        "vocabulary": data.vocab_size,
        "samples": [(x.tolist(), y.tolist()) for x, y in samples],
    }
