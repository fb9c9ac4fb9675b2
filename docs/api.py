"""Generate the API reference: `make docs`, or `python -m docs.api [MODULE ...]`.

Writes HTML to build/api, for all modules of pipemega or only for the named ones.
"""

import pkgutil
import sys
import warnings
from pathlib import Path

import pdoc
import pdoc.render

import pipemega

FOLDER = Path(__file__).parents[1] / "build" / "api"


def public_modules() -> list[str]:
    """Return pipemega and its modules, without the commands and names that start with `_`."""
    found = pkgutil.walk_packages(pipemega.__path__, "pipemega.")
    names = [module.name for module in found if "._" not in module.name]
    return ["pipemega", *(name for name in names if not name.startswith("pipemega.cli"))]


def generate(modules: list[str], folder: Path = FOLDER) -> None:
    """Write one HTML page per module, and an index, to `folder`."""
    # pdoc reads module attributes from __dict__, and the public names are loaded on first use.
    for name in pipemega.__all__:
        setattr(pipemega, name, getattr(pipemega, name))
    # pdoc warns of modules that it already found in their package, and of config keys that come
    # from a table and not from the source of a class.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"pdoc\.")
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*modules, output_directory=folder)


def main(modules: list[str]) -> None:
    generate(modules or public_modules())
    print(f"wrote {FOLDER / 'index.html'}")


if __name__ == "__main__":
    main(sys.argv[1:])
