"""The files in configs/ load without warnings and fit the ranks in their names."""

from pathlib import Path

import pytest

from pipemega.cli import main
from pipemega.config import load

FILES = sorted((Path(__file__).parents[3] / "configs").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_shipped_config_fits_the_ranks_in_its_name(file, capsys):
    config = load(file)
    assert not config.warnings
    ranks = config.mesh.tensor * config.mesh.pipeline * max(2, config.mesh.expert)
    # The token files are not in the repository.
    data = [word for key in ("data_path", "tokenizer") for word in ("--set", f"data.{key}=null")]
    assert main(["check", str(file), "--world", str(ranks), *data]) == 0
    assert "train_batch_size" in capsys.readouterr().out
    parts = dict(part for part in _named_sizes(file.stem))
    assert config.mesh.tensor == parts.get("tp", config.mesh.tensor)
    assert config.mesh.pipeline == parts.get("pp", config.mesh.pipeline)


def _named_sizes(stem):
    """gpt_1.3b_tp2_pp4 -> ("tp", 2), ("pp", 4)"""
    for part in stem.split("_"):
        if part[:2] in ("tp", "pp") and part[2:].isdigit():
            yield part[:2], int(part[2:])


def test_the_quickstart_config_exists():
    assert "quickstart" in {file.stem for file in FILES}
