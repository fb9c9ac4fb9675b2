"""Phases of a step: every moment belongs to one phase, so they add up to the step."""

from itertools import count

from pipemega.monitor import Phase, StepPhases
from pipemega.monitor.timers import HostClock


def test_phases_have_no_gaps_and_what_no_phase_claims_is_other() -> None:
    clock = count(100, 10)
    phases = StepPhases(HostClock(lambda: next(clock)))
    phases.start()
    with phases("data"):
        pass
    with phases("pipeline"), phases("gradient norm"):
        pass
    assert phases.stop() == (
        Phase("other", 100, 110),
        Phase("data", 110, 120),
        Phase("other", 120, 130),
        Phase("pipeline", 130, 140),
        Phase("gradient norm", 140, 150),
        Phase("pipeline", 150, 160),
        Phase("other", 160, 170),
    )
    phases.start()
    assert phases.stop() == (Phase("other", 180, 190),)


def test_a_phase_ends_if_its_block_raises() -> None:
    clock = count()
    phases = StepPhases(HostClock(lambda: next(clock)))
    phases.start()
    try:
        with phases("data"):
            raise StopIteration
    except StopIteration:
        pass
    assert [name for name, _, _ in phases.stop()] == ["other", "data", "other"]


def test_the_clock_of_the_device_is_used_only_in_steps_that_are_measured_exactly() -> None:
    host, device = count(0), count(1000, 10)
    phases = StepPhases(HostClock(lambda: next(host)), HostClock(lambda: next(device)))
    phases.start()
    assert phases.stop() == (Phase("other", 0, 1),)
    phases.start(exact=True)
    with phases("optimizer"):
        pass
    assert phases.stop() == (
        Phase("other", 1000, 1010),
        Phase("optimizer", 1010, 1020),
        Phase("other", 1020, 1030),
    )
