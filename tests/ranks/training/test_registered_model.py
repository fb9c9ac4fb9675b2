"""A model that a user registers in a module of `imports`, trained by pretrain_gpt.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

MODULE = """
from pydantic import BaseModel, Field
from torch import nn

import pipemega


def loss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pipemega.register_model("words")
class Words(BaseModel):
    seq_length: int = 16
    width: int = Field(gt=0)

    def build(self, context):
        size = context.vocab_size
        layers = [
            pipemega.LayerSpec(nn.Embedding, size, self.width),
            pipemega.LayerSpec(nn.LayerNorm, self.width),
            pipemega.LayerSpec(nn.Linear, self.width, size),
        ]
        return pipemega.PipelineModule(layers, loss)
"""


@pytest.mark.sweep
def test_torchrun_trains_a_registered_model_on_two_stages(tmp_path: Path) -> None:
    (tmp_path / "my_words.py").write_text(MODULE)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "imports": ["my_words"],
                "train_batch_size": 4,
                "train_micro_batch_size_per_gpu": 2,
                "mesh": {"pipeline": 2, "device": "cpu"},
                "model": {"type": "words", "width": 8},
                "data": {"mock": True, "vocab_size": 300},
                "optimizer": {"type": "AdamW"},
                "training": {"train_steps": 3, "eval_interval": 0, "progress": False},
                "checkpoint": {"save": str(tmp_path / "run")},
            }
        )
    )
    # From another folder: the module is found beside the config.
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone",
            str(ROOT / "pretrain_gpt.py"), "--config", str(tmp_path / "config.json"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "tokens_per_second" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert steps[-1]["consumed_tokens"] == 3 * 4 * 16
    assert steps[-1]["tflops_per_device"] > 0
    resolved = json.loads((tmp_path / "run/config.json").read_text())
    assert resolved["imports"] == ["my_words"]
    assert resolved["model"] == {"type": "words", "seq_length": 16, "width": 8}
