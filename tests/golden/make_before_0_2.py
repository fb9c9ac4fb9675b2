"""Write `tests/golden/before_0_2`: runs of the version before 0.2, which later versions continue.

    python -m tests.golden.make_before_0_2 FOLDER

Do not replace the stored files by those of newer code: they prove that it loads older ones.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.ranks.golden import before_0_2_runs as runs
from tests.ranks.pool import RankPool

SCRIPT = Path(__file__).parent / "before_0_2/user_script"
SENTENCE = "to be or not to be that is the question whether it is nobler in the mind"
# Of the ScheduleTuner: after so many steps the costs are measured and cached.
TUNED_STEPS = 6


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_data(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    words = SENTENCE.split()
    texts = [" ".join(words[at % 7 : at % 7 + 3 + at % 9]) for at in range(60)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "data/corpus.jsonl").write_text("\n".join(lines) + "\n")
    command = "data prepare --input data/corpus.jsonl --vocab-size 272 --output-prefix data/corpus"
    subprocess.run([sys.executable, "-m", "pipemega", *command.split()], cwd=folder, check=True)


def user_lines(folder: Path) -> list[str]:
    """Run the script of the user, and again, when it resumes; return the lines that it prints."""
    found = []
    for _ in range(2):
        command = [sys.executable, "train.py", "config.json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found += [line for line in done.stdout.splitlines() if line.startswith("user: ")]
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    write_data(folder)
    for name, config in runs.CONFIGS.items():
        write_json(folder / name / "config.json", config)
    pool = RankPool(2)
    try:
        for name, run in runs.RUNS.items():
            losses = pool.run(run.world_size, runs.run, str(folder), name, True)[0]
            write_json(folder / name / "next_losses.json", losses)
            shutil.rmtree(folder / name / "resumed", ignore_errors=True)
        machine = runs.machine()
        _, losses = pool.run(2, runs.auto_schedule, str(folder), machine, TUNED_STEPS)[0]
        write_json(folder / "auto_pipeline2/machine.json", machine)
        write_json(folder / "auto_pipeline2/next_losses.json", losses)
    finally:
        pool.close()
    for lock in folder.rglob("run.lock"):  # names this process
        lock.unlink()
    target = folder / "user_script"
    target.mkdir()
    for file in ("train.py", "config.json"):
        shutil.copy(SCRIPT / file, target)
    lines = user_lines(target)
    shutil.rmtree(target / "checkpoints")
    (target / "expected.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
