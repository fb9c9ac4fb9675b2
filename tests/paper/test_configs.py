"""The files in configs/ are what users copy from."""

from pathlib import Path

import pytest

from pipemega.cli import main
from pipemega.config import load

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_config_that_we_ship_can_be_run_on_the_ranks_that_its_name_says(file, capsys):
    config = load(file)
    assert not config.warnings
    ranks = config.mesh.tensor * config.mesh.pipeline
    assert main(["check", str(file), "--world", str(ranks * 2)]) == 0
    assert "train_batch_size" in capsys.readouterr().out
    parts = dict(part for part in _named_sizes(file.stem))
    assert config.mesh.tensor == parts.get("tp", config.mesh.tensor)
    assert config.mesh.pipeline == parts.get("pp", config.mesh.pipeline)


def _named_sizes(stem):
    """gpt_1.3b_tp2_pp4 -> ("tp", 2), ("pp", 4)"""
    for part in stem.split("_"):
        if part[:2] in ("tp", "pp") and part[2:].isdigit():
            yield part[:2], int(part[2:])


def test_there_are_configs_to_test():
    assert "quickstart" in {file.stem for file in FILES}
