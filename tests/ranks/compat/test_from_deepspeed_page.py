"""The complete move on docs/coming_from.md: the file is explained, the script runs."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from pipemega.cli import main
from pipemega.compat.deepspeed.virtual_modules import install_as_deepspeed
from tests.ranks.pool import RankPool
from tests.ranks.training.long_runs import handlers_restored

PAGE = Path(__file__).parents[3] / "docs/coming_from.md"


def blocks() -> dict[str, str]:
    """Return the blocks of the section by their language."""
    section = PAGE.read_text(encoding="utf-8").split("\n### A complete move")[1]
    return dict(re.findall(r"^```(\w*)\n(.*?)^```", section.split("\n### ")[0], re.M | re.S))


def run_script(folder: str, config: str, stages: int) -> Any:
    """Run the script of the page as `python -m pipemega.compat.deepspeed` does."""
    words = ["train.py", "--deepspeed_config", config, "--stages", str(stages), "--backend", "gloo"]
    words += ["--steps", "20"]
    with pytest.MonkeyPatch.context() as patch, handlers_restored():
        patch.chdir(folder)
        patch.setattr(sys, "argv", [*words, "--save", f"saved{stages}"])
        for name in [n for n in sys.modules if n.partition(".")[0] == "deepspeed"]:
            patch.delitem(sys.modules, name)
        before = set(sys.modules)
        install_as_deepspeed()
        try:
            return runpy.run_path("train.py", run_name="__main__")["losses"]
        finally:
            for name in set(sys.modules) - before:
                if name.partition(".")[0] == "deepspeed":
                    del sys.modules[name]


def test_the_complete_move_runs_on_two_ranks_as_on_one(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = blocks()
    (tmp_path / "ds_config.json").write_text(found["jsonc"])
    (tmp_path / "train.py").write_text(found["py"])
    assert main(["config", "from-deepspeed", str(tmp_path / "ds_config.json")]) == 0
    printed = capsys.readouterr()
    assert printed.err == found[""]
    (tmp_path / "run.json").write_text(printed.out)
    assert json.loads(printed.out)["zero_optimization"] == {
        "stage": 1,
        "offload_optimizer": {"device": "cpu"},
    }
    (whole,) = pool.run(1, run_script, str(tmp_path), "run.json", 1)
    for losses in pool.run(2, run_script, str(tmp_path), "ds_config.json", 2):
        assert losses == pytest.approx(whole, abs=1e-6)
    assert whole[-1] < 0.9 * whole[0]
    assert (tmp_path / "saved2/latest").is_file()
