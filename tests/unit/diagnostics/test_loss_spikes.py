"""Detection of loss spikes."""

import math
import random

from pipemega.diagnostics.stragglers import SpikeDetector


def losses(count: int, noise: float = 0.05) -> list[float]:
    source = random.Random(5)
    return [3.0 * math.exp(-step / 30) + 2 + source.gauss(0, noise) for step in range(count)]


def test_a_normal_loss_curve_has_no_spike() -> None:
    detector = SpikeDetector(100, 10.0)
    assert not any(detector.add(loss) for loss in losses(2000))


def test_a_jump_is_one_spike_even_if_the_loss_stays_high() -> None:
    detector = SpikeDetector(100, 10.0)
    curve = losses(300)
    for step in range(150, 160):
        curve[step] += 2.0
    found = {step: spike for step, loss in enumerate(curve) if (spike := detector.add(loss))}
    assert list(found) == [150]
    assert found[150].median < found[150].bound < found[150].loss == curve[150]


def test_inf_and_nan_are_not_spikes_and_are_not_kept() -> None:
    detector = SpikeDetector(100, 10.0)
    assert not any(detector.add(loss) for loss in [math.nan, math.inf] * 100)
    assert detector.state_dict()["losses"] == []


def test_noise_on_an_almost_constant_loss_is_not_a_spike() -> None:
    detector = SpikeDetector(50, 10.0)
    assert not any(detector.add(2.0 + 1e-6 * step) for step in range(200))


def test_a_window_of_zero_disables_detection() -> None:
    detector = SpikeDetector(0, 10.0)
    assert not any(detector.add(10.0**step) for step in range(50))


def test_a_detector_continues_from_a_state_dict() -> None:
    curve = losses(320)
    curve[310] += 3.0
    one, other = SpikeDetector(100, 10.0), SpikeDetector(100, 10.0)
    for loss in curve[:300]:
        one.add(loss)
    other.load_state_dict(one.state_dict())
    assert [step for step in range(300, 320) if other.add(curve[step])] == [310]
