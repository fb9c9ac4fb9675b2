"""Time of saving, in the background and blocking, and of loading with and without checksums.

    python -m benchmarks.checkpoint.run            from the root of the repository

Linear layers in fp32 with Adam's state, on CPU ranks of one thread each, over gloo; every file is
synced. All variants alternate in the same processes. Each figure is the time of the slowest rank,
median over the rounds.
"""

import argparse
import hashlib
import tempfile
import time
import zlib
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.ranks import machine, measure

# pipeline, data
MESHES = ((1, 1), (2, 1), (1, 2))
NAMES = ("save", "blocked", "step", "step during save", "rest", "load", "load unverified")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where to save; default: a temporary folder")
    options = parser.parse_args()
    size = 12 * options.layers * (options.width**2 + options.width)
    print(f"{size / 1e6:.0f} MB; {machine()}\n")
    print("| ranks | " + " | ".join(NAMES) + " | blocked / save |")
    print("| --- |" + " ---: |" * (len(NAMES) + 1))
    for pipeline, data in MESHES:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            arguments = {
                "--pipeline": pipeline,
                "--data": data,
                "--width": options.width,
                "--layers": options.layers,
                "--rounds": options.rounds,
                "--folder": folder,
            }
            argv = [str(text) for pair in arguments.items() for text in pair]
            ranks = measure("benchmarks.checkpoint.worker", pipeline * data, argv)
        print(f"| pipeline {pipeline} x data {data} | {row(ranks)} |")
    crc32, sha256 = speed(zlib.crc32), speed(hashlib.sha256)
    print(f"\nCRC-32 {crc32:.0f} MB/s, SHA-256 {sha256:.0f} MB/s, one thread")


def row(ranks: list[dict[str, Any]]) -> str:
    """Return the cells of a table row: milliseconds, and the ratio blocked / save."""
    rounds = [
        {name: max(rank["rounds"][number][name] for rank in ranks) for name in NAMES}
        for number in range(len(ranks[0]["rounds"]))
    ]
    cells = [f"{1e3 * median(one[name] for one in rounds):.0f}" for name in NAMES]
    share = median(one["blocked"] / one["save"] for one in rounds)
    return " | ".join([*cells, f"{share:.1%}"])


def speed(checksum: Callable[[bytes], object]) -> float:
    """Return the speed of a checksum in MB/s."""
    # Not bytes(n), whose memory is first used by the checksum.
    data, started = b"a" * (64 << 20), time.process_time()
    checksum(data)
    return len(data) / 1e6 / (time.process_time() - started)


if __name__ == "__main__":
    main()
