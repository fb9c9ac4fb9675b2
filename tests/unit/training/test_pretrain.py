"""The parts of `pretrain_gpt.py` that need no run."""

from pathlib import Path

import pytest

import pipemega
from pipemega import pretrain
from pipemega.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"

HELP = """Train a model.

    torchrun --nproc_per_node=2 train.py
    torchrun --nproc_per_node=2 train.py --set mesh.pipeline=2
"""


def test_the_help_of_a_script_keeps_the_lines_of_its_commands():
    parser = pipemega.add_arguments(pretrain.ScriptParser(description=HELP))
    assert HELP in parser.format_help()


def test_a_config_without_images_is_refused_by_the_script_for_images():
    pretrain.require_images(pipemega.load_config(CONFIGS / "vit_digits.json"))
    with pytest.raises(ConfigError, match=r"no image data, because data\.images is not set"):
        pretrain.require_images(pipemega.load_config(CONFIGS / "quickstart.json"))
