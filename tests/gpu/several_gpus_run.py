"""Runs one function of these tests on ranks that torchrun starts; see devices.py."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pipemega
from pipemega.distributed.mesh import launched_rank


def main() -> None:
    name, arguments, out = sys.argv[1:]
    module, _, function = name.partition(":")
    with pipemega.run():
        result = getattr(import_module(module), function)(**json.loads(arguments))
        Path(f"{out}.{launched_rank()}").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
