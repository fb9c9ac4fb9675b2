"""A trained ViT of our own, exported for transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import transformers

import pipemega
from pipemega.config import load
from pipemega.errors import CheckpointError
from pipemega.hf.weights.checkpoint_model import export_checkpoint
from pipemega.hf.weights.gpt_export import vit_to_export

MODEL = {
    "type": "vit", "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "image_size": 8,
    "patch_size": 4, "num_channels": 3, "num_classes": 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fp64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_our_vit_is_exported_with_equal_logits(tmp_path: Path) -> None:
    config = load(
        {
            "train_batch_size": 2,
            "mesh": {"device": "cpu"},
            "model": MODEL,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
    )
    mesh = pipemega.build_mesh(config)
    engine, *_ = pipemega.initialize(pipemega.build_model(config, mesh), config, mesh=mesh)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        engine.train_batch(iter([(images, torch.tensor([1, 4]))]))
    engine.save_checkpoint(tmp_path / "checkpoint")
    (logits,) = engine.infer([images])
    engine.close()
    export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out")
    model = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "out", dtype="auto"
    )
    with torch.no_grad():
        expected = model(pixel_values=images).logits
    assert logits.abs().max() > 1e-3
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_a_vit_without_a_class_token_is_not_exported() -> None:
    section = load({"train_batch_size": 1, "model": {**MODEL, "pool": "mean"}}).model
    with pytest.raises(CheckpointError, match=r"by a class token \(model.pool is 'mean'\)"):
        vit_to_export(section)  # type: ignore[arg-type]
