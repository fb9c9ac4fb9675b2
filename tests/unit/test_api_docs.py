"""The API reference: docstrings of the public names, and the generator of `make docs`."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pipemega

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", pipemega.__all__)
def test_every_public_name_and_its_public_methods_have_a_docstring(name: str) -> None:
    found = getattr(pipemega, name)
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        found = type(found)
    assert inspect.getdoc(found)
    members = inspect.getmembers(found, lambda m: inspect.isroutine(m) or isinstance(m, property))
    missing = [
        member
        for member, value in members
        if not member.startswith("_")
        and (getattr(value, "__module__", "") or "").startswith("pipemega")
        and not inspect.getdoc(value)
    ]
    assert missing == []


@pytest.mark.sweep
def test_the_generator_writes_a_page_for_each_module(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="pdoc, of the dev extra, is not installed")
    code = (
        "import sys, pathlib; from docs.api import generate, public_modules\n"
        "assert 'pipemega.engine.engine' in public_modules()\n"
        "assert 'pipemega.cli.plan' not in public_modules()\n"
        "generate(['pipemega', 'pipemega.config.batch'], pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)
    page = (tmp_path / "pipemega.html").read_text(encoding="utf-8")
    assert all(f'id="{name}"' in page for name in ("Engine", "initialize", "PipelineModule"))
    assert (tmp_path / "pipemega/config/batch.html").is_file()
