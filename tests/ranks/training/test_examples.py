"""The commands of examples/ run as their README shows them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/finetune_llama"


def run(*command: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sweep
def test_a_folder_of_weights_becomes_a_fine_tuned_and_exported_model(tmp_path: Path) -> None:
    run(EXAMPLE / "make_weights.py", tmp_path)
    changes = {
        "model.path": tmp_path / "weights",
        "data.path": tmp_path / "train.jsonl",
        "data.valid_path": tmp_path / "valid.jsonl",
        "checkpoint.save": tmp_path / "checkpoints",
        "training.train_steps": 30,
    }
    overrides = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4")
    config = ("--config", EXAMPLE / "finetune.json")
    printed = run(*torchrun, "pretrain_gpt.py", *config, *overrides)
    first, last = (float(part) for part in printed.split("validation loss ")[1].split()[:3:2])
    assert last < first / 2
    printed = run(EXAMPLE / "export_and_evaluate.py", tmp_path)
    assert "of 40 answers are right" in printed
    assert (tmp_path / "finetuned/model.safetensors").is_file()
