"""Compares tokens per second, memory and losses of pipemega and other systems on one GPT.

    python -m benchmarks.pipeline_cpu.run            from the root of the repository

Each system has its own processes with one thread each, connected by gloo. All systems are alive at
the same time and take turns: in each round each system trains one step, while the others sleep. So
a slow minute of the machine affects all systems equally. Each round starts with another system.
Results are medians over the rounds; ratios are medians of the ratios within a round.
"""

import argparse
import importlib.util
import json
import math
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.pipeline_cpu.megatron import MEGATRON_SCHEDULES
from benchmarks.pipeline_cpu.model import Sizes
from benchmarks.pipeline_cpu.peers import TORCH_SCHEDULES
from benchmarks.pipeline_cpu.report import markdown
from benchmarks.ranks import Failed, Ranks, machine, measure
from pipemega.pipeline.schedules import AUTO, SCHEDULES

# The JSON of each rank of one measurement.
Results = list[dict[str, Any]]

WORKER = "benchmarks.pipeline_cpu.worker"
LOSS_TOLERANCE = 1e-5
MIN_CORE_SHARE = 0.97

# Families whose package is not among the dependencies of this repository.
OPTIONAL = ("deepspeed", "megatron")
REFERENCE, LIMIT = "one-process", "one-process:twice"
# pipemega with the modules of the other systems, fed by the caller's iterator.
OWN = tuple(f"own:{name}" for name in ("1f1b@hand-cut", "1f1b", "auto"))
OURS = ("1f1b", "1f1b@hand-cut", "auto", "auto@zb-h2-bytes")
# The systems of --short; the references are added to them.
SHORT = ("torch:1f1b", *(f"pipemega:{name}" for name in OURS), *OWN)
DEFAULT = (
    *(f"torch:{name}" for name in ("1f1b", "interleaved", "interleaved-zb", "zb-v", "dualpipe-v")),
    *(f"pipemega:{name}" for name in OURS),
    *(f"pipemega:{name}" for name in ("zb-h1", "zb-h2", "interleaved-zb", "zb-v")),
    *OWN,
)


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    sizes = Sizes()
    systems, notes = _available(options)
    raw: dict[str, Any] = {"memory": {}, "warmup": {}, "rounds": []}
    for system in list(systems):
        try:
            raw["memory"][system] = measure(WORKER, *_processes(system, sizes, options))
        except Failed as error:
            if not system.startswith(OPTIONAL):
                raise
            systems.remove(system)
            notes.append(f"{system} was left out: {str(error).splitlines()[-1]}")
    words = sys.argv[1:] if argv is None else argv
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.pipeline_cpu.run", *words]),
        "machine": machine(),
        "sizes": asdict(sizes),
        "options": {k: v for k, v in vars(options).items() if type(v) is int},
        "raw": raw,
    }
    with ExitStack() as stack:
        alive = {}
        for system in systems:
            alive[system] = Ranks(WORKER, *_processes(system, sizes, options))
            stack.callback(alive[system].close)
            raw["warmup"][system] = alive[system].ready()
        for turn in range(options.rounds):
            raw["rounds"].append(_round(turn, alive, sizes))
            report["rows"] = [_row(system, raw, sizes) for system in systems]
            report["notes"] = notes + _busy(raw["rounds"])
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(markdown(report))
    return 1 if any(row["loss_difference"] > LOSS_TOLERANCE for row in report["rows"]) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first round")
    parser.add_argument("--steps", type=int, default=1, help="steps of each system in a round")
    parser.add_argument(
        "--split",
        type=int,
        default=5,
        metavar="BLOCKS",
        help="transformer blocks on the first of two stages, for torch, deepspeed, megatron and "
        "@hand-cut (default: 5); four stages are partitioned by matrix products",
    )
    parser.add_argument("--json", type=Path, help="write the whole result to this file")
    parser.add_argument(
        "--peers-python",
        metavar="PATH",
        help="Python interpreter of an environment with DeepSpeed and Megatron-core, for the "
        "systems 'deepspeed' and 'megatron:SCHEDULE'",
    )
    parser.add_argument(
        "--systems",
        nargs="*",
        default=list(DEFAULT),
        metavar="NAME",
        help="torch:SCHEDULE, deepspeed, megatron:SCHEDULE (the schedules of Megatron-core: "
        f"{', '.join(MEGATRON_SCHEDULES)}), pipemega:SCHEDULE (as shipped, without a key about "
        "stages), pipemega:SCHEDULE@hand-cut, pipemega:auto@SCHEDULE-bytes (with the memory of "
        "another schedule), own:SCHEDULE[@hand-cut] (the modules of the other systems, fed by the "
        "caller's iterator); torch:, megatron: or pipemega: for all of them; the references always "
        "run "
        f"(default: {' '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help=f"measure only the references and {' '.join(SHORT)}",
    )
    return parser.parse_args(argv)


