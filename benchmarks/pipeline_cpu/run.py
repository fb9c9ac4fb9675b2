"""Tokens per second, memory and losses of pipemega and its peers on one GPT, in one run.

    python -m benchmarks.pipeline_cpu.run            from the root of the repository

Every measurement is a set of fresh processes, one thread each, that talk over gloo.  The rounds
are interleaved, and each begins with another system, so that a slow minute of the machine or a
cold cache meets all alike; the result is the median of the rounds.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.pipeline_cpu.model import Sizes

ROOT = Path(__file__).resolve().parents[2]
# What each rank of one measurement wrote.
Results = list[dict[str, Any]]

HERE = "benchmarks.pipeline_cpu"
LOSS_TOLERANCE = 1e-5
ENOUGH_OF_A_CORE = 0.97


@dataclass(frozen=True)
class System:
    """A row of the table: what runs, in how many processes, which package it needs, and whether
    the comparison can do without it."""

    name: str
    function: str
    processes: int
    needs: str | None = None
    is_optional: bool = False

    @property
    def is_pipeline(self) -> bool:
        """Whether its processes share one step, or each take steps of their own."""
        return not self.function.endswith(":one_process")


SYSTEMS = (
    System("one process", f"{HERE}.peers:one_process", 1),
    System("two processes, alone each", f"{HERE}.peers:one_process", 2),
    System("torch 1F1B", f"{HERE}.peers:torch_1f1b", 2),
    System("torch GPipe", f"{HERE}.peers:torch_gpipe", 2),
    System(
        "DeepSpeed 1F1B", f"{HERE}.peers:deepspeed_1f1b", 2, needs="deepspeed", is_optional=True
    ),
    System("pipemega 1F1B", f"{HERE}.ours:pipemega_1f1b", 2, needs=f"{HERE}.ours"),
    System("pipemega zb-h1", f"{HERE}.ours:pipemega_zb_h1", 2, needs=f"{HERE}.ours"),
    System("pipemega zb-v", f"{HERE}.ours:pipemega_zb_v", 2, needs=f"{HERE}.ours"),
)
REFERENCE, LIMIT = SYSTEMS[0], SYSTEMS[1]


class Failed(RuntimeError):
    """A measurement whose processes did not all end well; the message is what they wrote."""


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    sizes = Sizes()
    systems, notes = _available(options.systems)
    memory: dict[str, Results] = {}
    for system in list(systems):
        try:
            memory[system.name] = _measure(system, "memory", sizes, options)
        except Failed as error:
            if not system.is_optional:
                raise
            systems.remove(system)
            notes.append(f"{system.name} was left out: {str(error).splitlines()[-1]}")
    runs: dict[str, list[Results]] = {system.name: [] for system in systems}
    for turn in range(options.rounds):
        first = turn % len(systems)
        for system in systems[first:] + systems[:first]:
            results = _measure(system, "time", sizes, options)
            runs[system.name].append(results)
            _tell(f"round {turn + 1}: {system.name}: {_rate(system, results, sizes):.0f} tokens/s")
    rows = [
        _row(system, runs[system.name], memory[system.name], sizes, runs[REFERENCE.name])
        for system in systems
    ]
    report = {
        "command": f"python -m {HERE}.run " + " ".join(sys.argv[1:] if argv is None else argv),
        "machine": _machine(),
        "sizes": asdict(sizes),
        "options": {k: v for k, v in vars(options).items() if isinstance(v, int)},
        "rows": rows,
        "notes": notes + _busy(runs),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(_markdown(report))
    return 1 if any(row["loss_difference"] > LOSS_TOLERANCE for row in rows) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a round")
    parser.add_argument(
        "--split",
        type=int,
        default=5,
        metavar="LAYERS",
        help="transformer layers on stage 0, for all systems; the embedding is there too, the "
        "final norm and the head are on stage 1 (default: 5)",
    )
    parser.add_argument("--json", type=Path, help="write the whole result to this file")
    parser.add_argument(
        "--systems",
        nargs="*",
        default=[],
        metavar="WORD",
        help="only those with one of these in their names; the references run always",
    )
    return parser.parse_args(argv)


def _available(words: list[str]) -> tuple[list[System], list[str]]:
    """The systems that can run here, and a note for each that cannot."""
    chosen, notes = [], []
    for system in SYSTEMS:
        wanted = not words or any(word.lower() in system.name.lower() for word in words)
        if not wanted and system not in (REFERENCE, LIMIT):
            continue
        if system.needs is not None and importlib.util.find_spec(system.needs) is None:
            notes.append(f"{system.name} was left out: {system.needs} is not installed")
            continue
        chosen.append(system)
    return chosen, notes


def _measure(system: System, phase: str, sizes: Sizes, options: argparse.Namespace) -> Results:
    """One set of processes; their results by rank.  Raises: Failed."""
    with tempfile.TemporaryDirectory() as folder:
        port = str(_free_port())
        files = [Path(folder, f"{rank}.json") for rank in range(system.processes)]
        logs = [Path(folder, f"{rank}.log") for rank in range(system.processes)]
        processes = []
        for rank in range(system.processes):
            command = [
                *(sys.executable, "-m", f"{HERE}.worker", "--system", system.function),
                *("--phase", phase, "--sizes", json.dumps(asdict(sizes))),
                *("--split", str(options.split + 1), "--out", str(files[rank])),
                *("--warmup", str(options.warmup), "--steps", str(options.steps)),
            ]
            with logs[rank].open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=_environment(rank, system.processes, port),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait(processes)
        if any(process.returncode for process in processes):
            said = [f"rank {rank}:\n{log.read_text()}" for rank, log in enumerate(logs)]
            raise Failed("\n".join([system.name, *said]))
        return [json.loads(file.read_text()) for file in files]


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended; the rest are ended with the first that fails."""
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            time.sleep(2.0)  # for what the others have to say
            for process in processes:
                process.kill()
        time.sleep(0.2)


