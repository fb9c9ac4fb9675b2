"""Takes mends back one at a time, and counts the random runs until `tests.fuzz.models` finds each.

python -m tests.fuzz.power        prints a line for each mend; the exit code is 1 if one is not
                                  found within 300 cases
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = 300
ROOT = Path(__file__).parents[2]
# What is taken back -> file, text, and text of before.
MENDS: dict[str, tuple[str, str, str]] = {
    "gradients with the strides of their parameters": (
        "optimizer/gradients.py",
        "flat.as_strided(self.parameter.shape, self.parameter.stride())",
        "flat.view(self.parameter.shape)",
    ),
    "a rollback waits for the all-gathers of ZeRO": (
        "optimizer/post_validation.py",
        "            self.masters.wait()\n            self.skipped_steps",
        "            self.skipped_steps",
    ),
    "a replaced forward keeps its effect": (
        "pipeline/split_backward.py",
        'if kind.forward is not _FORWARDS.get(kind) or "forward" in vars(module):',
        "if kind.forward is not _FORWARDS.get(kind):",
    ),
    "hooks after the accumulation are called": (
        "parameters.py",
        'after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}',
        "after: dict[int, object] = {}",
    ),
    "frozen parameters get no gradient": (
        "optimizer/masters.py",
        "self.named[name].grad = None",
        "pass",
    ),
    "an empty parameter has no optimizer state": (
        "optimizer/masters.py",
        "if p.requires_grad and p.numel()]",
        "if p.requires_grad]",
    ),
    "a recomputation gets a copy if the forward got one": (
        "pipeline/messages.py",
        "        # torch does not count",
        "        changes = self._changes.get(key)\n        # torch does not count",
    ),
    "the move of the first step keeps hooks": (
        "engine/stage_mover.py",
        "            current.update(hooks)\n",
        "",
    ),
    "auxiliary losses are means over samples": (
        "engine/step_runner.py",
        "partial(float, 1 / self.batch.micro_batch_size)",
        "partial(float, 1)",
    ),
    "ranks agree that parameters are frozen": (
        "engine/run/batch_reader.py",
        "if loader.is_map_style and self._is_fenced:",
        "if False:",
    ),
}


def cases_until_found(mend: str) -> int | None:
    """Return the number of the first case that is DIFFERENT; None: none of `CASES` is."""
    name, text, before = MENDS[mend]
    with tempfile.TemporaryDirectory() as folder:
        for package in ("pipemega", "tests"):
            shutil.copytree(ROOT / package, Path(folder, package))
        path = Path(folder, "pipemega", name)
        source = path.read_text(encoding="utf-8")
        assert source.count(text) == 1, (name, text)
        path.write_text(source.replace(text, before), encoding="utf-8")
        found = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.models", "--cases", str(CASES), "--first"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    number = re.search(r"found by case (\d+)", found.stdout)
    assert number or found.returncode == 0, found.stdout + found.stderr
    return int(number[1]) if number else None


def main() -> int:
    missed = 0
    for mend in sys.argv[1:] or MENDS:
        number = cases_until_found(mend)
        missed += number is None
        print(f"{mend}: {f'found by case {number}' if number else 'not found'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
