"""Runs `pretrain_gpt.py` of a tree, and prints on rank 0 when its parts end; torchrun starts it."""

import atexit
import os
import runpy
import sys
import time

STARTED = time.time()


def main() -> None:
    tree = sys.argv[1]
    script = f"{tree}/pretrain_gpt.py"
    sys.argv = [script, *sys.argv[2:]]
    sys.path[0] = tree
    if os.environ["RANK"] == "0":
        # Importing torch first would hide how a tree imports it, so only events are observed.
        print(f"@@ |torchrun starts the worker|{STARTED}", flush=True)
        sys.addaudithook(_Observer())
    runpy.run_path(script, run_name="__main__")


class _Observer:
    """Prints when the import of torch begins and when the worker connects to the others."""

    def __init__(self) -> None:
        self.connected = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and not self.connected and str(arguments[0]).endswith("quickstart.json"):
            self.connected = True
            print(f"@@ |imports|{time.time()}", flush=True)


if __name__ == "__main__":
    atexit.register(sys.stdout.flush)
    main()
