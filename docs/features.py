"""Generates docs/features.md from features.json5: `python -m docs.features > docs/features.md`.

`python -m docs.features --run` runs the command of each row and prints whether it succeeded;
`--run 2.9 4.1` runs the commands of two rows. A row is what a document promises, how pipemega does
it, and a command that shows it.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# JSON, but not named .json: `pipemega data prepare --input docs` would read it as records.
ROWS = Path(__file__).with_suffix(".json5")

_COLUMNS = "| | in the document | with pipemega | command |\n| --- | --- | --- | --- |"


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield number, promise, way, and command of each row."""
    for section, document in enumerate(_content()["documents"]):
        for number, (promise, way, command) in enumerate(document["rows"], start=1):
            yield f"{section}.{number}", promise, way, command


def _content() -> dict[str, Any]:
    return json.loads(ROWS.read_text(encoding="utf-8"))


def page() -> str:
    """Return docs/features.md."""
    content = _content()
    titles = [each["document"] for each in content["documents"]]
    lines = [*content["head"]]
    for number, promise, way, command in rows():
        section, _, row = number.partition(".")
        if row == "1":
            lines += ["", f"## {titles[int(section)]}", "", _COLUMNS]
        lines.append(f"| {number} | {promise} | {way} | `{command}` |")
    return "\n".join(lines) + "\n"


def run(numbers: list[str]) -> int:
    """Run the commands of some rows, or of all; return how many failed."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    failed = 0
    for number, promise, _, command in rows():
        if numbers and number not in numbers:
            continue
        words = shlex.split(command)
        if words[0] in ("pipemega", "pytest"):
            words = [sys.executable, "-m", *words]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        print(f"{'failed' if done.returncode else 'ok    '} {number}  {promise}", flush=True)
        if done.returncode:
            failed += 1
            print(f"$ {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(min(run(sys.argv[2:]), 1))
    sys.stdout.write(page())
