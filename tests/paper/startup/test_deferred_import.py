"""Modules that are imported on first use."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from pipemega.lazy_imports import deferred, import_first

ROOT = Path(__file__).parents[3]


def test_a_deferred_module_is_imported_when_an_attribute_is_read() -> None:
    code = (
        "import sys; from pipemega.lazy_imports import deferred\n"
        "d = deferred('colorsys')\n"
        "assert 'colorsys' not in sys.modules; d.rgb_to_hsv; assert 'colorsys' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_missing_attribute_or_module_raises_the_usual_error() -> None:
    with pytest.raises(AttributeError, match="module 'colorsys' has no attribute 'nothing'"):
        _ = deferred("colorsys").nothing
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        _ = deferred("no_such_module").name


def test_the_collector_is_as_before_after_an_import() -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            assert import_first("colorsys").__name__ == "colorsys"
            with pytest.raises(ModuleNotFoundError):
                import_first("no_such_module")
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
