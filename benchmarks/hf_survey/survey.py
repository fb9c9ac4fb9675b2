"""Checks every causal LM of the installed transformers, each with a small default config.

    python -m benchmarks.hf_survey.survey [--pipeline P] [--tensor T] [FAMILY ...]

Prints one line for each family: equal; DIFFERENT; refused, or failed with an exception (both by
pipemega); not run (transformers itself cannot run the default config of the family). A family gets
two minutes.
"""

import argparse
import signal
import sys
import time
import warnings
from collections import Counter
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pipemega.errors import PipemegaError
from pipemega.hf_check.model_check import CheckResult, NoSmallModel, check_model
from pipemega.hf_check.split_run import SplitSettings, prepare_ranks

_SECONDS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=1)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    prepare_ranks()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGALRM, _late)
    counts: Counter[str] = Counter()
    settings = SplitSettings(task="causal-lm", pipeline=arguments.pipeline, tensor=arguments.tensor)
    # Some configs belong to several model types.
    seen = set()
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        family = config_class.model_type
        if family in seen or (arguments.families and family not in arguments.families):
            continue
        seen.add(family)
        start = time.perf_counter()
        verdict, detail = _check(config_class, settings)
        counts[verdict] += 1
        line = f"{family:<28}{verdict:<10}{detail}"
        print(f"{line[:150]}  ({time.perf_counter() - start:.1f} s)", flush=True)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))


def _check(config_class: Any, settings: SplitSettings) -> tuple[str, str]:
    signal.alarm(_SECONDS)
    try:
        config = config_class()
    except Exception as error:
        return "not run", f"default config: {type(error).__name__}: {' '.join(str(error).split())}"
    try:
        return _verdict(check_model(config, settings))
    except NoSmallModel as error:
        return "not run", str(error)
    except PipemegaError as error:
        return "refused", " ".join(str(error).split())
    except Exception as error:
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        signal.alarm(0)


def _verdict(result: CheckResult) -> tuple[str, str]:
    kinds = [
        f"{c.kind} {max(c.loss_difference, c.differences[0].relative):.0e}"
        for c in result.comparisons
    ]
    kinds += [f"{kind} refused" for kind in result.refused]
    return ("equal" if result.is_equal else "DIFFERENT"), ", ".join(kinds)


def _late(*_: Any) -> None:
    raise PipemegaError(f"no result in {_SECONDS} s")


if __name__ == "__main__":
    sys.exit(main())
