"""Which rank is compared with which."""

from dataclasses import replace

from pipemega.mesh import Mesh
from pipemega.topology import Topology
from pipemega.training.stragglers import StragglerWatch, Summary, summarize


def mesh(pipeline: int = 1, data: int = 1, tensor: int = 1) -> Mesh:
    return replace(Mesh.single(), topology=Topology(pipeline, data, tensor))


def test_a_rank_is_compared_with_those_of_the_same_stages() -> None:
    # The second stage has twice the work: that is no rank's fault.
    summary = summarize([1.0, 1.1, 2.0, 2.1], mesh(pipeline=2, data=2), 1.5)
    assert not summary.lags
    summary = summarize([1.0, 1.1, 2.0, 4.0], mesh(pipeline=2, data=2), 1.5)
    assert (summary.slowest, summary.usual, summary.lags) == (3, 2.0, True)
    assert summary.ratio == 2.0


def test_with_one_data_rank_all_ranks_are_compared() -> None:
    summary = summarize([1.0, 1.0, 1.9, 1.0], mesh(pipeline=4), 1.5)
    assert (summary.slowest, summary.lags) == (2, True)


def test_milliseconds_make_no_straggler() -> None:
    assert not summarize([0.001, 0.009], mesh(data=2), 1.5).lags


def test_a_straggler_is_named_once_until_it_has_been_as_fast_as_others_for_a_while() -> None:
    watch = StragglerWatch(mesh(data=2), 1.5, 1)
    slow = Summary(1, 2.0, 1.0, True)
    fine = replace(slow, lags=False)
    other = replace(slow, slowest=0)
    told = [watch.is_news(summary) for summary in (slow, slow, fine, slow, other, slow)]
    assert told == [True, False, False, False, True, False]
    assert not any(watch.is_news(fine) for _ in range(10))
    assert watch.is_news(slow)
