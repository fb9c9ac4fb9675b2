"""The parts of `pretrain_gpt.py` that need no run."""

import pipemega
from pipemega import pretrain

HELP = """Train a model.

    torchrun --nproc_per_node=2 train.py
    torchrun --nproc_per_node=2 train.py --set mesh.pipeline=2
"""


def test_the_help_of_a_script_keeps_the_lines_of_its_commands():
    parser = pipemega.add_arguments(pretrain.ScriptParser(description=HELP))
    assert HELP in parser.format_help()
