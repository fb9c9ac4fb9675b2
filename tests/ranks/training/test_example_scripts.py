"""The scripts of examples/: small versions on several meshes, and the commands as they are."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.optional_packages import can_be_imported
from tests.ranks.pool import RankPool
from tests.ranks.training.long_runs import handlers_restored

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
RESNET, VIT, LLAMA = "resnet_pipeline.py", "vit_hybrid.py", "zero_bubble_llama.py"
EMBEDDING, BATCHNORM = "heterogeneous_embedding.py", "gpipe_batchnorm.py"


def run_script(name: str, folder: str, words: list[str]) -> Any:
    """Call `main` of a script on this rank; return losses, or its evaluations."""
    with pytest.MonkeyPatch.context() as patch, handlers_restored():
        patch.chdir(folder)
        names = runpy.run_path(str(EXAMPLES / name))
        result = names["main"](words)
        return result if isinstance(result, list) else result.evaluations


def changes(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def on_ranks(pool: RankPool, ranks: int, name: str, folder: Path, *words: str) -> Any:
    """Return the result of the script, which all ranks must agree on."""
    first, *others = pool.run(ranks, run_script, name, str(folder), list(words))
    assert all(other == first for other in others)
    return first


def test_the_llama_with_a_searched_plan_has_the_losses_of_one_process(
    pool: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")
    steps = changes("training.train_steps=2")
    alone = on_ranks(pool, 1, LLAMA, tmp_path, *steps, *changes("mesh.pipeline=1"))
    split = on_ranks(pool, 2, LLAMA, tmp_path, *steps, *changes("mesh.pipeline=2"), "--graph")
    assert len(split) == 2
    assert split == pytest.approx(alone, rel=1e-5)


def values(evaluations: Any) -> list[dict[str, float]]:
    return [pytest.approx(found.values, rel=1e-4) for found in evaluations]


def test_the_resnet_on_two_stages_has_the_results_of_one_process(
    pool: RankPool, tmp_path: Path
) -> None:
    small = changes(
        "model.depth=18", "model.width=4", "model.image_size=16", "data.split=80,20,900",
        "training.epochs=1", "scheduler.params.warmup_steps=1",
    )  # fmt: skip
    split = on_ranks(pool, 2, RESNET, tmp_path, *small)
    alone = on_ranks(pool, 1, RESNET, tmp_path, *small, *changes("mesh.pipeline=1"))
    assert [found.values for found in split] == values(alone)


def test_the_vit_on_tensor_and_pipeline_ranks_has_the_losses_of_one_process(
    pool: RankPool, tmp_path: Path
) -> None:
    small = changes(
        "training.train_steps=2", "training.eval_interval=1", "model.num_layers=2",
        "scheduler.params.warmup_steps=1", "data.split=98,2,900",
    )  # fmt: skip
    split = on_ranks(pool, 4, VIT, tmp_path, *small)
    alone = on_ranks(pool, 1, VIT, tmp_path, *small, *changes("mesh.tensor=1", "mesh.pipeline=1"))
    assert len(split) == 2
    assert split == pytest.approx(alone, rel=1e-4)


def test_the_embedding_on_a_rank_of_its_own_has_the_results_of_one_process(
    pool: RankPool, tmp_path: Path
) -> None:
    small = ["--samples", "300", *changes("training.epochs=1")]
    split = on_ranks(pool, 2, EMBEDDING, tmp_path, *small, *changes('mesh.device=["cpu", "cpu"]'))
    whole = changes("mesh.pipeline=1", "mesh.device=cpu")
    assert [found.values for found in split] == values(
        on_ranks(pool, 1, EMBEDDING, tmp_path, *small, *whole)
    )


def test_deferred_statistics_do_not_depend_on_the_number_of_ranks(
    pool: RankPool, tmp_path: Path
) -> None:
    small = ["--samples", "128", *changes("training.epochs=1")]
    split = on_ranks(pool, 2, BATCHNORM, tmp_path, *small)
    whole = changes("mesh.pipeline=1")
    alone = on_ranks(pool, 1, BATCHNORM, tmp_path, *small, *whole)
    assert [found.values for found in split] == values(alone)
    assert on_ranks(pool, 1, BATCHNORM, tmp_path, *small, *whole, "--plain") != alone


def commands(name: str) -> list[list[str]]:
    """Return the command lines of a docstring that run here: without files of data and GPUs."""
    text = (EXAMPLES / name).read_text(encoding="utf-8").split('"""')[1]
    lines = re.findall(r"^    torchrun (.*)$", text.replace("\\\\\n", " "), re.M)
    missing = ["/data/", "cuda"]
    if not can_be_imported("torchvision"):
        missing.append("--torchvision")
    return [shlex.split(line) for line in lines if not any(part in line for part in missing)]


@pytest.mark.sweep
@pytest.mark.parametrize("name", [RESNET, VIT, LLAMA, EMBEDDING, BATCHNORM])
def test_the_commands_of_a_script_train(name: str, tmp_path: Path) -> None:
    if name == LLAMA:
        pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")
    found = commands(name)
    assert found
    for words in found:
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        losses = [float(loss) for loss in re.findall(r"^step .* loss ([\d.]+)", done.stdout, re.M)]
        assert losses[-1] < 0.8 * losses[0], done.stdout
