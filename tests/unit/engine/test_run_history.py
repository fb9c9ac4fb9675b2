"""Times, epochs and evaluations of a run over its restarts."""

import math
import re

import pytest

from pipemega.engine.run.run_history import EpochSums, Evaluation, RunTimes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.004, "0.00 s"),
        (9.99, "9.99 s"),
        (9.999, "10.0 s"),
        (59.9, "59.9 s"),
        (59.97, "1:00"),
        (160.4, "2:40"),
        (3725.0, "1:02:05"),
    ],
)
def test_times_are_shown_in_seconds_minutes_and_hours(seconds: float, text: str) -> None:
    times = RunTimes()
    times.load_state_dict({"total": seconds, "training": 1.0})
    assert str(times) == f"{text} (training 1.00 s)"


def test_times_add_up_over_restarts_but_not_over_rollbacks() -> None:
    first = RunTimes()
    first.load_state_dict({"total": 100.0, "training": 70.0, "saving": 5.0})
    first.start()
    with first("training"), first("evaluation"):
        pass
    seconds = first.seconds()
    assert list(seconds) == ["total", "training", "evaluation", "saving"]
    assert 100.0 < seconds["total"] < 110.0
    assert 70.0 < seconds["training"] < 71.0
    assert seconds["saving"] == 5.0
    # After `start` a loaded checkpoint is that of a rollback: its time has passed.
    first.load_state_dict({"total": 1.0, "training": 1.0})
    assert first.seconds()["training"] > 70.0
    assert re.match(r"1:40 \(training 1:10, evaluation 0.00 s, saving 5.00 s\)", str(first))


def test_the_mean_loss_of_an_epoch_is_that_of_its_samples_with_a_finite_loss() -> None:
    sums = EpochSums()
    assert math.isnan(sums.mean_loss)
    for loss, samples in ((1.0, 8), (math.nan, 8), (4.0, 4)):
        sums.add(loss, samples, 0.5)
    assert (sums.steps, sums.samples, sums.seconds) == (3, 20, 1.5)
    assert sums.mean_loss == pytest.approx((8 * 1.0 + 4 * 4.0) / 12)
    assert EpochSums.from_state(sums.state_dict()) == sums
    assert EpochSums.from_state({}) == EpochSums()


def test_evaluations_of_older_versions_are_read() -> None:
    older = {"validation": [[3, 2.5]]}
    assert Evaluation.all_in(older) == [Evaluation(3, "validation", {"loss": 2.5})]
    saved = [Evaluation(4, "easy", {"loss": 1.0, "top1": 0.5})]
    assert Evaluation.all_in({"evaluations": [list(saved[0])]}) == saved
    assert Evaluation.all_in({}) == []
