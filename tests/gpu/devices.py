"""Runs the functions of these tests on several GPUs over NCCL, or on the CPU over gloo.

A test takes `device` and `num_ranks` from `on_ranks`: once with "cuda", which needs that many GPUs
and has the marker gpu, and once with "cpu", which shows that the test itself is correct. On the CPU
only the cases that are cheap are in the default run; the others have the marker sweep.

The tests of one GPU run on a CPU if PIPEMEGA_TEST_DEVICE is "cpu".
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.ranks.pool import RankPool

ROOT = Path(__file__).parents[2]
# Longer than any of these runs needs, with the start of torch on 8 ranks.
LIMIT_SECONDS = 400.0

Run = Callable[..., list[Any]]

# The device of the tests of one GPU; "cpu" runs those of them that a CPU can run.
ONE_DEVICE = os.environ.get("PIPEMEGA_TEST_DEVICE", "cuda")


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip a test where there are fewer GPUs."""
    found = torch.cuda.device_count()
    reason = f"needs {count} CUDA device{'s' if count > 1 else ''}, found {found}"
    return pytest.mark.skipif(found < count, reason=reason)


# Of a module of tests that use ONE_DEVICE.
one_gpu = [pytest.mark.gpu, needs_gpus(1)] if ONE_DEVICE == "cuda" else []

only_on_a_gpu = pytest.mark.skipif(ONE_DEVICE != "cuda", reason="a CPU cannot run this")


def on_ranks(*counts: int, cheap: Collection[int] = ()) -> pytest.MarkDecorator:
    """Parametrize a test over `device` and `num_ranks`.

    Args:
        counts: numbers of ranks.
        cheap: those that run on the CPU by default.
    """
    cases = [_case(device, n, n, n in cheap) for n in counts for device in ("cuda", "cpu")]
    return pytest.mark.parametrize(("device", "num_ranks"), cases)


def on_meshes(*meshes: dict[str, Any], cheap: int = 0) -> pytest.MarkDecorator:
    """Parametrize a test over `device` and `mesh`, a section of the config.

    Args:
        cheap: how many of the first meshes run on the CPU by default.
    """
    cases = [
        _case(device, mesh, ranks_of(mesh), number < cheap, " ".join(mesh))
        for number, mesh in enumerate(meshes)
        for device in ("cuda", "cpu")
    ]
    return pytest.mark.parametrize(("device", "mesh"), cases)


def ranks_of(mesh: dict[str, Any]) -> int:
    """Return the number of ranks of a mesh."""
    return math.prod(mesh.get(axis, 1) for axis in ("pipeline", "data", "tensor"))


def _case(device: str, value: Any, count: int, cheap: bool, name: str = "") -> Any:
    if device == "cpu":
        slow = () if cheap else pytest.mark.sweep
        return pytest.param("cpu", value, marks=slow, id=f"cpu{count} {name}".strip())
    marks = [pytest.mark.gpu, needs_gpus(count)]
    return pytest.param("cuda", value, marks=marks, id=f"cuda{count} {name}".strip())


class Ended(NamedTuple):
    """How torchrun has ended: exit code, output of all ranks, and the time (Unix clock)."""

    code: int
    text: str
    at: float


def launch(num_ranks: int, function: Callable[..., Any], out: Path, **arguments: Any) -> Ended:
    """Call `function(**arguments)` on ranks of torchrun; rank r writes its result to out.r.

    Args:
        function: a function of a module; arguments and result are JSON values.
    """
    name = f"{function.__module__}:{function.__name__}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={num_ranks}", "-m", "tests.gpu.several_gpus_run"]
    process = subprocess.Popen(
        [*command, name, json.dumps(arguments), str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=LIMIT_SECONDS)
        return Ended(process.returncode, text, time.time())
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{name} has not ended after {LIMIT_SECONDS:g} s") from None
    finally:
        # Also ranks that a killed torchrun would leave behind.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def runner(pool: RankPool, folder: Path) -> Run:
    """Return run(device, num_ranks, function, **arguments) -> results by rank.

    `function` is called with `device` and the arguments, all JSON values.
    """

    def run(device: str, num_ranks: int, function: Callable[..., Any], **arguments: Any) -> Any:
        if num_ranks == 1:
            try:
                return [function(device, **arguments)]
            finally:
                if device == "cuda":
                    torch.cuda.empty_cache()
        if device == "cuda":
            out = folder / "result"
            ended = launch(num_ranks, function, out, device=device, **arguments)
            assert ended.code == 0, ended.text
            paths = [Path(f"{out}.{rank}") for rank in range(num_ranks)]
            return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if num_ranks <= 4:
            return pool.run(num_ranks, call, function, device, arguments)
        larger = RankPool(num_ranks)
        try:
            return larger.run(num_ranks, call, function, device, arguments)
        finally:
            larger.close()

    return run


def call(function: Callable[..., Any], device: str, arguments: dict[str, Any]) -> Any:
    """Call the function as the ranks of torchrun do: with JSON values, and for JSON values."""
    return json.loads(json.dumps(function(device, **json.loads(json.dumps(arguments)))))