def _available(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the systems that can run here, and a note for each that cannot."""
    known = [f"torch:{name}" for name in TORCH_SCHEDULES] + ["deepspeed"]
    known += [f"megatron:{name}" for name in MEGATRON_SCHEDULES]
    known += [f"pipemega:{name}" for name in (*SCHEDULES, AUTO)]
    known += [f"pipemega:{name}@hand-cut" for name in SCHEDULES]
    known += [f"pipemega:auto@{name}-bytes" for name in SCHEDULES]
    known += [f"own:{name}{cut}" for name in SCHEDULES for cut in ("", "@hand-cut")]
    known += [f"own:{AUTO}"]
    chosen, notes = [REFERENCE, LIMIT], []
    for word in SHORT if options.short else options.systems:
        found = [n for n in known if n == word or (word.endswith(":") and n.startswith(word))]
        if not found:
            raise SystemExit(f"unknown system {word!r}; choose from {', '.join(known)}")
        chosen += [name for name in found if name not in chosen]
    for name in list(chosen):
        package = name.partition(":")[0]
        if package not in OPTIONAL or options.peers_python or importlib.util.find_spec(package):
            continue
        chosen.remove(name)
        notes.append(f"{name} was left out: not installed here; see --peers-python")
    return chosen, notes


def _round(turn: int, systems: dict[str, Ranks], sizes: Sizes) -> dict[str, Results]:
    """Let every system take its turn; each round starts with another system."""
    names = list(systems)
    first = turn % len(names)
    results = {name: systems[name].turn() for name in names[first:] + names[:first]}
    rates = (f"{name} {_rate(name, results[name], sizes):.0f}" for name in names)
    print(f"round {turn + 1}, tokens/s: {', '.join(rates)}", file=sys.stderr, flush=True)
    return results


def _processes(
    system: str, sizes: Sizes, options: argparse.Namespace
) -> tuple[int, list[str], str | None]:
    """Return the number of ranks of a system, their arguments and their interpreter."""
    arguments = ["--system", system.removesuffix(":twice")]
    arguments += ["--sizes", json.dumps(asdict(sizes)), "--split", str(options.split)]
    arguments += ["--warmup", str(options.warmup), "--steps", str(options.steps)]
    python = options.peers_python if system.startswith(OPTIONAL) else None
    return 1 if system == REFERENCE else 2, arguments, python


def _rate(system: str, results: Results, sizes: Sizes) -> float:
    """Return the tokens per second of all processes together."""
    tokens = sizes.tokens * len(results[0]["losses"])
    seconds = [float(result["seconds"]) for result in results]
    if system in (REFERENCE, LIMIT):
        # Each process trains on its own.
        return sum(tokens / own for own in seconds)
    return tokens / max(seconds)


def _row(system: str, raw: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    rounds, family = [turn[system] for turn in raw["rounds"]], system.partition(":")[0]
    rates = [_rate(system, results, sizes) for results in rounds]
    differences = [
        _distance(loss, right)
        for turn in (raw["warmup"], *raw["rounds"])
        for result in turn[system]
        for loss, right in zip(result["losses"], turn[REFERENCE][0]["losses"], strict=True)
        if loss is not None
    ]

    def ratios(other: str) -> list[float]:
        """Return the ratio to `other` in each round."""
        if other not in raw["memory"]:
            return []
        others = [_rate(other, turn[other], sizes) for turn in raw["rounds"]]
        return [own / their for own, their in zip(rates, others, strict=True)]

    def over(other: str) -> float | None:
        """Return the median over the rounds of the ratio to `other`."""
        return median(ratios(other)) if ratios(other) else None

    return {
        "system": system,
        "processes": len(rounds[0]),
        "tokens_per_second": median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "over_limit": over(LIMIT),
        "over_torch_1f1b": over("torch:1f1b"),
        "over_own_1f1b": over("pipemega:1f1b@hand-cut"),
        "over_hand_cut": over(f"{family}:1f1b@hand-cut"),
        "interval_over_hand_cut": _middle_half(ratios(f"{family}:1f1b@hand-cut")),
        "live_mb": [result["live_mb"] for result in raw["memory"][system]],
        "rss_growth_mb": _by_rank(rounds, "rss_growth_mb"),
        "ru_maxrss_mb": _by_rank(rounds, "ru_maxrss_mb"),
        "loss_difference": max(differences, default=math.inf),
    }


def _middle_half(ratios: list[float]) -> list[float]:
    """Return the quartiles between which half of the rounds are; [] if there are too few."""
    return [q for n, q in enumerate(quantiles(ratios)) if n != 1] if len(ratios) > 1 else []


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
