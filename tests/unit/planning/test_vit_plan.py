"""Plans, checks and FLOPs of a ViT."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipemega.cli import main
from pipemega.config import load
from pipemega.distributed.topology import Topology
from pipemega.layer_costs.counted_model import flops_per_sample, flops_per_token
from pipemega.models.build_model import ModelContext
from pipemega.planning.estimate import Request, estimate

HIDDEN, LAYERS, CLASSES, PATCHES, PATCH_SIZE = 32, 4, 10, 16, 4
CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "mesh": {"pipeline": 2, "tensor": 2, "device": "cpu"},
    "model": {
        "type": "vit", "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 4,
        "image_size": 16, "patch_size": PATCH_SIZE, "num_classes": CLASSES, "drop_path": 0.1,
    },
    "optimizer": {"type": "AdamW"},
}  # fmt: skip


def test_a_vit_is_planned_with_its_images_and_parameters() -> None:
    report = estimate(Request(load(CONFIG)))
    block = 12 * HIDDEN**2 + 13 * HIDDEN
    patches = 3 * PATCH_SIZE**2 * HIDDEN + HIDDEN
    outside = patches + HIDDEN + (PATCHES + 1) * HIDDEN + 2 * HIDDEN + (HIDDEN + 1) * CLASSES
    assert report.parameters == LAYERS * block + outside
    assert report.num_layers == LAYERS + 2
    assert report.tokens is None
    assert report.prediction.layout.input_bytes == 2 * 3 * 16 * 16 * 4
    # The default cut is by time.
    assert report.prediction.layout.bounds == (0, 3, 6)


def test_the_flops_of_an_image_are_those_of_the_formula() -> None:
    context = ModelContext.of(load(CONFIG), Topology(2, 1, 2))
    length = PATCHES + 1
    linears = 2 * length * 12 * HIDDEN**2
    attention = 2 * 2 * length**2 * HIDDEN
    patches = 2 * PATCHES * 3 * PATCH_SIZE**2 * HIDDEN
    forward = LAYERS * (linears + attention) + patches + 2 * HIDDEN * CLASSES
    assert flops_per_sample(context) == 3 * forward
    assert flops_per_token(context) == 0.0
    gpt = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16,
        "vocab_size": 64,
    }  # fmt: skip
    tokens = ModelContext.of(load({"train_batch_size": 2, "model": gpt}), Topology(1, 1, 1))
    assert flops_per_sample(tokens) == 16 * flops_per_token(tokens) > 0


def test_a_plan_shows_and_suggests_recomputation_by_the_key_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vit.json"
    path.write_text(json.dumps({**CONFIG, "model": {**CONFIG["model"], "recompute": "selective"}}))
    assert main(["check", str(path)]) == 0
    assert "model.ffn_hidden_size" in capsys.readouterr().out
    assert main(["plan", str(path), "--device-memory", "80GB"]) in (0, 1)
    out = capsys.readouterr().out
    assert "recompute selective" in out
    assert "--set model.recompute=none" in out
