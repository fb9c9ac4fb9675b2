"""Random models and runs, each compared with plain torch in one process in fp64.

    make fuzz                                       runs it, among others
    python -m tests.fuzz.models --cases 500         new seeds; prints a line per case that fails
    python -m tests.fuzz.models --seed 17           one seed
    python -m tests.fuzz.models --case '{...}'      one case, as a failure prints it
    python -m tests.fuzz.models --trials            the runs that once trained wrongly, a row each

Each case ends as SAME (losses, norms and parameters within 1e-9 of torch), REFUSED (with the error
that `predicted_refusal` predicts) or DIFFERENT. A case that is DIFFERENT is made smaller before it
is printed. The exit code is 1 if a case was DIFFERENT.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import local

from tqdm import tqdm

from tests.fuzz.cases import Case, case_of, draw, predicted_refusal, smaller
from tests.fuzz.training import compare
from tests.fuzz.trials import TRIALS
from tests.ranks.pool import RankPool, RanksFailed

SAME, REFUSED, DIFFERENT = "SAME", "REFUSED", "DIFFERENT"
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Verdict:
    """How a case ended, and in DIFFERENT why."""

    outcome: str
    reason: str = ""


def verdict(pool: RankPool, case: Case, timeout: float = 90.0) -> Verdict:
    """Run a case on the ranks of `pool`."""
    predicted = predicted_refusal(case)
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = pool.run(case.mesh.ranks, compare, case, folder, timeout=timeout)
        except RanksFailed as error:
            pool.close()
            return Verdict(DIFFERENT, str(error))
    kinds = {kind for kind, _ in results}
    if kinds != {"numbers"}:
        pool.close()  # ranks that failed may have messages in flight
    texts = [text for kind, text in results if kind != "numbers"]
    if kinds == {"refused"}:
        if predicted is not None and any(predicted in text for text in texts):
            return Verdict(REFUSED, texts[0])
        return Verdict(DIFFERENT, f"refused, predicted: {predicted}\n" + "\n".join(texts))
    if texts:
        return Verdict(DIFFERENT, "\n".join(texts))
    if predicted is not None:
        return Verdict(DIFFERENT, f"trained, predicted: {predicted}")
    wrong = {name: far for name, far in results[0][1][1].items() if not far <= TOLERANCE}
    if wrong:
        return Verdict(DIFFERENT, str(dict(sorted(wrong.items(), key=lambda x: -x[1])[:6])))
    losses = [found for _, (found, _) in results]
    if any(other != losses[0] for other in losses):
        return Verdict(DIFFERENT, f"the losses of the ranks differ: {losses}")
    return Verdict(SAME)


def shrunk(pool: RankPool, case: Case, seconds: float = 120.0) -> Case:
    """Return the simplest case that is still DIFFERENT; tries for some time."""
    end, found = time.monotonic() + seconds, True
    while found:
        found = False
        for simpler in smaller(case):
            if time.monotonic() > end:
                return case
            if any(mesh.stages > simpler.num_layers for mesh in simpler.meshes):
                continue
            if simpler != case and verdict(pool, simpler, timeout=30.0).outcome == DIFFERENT:
                case, found = simpler, True
                break
    return case


def run(seeds: Sequence[int], jobs: int, *, shrink: bool, first: bool) -> Counter[str]:
    """Run the cases of `seeds` on `jobs` pools of ranks; print what is DIFFERENT.

    Args:
        shrink: make such cases smaller.
        first: stop at the first of them.
    """
    here, pools, counts = local(), list[RankPool](), Counter[str]()

    def of(seed: int) -> str:
        if first and counts[DIFFERENT]:
            return "not run"
        if not hasattr(here, "pool"):
            here.pool = RankPool(4)
            pools.append(here.pool)
        case = draw(seed)
        found = verdict(here.pool, case)
        counts[found.outcome] += 1
        if found.outcome == DIFFERENT:
            text = f"\nDIFFERENT seed {seed}: {case}\n{found.reason}"
            if shrink:
                case = shrunk(here.pool, case)
                text += f"\nshrunk: --case '{case}'\n{verdict(here.pool, case).reason}"
            tqdm.write(text)
        return found.outcome

    try:
        with ThreadPoolExecutor(jobs) as threads:
            for number, outcome in enumerate(tqdm(threads.map(of, seeds), total=len(seeds)), 1):
                if first and outcome == DIFFERENT:
                    print(f"found by case {number}")
                    break
    finally:
        for pool in pools:
            pool.close()
    return counts


def _print_verdicts(cases: Mapping[str, Case]) -> Iterator[int]:
    """Run some cases; print and yield for each whether it is DIFFERENT."""
    pool = RankPool(4)
    for name, case in cases.items():
        found = verdict(pool, case)
        print(f"{found.outcome:9} {name} {found.reason}", flush=True)
        yield int(found.outcome == DIFFERENT)
    pool.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100, help="number of cases (default 100)")
    parser.add_argument("--seed", type=int, help="first seed; by default random, and printed")
    parser.add_argument("--case", help="one case as JSON, instead of seeds")
    parser.add_argument("--trials", action="store_true", help="the runs of tests/fuzz/trials.py")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, on 4 ranks each")
    parser.add_argument("--first", action="store_true", help="stop at the first that is DIFFERENT")
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as drawn")
    options = parser.parse_args()
    if options.case is not None or options.trials:
        cases = TRIALS if options.trials else {"case": case_of(options.case)}
        return max(_print_verdicts(cases))
    first = random.randrange(10**9) if options.seed is None else options.seed
    print(f"seeds {first} to {first + options.cases - 1}")
    start = time.monotonic()
    seeds, shrink = range(first, first + options.cases), not (options.no_shrink or options.first)
    counts = run(seeds, options.jobs, shrink=shrink, first=options.first)
    print(f"{dict(counts)} in {time.monotonic() - start:.0f} s")
    return int(counts[DIFFERENT] > 0)


if __name__ == "__main__":
    sys.exit(main())
