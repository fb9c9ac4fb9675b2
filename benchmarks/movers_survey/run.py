"""Reads the launch scripts and DeepSpeed JSON files of repositories, and compares two versions.

    python -m benchmarks.movers_survey.run CLONE... --out outcomes.csv
    python -m benchmarks.movers_survey.run CLONE... --compare benchmarks/movers_survey/outcomes.csv

CLONE is the folder of a git repository, bare or not; its HEAD is read. Each shell script that
starts a training of Megatron and each JSON file with keys of DeepSpeed is one row: repository,
commit, path, exit code of `pipemega config from-megatron` or `from-deepspeed`, and the first
digits of the SHA-256 of the printed config. Texts of the files are not stored.
"""

import argparse
import contextlib
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from pipemega.cli import main as pipemega

SCRIPTS = {".sh", ".slurm", ".sbatch"}
# A JSON file with one of them is a config of DeepSpeed.
DEEPSPEED = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}


class Row(NamedTuple):
    """A file and its outcome.

    Args:
        outcome: the exit code, or the class of an exception.
        digest: hash of the printed config; empty if there is none.
    """

    repository: str
    commit: str
    path: str
    outcome: str
    digest: str


def read(command: str, path: Path) -> tuple[str, str, str]:
    """Return outcome, printed config and errors of one command."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            outcome = str(pipemega(["config", command, str(path)]))
        except SystemExit as end:
            outcome = str(end.code)
        except Exception as error:
            outcome = type(error).__name__
    return outcome, out.getvalue(), errors.getvalue()


def is_deepspeed(path: Path) -> bool:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return False
    return isinstance(tree, dict) and not DEEPSPEED.isdisjoint(tree)


def survey(clone: Path) -> list[Row]:
    """Return the rows of one repository, in the order of the paths."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", clone, *words], capture_output=True).stdout

    commit = git("rev-parse", "HEAD").decode().strip()
    url = git("config", "--get", "remote.origin.url").decode().strip()
    name = "/".join(url.removesuffix(".git").split("/")[-2:])
    paths = git("ls-tree", "-r", "--name-only", "-z", "HEAD").decode().split("\0")
    wanted = [path for path in paths if Path(path).suffix in {*SCRIPTS, ".json"}]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        # A script may read others. A file that the clone lacks is empty.
        for path in wanted:
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(git("show", f"HEAD:{path}"))
        for path in tqdm(wanted, desc=name, disable=not sys.stderr.isatty()):
            file = Path(folder, path)
            if file.suffix == ".json" and not is_deepspeed(file):
                continue
            command = "from-deepspeed" if file.suffix == ".json" else "from-megatron"
            outcome, config, _ = read(command, file)
            if command == "from-megatron" and not config:
                continue  # no training
            digest = hashlib.sha256(config.replace(folder, "").encode()).hexdigest()[:12]
            rows.append(Row(name, commit, path, outcome, digest if config else ""))
    return rows


def compare(before: list[Row], after: list[Row]) -> str:
    """Return how many files have the same outcome and config, and the paths of the others."""
    old, new = ({row[:3]: row[3:] for row in rows} for rows in (before, after))
    lines = []
    for kind in ("scripts", "JSON files"):
        keys = [k for k in {**old, **new} if k[2].endswith(".json") == (kind == "JSON files")]
        same = sum(old.get(key) == new.get(key) for key in keys)
        lines.append(f"{kind}: {same} of {len(keys)} have the same exit code and config")
        lines += [
            f"  {key[0]} {key[2]}: {old.get(key)} -> {new.get(key)}"
            for key in keys
            if old.get(key) != new.get(key)
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clones", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    parser.add_argument("--compare", type=Path, help="rows of another version, or of --out")
    options = parser.parse_args()
    # A script takes variables that it does not set from the environment.
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    os.environ.clear()
    os.environ.update(kept)
    rows = [row for clone in options.clones for row in survey(clone.absolute())]
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([Row._fields, *rows])
    counts = Counter((row.path.endswith(".json"), row.outcome) for row in rows)
    for (is_json, outcome), count in sorted(counts.items()):
        print(f"{'JSON files' if is_json else 'scripts'}, exit code {outcome}: {count}")
    if options.compare:
        with options.compare.open(newline="", encoding="utf-8") as file:
            print(compare([Row(*line) for line in list(csv.reader(file))[1:]], rows))


if __name__ == "__main__":
    main()
