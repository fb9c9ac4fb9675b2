"""The public names of `pipemega` are visible, and looking at them imports no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pipemega

ROOT = Path(__file__).parents[2]


def test_dir_has_every_public_name() -> None:
    assert set(pipemega.__all__) <= set(dir(pipemega))
    assert {"Engine", "Trainer", "MultiTimer", "initialize", "run"} <= set(dir(pipemega))
    assert "__version__" in dir(pipemega)


def test_editors_find_every_public_name_in_the_imports_for_type_checkers() -> None:
    tree = ast.parse(Path(pipemega.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == set(pipemega.__all__) == set(pipemega._MODULE_AND_NAME)


def test_an_unknown_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pipemega' has no attribute 'Motor'"):
        _ = pipemega.Motor


@pytest.mark.parametrize(
    "code",
    [
        "import pipemega; dir(pipemega)",
        "from pipemega.cli import main; main('schedule 1f1b --pp 2 --microbatches 2'.split())",
    ],
)
def test_dir_and_the_command_line_import_no_torch(code: str) -> None:
    run_python(f"{code}; import sys; assert 'torch' not in sys.modules")


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
