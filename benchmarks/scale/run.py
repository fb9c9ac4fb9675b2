"""Time `pipemega plan` for 70B on 512 and 405B on 16,384 ranks; the target is 60 s each."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

LIMIT_SECONDS = 60
CASES = (("70b", "1f1b"), ("70b", "zb-v"), ("405b", "1f1b"), ("405b", "zb-v"))


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    failed = False
    for name, schedule in CASES:
        config = Path(__file__).parent / f"{name}.json"
        command = [sys.executable, "-m", "pipemega", "plan", str(config)]
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "--set", f"pipeline.schedule={schedule}"], stdout=subprocess.DEVNULL
        )
        seconds = time.perf_counter() - started
        passed = done.returncode == 0 and seconds < LIMIT_SECONDS
        failed |= not passed
        print(f"{name:5} {schedule:6} {seconds:6.1f} s  {'pass' if passed else 'FAIL'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
