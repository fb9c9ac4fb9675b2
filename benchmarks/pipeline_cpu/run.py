"""Compares tokens per second, memory and losses of pipemega and other systems on one GPT.

    python -m benchmarks.pipeline_cpu.run            from the root of the repository

Every measurement starts new processes with one thread each, connected by gloo. The rounds are
interleaved, and each starts with another system, so that a slow minute or a cold cache affects all
systems equally. Results are medians over the rounds; ratios are medians of the ratios within a
round.
"""

import argparse
import importlib.util
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pipeline_cpu.model import Sizes
from benchmarks.pipeline_cpu.peers import TORCH_SCHEDULES
from benchmarks.pipeline_cpu.report import markdown
from benchmarks.ranks import Failed, machine, measure
from pipemega.pipeline.schedules import AUTO, SCHEDULES

# The JSON of each rank of one measurement.
Results = list[dict[str, Any]]

WORKER = "benchmarks.pipeline_cpu.worker"
LOSS_TOLERANCE = 1e-5
MIN_CORE_SHARE = 0.97

REFERENCE, LIMIT = "one-process", "one-process:twice"
OURS = ("1f1b", "1f1b@hand-cut", "auto", "auto@zb-h2-bytes")
# The systems of --short; the references are added to them.
SHORT = ("torch:1f1b", *(f"pipemega:{name}" for name in OURS))
DEFAULT = (
    *(f"torch:{name}" for name in ("1f1b", "interleaved", "interleaved-zb", "zb-v", "dualpipe-v")),
    *(f"pipemega:{name}" for name in OURS),
    *(f"pipemega:{name}" for name in ("zb-h1", "zb-h2", "interleaved-zb", "zb-v")),
)


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    sizes = Sizes()
    systems, notes = _available(options)
    state: dict[str, Any] = {"memory": {}, "rounds": []}
    if options.resume:
        state = json.loads(options.json.read_text(encoding="utf-8"))["raw"]
        if state["rounds"] and set(state["rounds"][0]) != set(systems):
            raise SystemExit(f"{options.json} has other systems: {' '.join(state['rounds'][0])}")
    for system in list(systems):
        if system in state["memory"]:
            continue
        try:
            state["memory"][system] = _measure(system, "memory", sizes, options)
        except Failed as error:
            if not system.startswith("deepspeed"):
                raise
            systems.remove(system)
            notes.append(f"{system} was left out: {str(error).splitlines()[-1]}")
    words = sys.argv[1:] if argv is None else argv
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.pipeline_cpu.run", *words]),
        "machine": machine(),
        "sizes": asdict(sizes),
        "options": {k: v for k, v in vars(options).items() if type(v) is int},
        "raw": state,
    }
    while len(state["rounds"]) < options.rounds:
        state["rounds"].append(_round(len(state["rounds"]), systems, sizes, options))
        _write(report, options)
    report["rows"] = [_row(system, state, sizes) for system in systems]
    report["notes"] = notes + _busy(state["rounds"])
    _write(report, options)
    print(markdown(report))
    return 1 if any(row["loss_difference"] > LOSS_TOLERANCE for row in report["rows"]) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a round")
    parser.add_argument(
        "--split",
        type=int,
        default=5,
        metavar="BLOCKS",
        help="transformer blocks on the first of two stages, for torch, deepspeed and @hand-cut "
        "(default: 5); four stages are partitioned by matrix products",
    )
    parser.add_argument("--json", type=Path, help="write the whole result to this file")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure only the rounds that are missing in the --json file; a round is always whole",
    )
    parser.add_argument(
        "--deepspeed-python",
        metavar="PATH",
        help="Python interpreter of an environment with DeepSpeed, for the system 'deepspeed'",
    )
    parser.add_argument(
        "--systems",
        nargs="*",
        default=list(DEFAULT),
        metavar="NAME",
        help="torch:SCHEDULE, deepspeed, pipemega:SCHEDULE (as shipped, without a key about "
        "stages), pipemega:SCHEDULE@hand-cut, pipemega:auto@SCHEDULE-bytes (with the memory of "
        "another schedule); torch: or pipemega: for all of them; the references always run "
        f"(default: {' '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help=f"measure only the references and {' '.join(SHORT)}",
    )
    options = parser.parse_args(argv)
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    return options


