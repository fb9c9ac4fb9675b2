"""The scripts of examples/: small versions on several meshes, and the commands as they are."""

import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.pool import RankPool
from tests.ranks.training.long_runs import handlers_restored

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
LLAMA = "zero_bubble_llama.py"


def run_script(name: str, folder: str, words: list[str]) -> Any:
    """Call `main` of a script on this rank; return what a test compares."""
    with pytest.MonkeyPatch.context() as patch, handlers_restored():
        patch.chdir(folder)
        names = runpy.run_path(str(EXAMPLES / name))
        return names["main"]([*changes("mesh.device=cpu"), *words])


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
    layout = changes("mesh.pipeline=2", "mesh.tensor=2", "mesh.sequence_parallel=true")
    split = on_ranks(pool, 4, LLAMA, tmp_path, *steps, *layout, "--graph")
    assert len(split) == 2
    assert split == pytest.approx(alone, rel=1e-5)


def commands(name: str) -> list[list[str]]:
    """Return the command lines in the docstring of a script that need no files and no GPU."""
    text = inspect.cleandoc(re.split('"""', (EXAMPLES / name).read_text(encoding="utf-8"))[1])
    lines = re.findall(r"^    torchrun (.*)$", text.replace("\\\\\n", " "), re.M)
    return [shlex.split(line) for line in lines if "/data/" not in line and "cuda" not in line]


@pytest.mark.sweep
@pytest.mark.parametrize("name", [LLAMA])
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
