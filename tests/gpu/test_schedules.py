"""Every schedule with large messages, compared with one rank: no message is lost, late or swapped.

See wide_model.py for the size of the messages, and devices.py for the devices.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipemega.pipeline.schedules import SCHEDULES
from tests.gpu import wide_model
from tests.gpu.devices import Run, on_ranks

# Relative: the additions of gradients have another order on each mesh.
TOLERANCE = {"cuda": 2e-4, "cpu": 1e-5}


@cache
def one_rank(device: str, layers: int, num_microbatches: int, steps: int) -> dict[str, Any]:
    return wide_model.train(device, 1, layers, steps, num_microbatches=num_microbatches)


def check(run: Run, device: str, num_ranks: int, **changes: Any) -> dict[str, Any]:
    """Compare a pipeline with one rank; return the result of rank 0."""
    layers = 2 * num_ranks + 2  # enough for two stages per rank
    expected = one_rank(device, layers, 2 * num_ranks, wide_model.STEPS)
    results = run(device, num_ranks, wide_model.train, size=num_ranks, layers=layers, **changes)
    for result in results:
        assert_close(result, expected, TOLERANCE[device])
    first: dict[str, Any] = results[0]
    return first


def assert_close(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for key in ("loss", "norm", "eval"):
        assert result[key] == pytest.approx(expected[key], rel=tolerance), key
    assert set(result["parameters"]) == set(expected["parameters"])
    for name, values in expected["parameters"].items():
        assert result["parameters"][name] == pytest.approx(values, rel=tolerance, abs=1e-3), name


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "interleaved"])
@on_ranks(2, 4, 8)
def test_a_schedule_with_large_messages_trains_as_one_rank(
    run: Run, device: str, num_ranks: int, schedule: str
) -> None:
    check(run, device, num_ranks, pipeline={"schedule": schedule})


@on_ranks(2, 4, 8, cheap=[2])
def test_interleaved_with_large_messages_trains_as_one_rank(
    run: Run, device: str, num_ranks: int
) -> None:
    check(run, device, num_ranks, pipeline={"schedule": "interleaved"})


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
@on_ranks(2, 4)
def test_headers_with_every_message_do_not_change_the_losses(
    run: Run, device: str, num_ranks: int, schedule: str
) -> None:
    sections = {"schedule": schedule, "shapes": "exchanged"}
    check(run, device, num_ranks, pipeline=sections)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
@on_ranks(1, 2, 4, 8)
def test_the_timers_of_the_breakdown_do_not_stop_a_pipeline(
    run: Run, device: str, num_ranks: int, schedule: str
) -> None:
    """A timer that waited for the device would also wait for receives that were posted early."""
    section = {"schedule": schedule}
    result = check(run, device, num_ranks, pipeline=section, wall_clock_breakdown=True)
    assert {"forward", "backward", "optimizer"} <= set(result["timed"])


@on_ranks(2, 4)
def test_a_measured_plan_replaces_the_first_one_during_the_run(
    run: Run, device: str, num_ranks: int, tmp_path: Path
) -> None:
    """Schedule `auto` opens the connections of the next plan between two steps."""
    layers, section = 2 * num_ranks + 2, {"schedule": "auto"}
    expected = one_rank(device, layers, 2 * num_ranks, 8)
    results = run(
        device,
        num_ranks,
        wide_model.train_with_cache,
        cache=str(tmp_path),
        size=num_ranks,
        layers=layers,
        steps=8,
        pipeline=section,
    )
    for result in results:
        assert result["replaced"]
        assert set(result["plans"]) == {"auto"}
        assert_close(result, expected, TOLERANCE[device])