def _available(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the systems that can run here, and a note for each that cannot."""
    known = [f"torch:{name}" for name in TORCH_SCHEDULES] + ["deepspeed"]
    known += [f"pipemega:{name}" for name in (*SCHEDULES, AUTO)]
    known += [f"pipemega:{name}@hand-cut" for name in SCHEDULES]
    known += [f"pipemega:auto@{name}-bytes" for name in SCHEDULES]
    chosen, notes = [REFERENCE, LIMIT], []
    for word in SHORT if options.short else options.systems:
        found = [n for n in known if n == word or (word.endswith(":") and n.startswith(word))]
        if not found:
            raise SystemExit(f"unknown system {word!r}; choose from {', '.join(known)}")
        chosen += [name for name in found if name not in chosen]
    for name in list(chosen):
        reason = None
        if name == "deepspeed" and not (
            options.deepspeed_python or importlib.util.find_spec("deepspeed")
        ):
            reason = "not installed here; see --deepspeed-python"
        if reason is not None:
            chosen.remove(name)
            notes.append(f"{name} was left out: {reason}")
    return chosen, notes


def _round(
    turn: int, systems: list[str], sizes: Sizes, options: argparse.Namespace
) -> dict[str, Results]:
    """Measure every system once; each round starts with another system."""
    first = turn % len(systems)
    results = {}
    for system in systems[first:] + systems[:first]:
        results[system] = _measure(system, "time", sizes, options)
        rate = _rate(system, results[system], sizes)
        print(f"round {turn + 1}: {system}: {rate:.0f} tokens/s", file=sys.stderr, flush=True)
    return results


def _measure(system: str, phase: str, sizes: Sizes, options: argparse.Namespace) -> Results:
    """Run one set of processes and return their results by rank.  Raises: Failed."""
    arguments = ["--system", system.removesuffix(":twice"), "--phase", phase]
    arguments += ["--sizes", json.dumps(asdict(sizes)), "--split", str(options.split)]
    arguments += ["--warmup", str(options.warmup), "--steps", str(options.steps)]
    python = options.deepspeed_python if system == "deepspeed" else None
    return measure(WORKER, 1 if system == REFERENCE else 2, arguments, python)


def _write(report: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _rate(system: str, results: Results, sizes: Sizes) -> float:
    """Return the tokens per second of all processes together."""
    tokens = sizes.tokens * len(results[0]["step_seconds"])
    seconds = [float(result["seconds"]) for result in results]
    if system in (REFERENCE, LIMIT):
        # Each process trains on its own.
        return sum(tokens / own for own in seconds)
    return tokens / max(seconds)


def _row(system: str, state: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    rounds = [turn[system] for turn in state["rounds"]]
    rates = [_rate(system, results, sizes) for results in rounds]
    expected = state["rounds"][0][REFERENCE][0]["losses"]
    differences = [
        _distance(loss, right)
        for results in rounds
        for result in results
        for loss, right in zip(result["losses"], expected, strict=True)
        if loss is not None
    ]

    def over(other: str) -> float | None:
        """Return the median over the rounds of the ratio to `other`."""
        if any(other not in turn for turn in state["rounds"]):
            return None
        others = [_rate(other, turn[other], sizes) for turn in state["rounds"]]
        return median(own / their for own, their in zip(rates, others, strict=True))

    return {
        "system": system,
        "processes": len(rounds[0]),
        "tokens_per_second": median(rates),
        "rounds": rates,
        "over_limit": over(LIMIT),
        "over_torch_1f1b": over("torch:1f1b"),
        "over_own_1f1b": over("pipemega:1f1b@hand-cut"),
        "live_mb": [result["live_mb"] for result in state["memory"][system]],
        "rss_growth_mb": _by_rank(rounds, "rss_growth_mb"),
        "ru_maxrss_mb": _by_rank(rounds, "ru_maxrss_mb"),
        "loss_difference": max(differences, default=math.inf),
    }


def _distance(loss: float, expected: float) -> float:
    """Return the absolute difference; infinity for NaN."""
    return math.inf if math.isnan(loss) else abs(loss - expected)


def _by_rank(rounds: list[Results], key: str) -> list[float]:
    """Return the median over the rounds for each rank."""
    by_round = [[result[key] for result in results] for results in rounds]
    return [median(values) for values in zip(*by_round, strict=True)]


def _busy(rounds: list[dict[str, Results]]) -> list[str]:
    """Return a note if the reference processes, which never wait, did not have a full core each."""
    results = [r for turn in rounds for name in (REFERENCE, LIMIT) for r in turn[name]]
    share = min(result["cpu_seconds"] / result["seconds"] for result in results)
    if share > MIN_CORE_SHARE:
        return []
    return [f"the machine was busy: a process that never waits had {share:.0%} of a core"]


if __name__ == "__main__":
    raise SystemExit(main())