def _environment(rank: int, world_size: int, port: str) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rate(system: System, results: Results, sizes: Sizes) -> float:
    """Tokens per second of all processes together."""
    tokens = sizes.tokens * len(results[0]["step_seconds"])
    seconds = [float(result["seconds"]) for result in results]
    if system.is_pipeline:
        return tokens / max(seconds)
    return sum(tokens / own for own in seconds)


def _row(
    system: System,
    rounds: list[Results],
    memory: Results,
    sizes: Sizes,
    reference: list[Results],
) -> dict[str, Any]:
    rates = [_rate(system, results, sizes) for results in rounds]
    expected = reference[0][0]["losses"]
    differences = [
        _distance(loss, right)
        for results in rounds
        for result in results
        for loss, right in zip(result["losses"], expected, strict=True)
        if loss is not None
    ]
    return {
        "system": system.name,
        "processes": system.processes,
        "tokens_per_second": median(rates),
        "rounds": rates,
        "live_mb": [result["live_mb"] for result in memory],
        "rss_growth_mb": _by_rank(rounds, "rss_growth_mb"),
        "ru_maxrss_mb": _by_rank(rounds, "ru_maxrss_mb"),
        "loss_difference": max(differences, default=math.inf),
        "losses": next(r["losses"] for r in rounds[0] if r["losses"][0] is not None),
    }


def _distance(loss: float, expected: float) -> float:
    """How far apart; NaN, that compares as nothing, is as far as can be."""
    return math.inf if math.isnan(loss) else abs(loss - expected)


def _by_rank(rounds: list[Results], key: str) -> list[float]:
    """The median over the rounds, for each rank."""
    by_round = [[result[key] for result in results] for results in rounds]
    return [median(values) for values in zip(*by_round, strict=True)]


def _busy(runs: dict[str, list[Results]]) -> list[str]:
    """A note when the references, that wait for nobody, did not have a core each."""
    results = [r for s in (REFERENCE, LIMIT) for round_ in runs[s.name] for r in round_]
    share = min(result["cpu_seconds"] / result["seconds"] for result in results)
    if share > ENOUGH_OF_A_CORE:
        return []
    return [f"the machine was busy: a process that never waits had {share:.0%} of a core"]


def _machine() -> dict[str, Any]:
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }


def _markdown(report: dict[str, Any]) -> str:
    machine, sizes = report["machine"], report["sizes"]
    ideal = sizes["num_microbatches"] / (sizes["num_microbatches"] + 1)
    limit = next(r for r in report["rows"] if r["system"] == LIMIT.name)["tokens_per_second"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"Python {machine['python']}; one thread a process, gloo, "
        f"{report['options']['split']} of {sizes['layers']} layers on stage 0; median of "
        f"{report['options']['rounds']} rounds of {report['options']['steps']} steps.",
        "",
        "| system | tokens/s | rounds | of limit × m/(m+p−1) | live tensors, MB per rank "
        "| resident growth, MB per rank | loss − reference |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["rows"]:
        share = row["tokens_per_second"] / (limit * ideal)
        is_pipeline = next(s for s in SYSTEMS if s.name == row["system"]).is_pipeline
        lines.append(
            f"| {row['system']} | {row['tokens_per_second']:.0f} "
            f"| {', '.join(f'{rate:.0f}' for rate in row['rounds'])} "
            f"| {f'{share:.3f}' if is_pipeline else ''} "
            f"| {', '.join(f'{mb:.0f}' for mb in row['live_mb'])} "
            f"| {', '.join(f'{mb:.0f}' for mb in row['rss_growth_mb'])} "
            f"| {row['loss_difference']:.1e} |"
        )
    lines += ["", *(f"- {note}" for note in report["notes"]), "", f"`{report['command'].strip()}`"]
    return "\n".join(lines)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
