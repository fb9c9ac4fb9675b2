"""What counts as a spike of the loss."""

import math
import random

from pipemega.training.spikes import SpikeDetector


def losses(count: int, noise: float = 0.05) -> list[float]:
    source = random.Random(5)
    return [3.0 * math.exp(-step / 30) + 2 + source.gauss(0, noise) for step in range(count)]


def test_a_usual_curve_has_no_spike() -> None:
    detector = SpikeDetector(100, 10.0)
    assert not any(detector.see(loss) for loss in losses(2000))


def test_a_jump_is_one_spike_however_long_it_stays() -> None:
    detector = SpikeDetector(100, 10.0)
    curve = losses(300)
    for step in range(150, 160):
        curve[step] += 2.0
    found = {step: spike for step, loss in enumerate(curve) if (spike := detector.see(loss))}
    assert list(found) == [150]
    assert found[150].median < found[150].bound < found[150].loss == curve[150]


def test_what_is_not_finite_is_no_spike_and_does_not_count() -> None:
    detector = SpikeDetector(100, 10.0)
    assert not any(detector.see(loss) for loss in [math.nan, math.inf] * 100)
    assert detector.state_dict()["losses"] == []


def test_losses_that_hardly_move_make_no_spike_of_a_little_noise() -> None:
    detector = SpikeDetector(50, 10.0)
    assert not any(detector.see(2.0 + 1e-6 * step) for step in range(200))


def test_a_window_of_zero_sees_nothing() -> None:
    detector = SpikeDetector(0, 10.0)
    assert not any(detector.see(10.0**step) for step in range(50))


def test_a_detector_goes_on_where_another_stopped() -> None:
    curve = losses(320)
    curve[310] += 3.0
    one, other = SpikeDetector(100, 10.0), SpikeDetector(100, 10.0)
    for loss in curve[:300]:
        one.see(loss)
    other.load_state_dict(one.state_dict())
    assert [step for step in range(300, 320) if other.see(curve[step])] == [310]
