"""A fixed sample of the random runs of `make fuzz`, and the cases that found faults."""

import pytest

from tests.fuzz.cases import case_of, draw, predicted_refusal, smaller
from tests.fuzz.models import DIFFERENT, REFUSED, SAME, verdict
from tests.fuzz.trials import REFUSED_TRIALS, TRIALS
from tests.sampling import some

SEEDS = range(40)


@pytest.mark.parametrize("seed", some(SEEDS, *range(16)))
def test_random_runs_train_like_plain_torch_or_are_refused_as_predicted(pool, seed):
    found = verdict(pool, draw(seed))
    assert found.outcome != DIFFERENT, f"{draw(seed)}\n{found.reason}"


@pytest.mark.parametrize("name", TRIALS)
def test_runs_that_trained_wrongly_train_like_plain_torch_or_are_refused(pool, name):
    """tests/fuzz/trials.py says what each of them did."""
    found = verdict(pool, TRIALS[name])
    assert found.outcome == (REFUSED if name in REFUSED_TRIALS else SAME), found.reason


def test_the_sample_has_refusals_and_mostly_runs():
    refused = sum(predicted_refusal(draw(seed)) is not None for seed in range(1000))
    assert 10 < refused < 100


def test_a_printed_case_is_the_case_of_its_seed():
    for seed in SEEDS:
        assert case_of(str(draw(seed))) == draw(seed)


def test_simpler_cases_differ_and_keep_their_number_of_ranks():
    for seed in SEEDS:
        case = draw(seed)
        for simpler in smaller(case):
            assert len({mesh.ranks for mesh in simpler.meshes}) == 1
            assert all(simpler.micro_batches % mesh.data == 0 for mesh in simpler.meshes)
        assert any(simpler != case for simpler in smaller(case))


def test_a_wrong_prediction_is_reported(pool, monkeypatch):
    monkeypatch.setattr("tests.fuzz.models.predicted_refusal", lambda case: "nothing")
    found = verdict(pool, case_of('{"layers": ["linear"]}'))
    assert found.outcome == DIFFERENT
    assert found.reason == "trained, predicted: nothing"
    monkeypatch.undo()
    mesh = '{"pipeline": 2, "schedule": "zb-h1", "partition": "uniform"}'
    penalty = case_of(f'{{"layers": ["penalty", "linear"], "mesh": {mesh}}}')
    assert verdict(pool, penalty).outcome == REFUSED
    monkeypatch.setattr("tests.fuzz.models.predicted_refusal", lambda case: None)
    assert "refused, predicted: None" in verdict(pool, penalty).reason
