"""Ranks that do not answer are named in time, and so is what a hanging rank waits for."""

import threading
import time

import pytest
import torch.distributed as dist

from pipemega.doctor.attendance import THREAD_NAME, AbsentRanks, Attendance, Outcome


def ranks_of(world_size, seconds=5.0):
    store = dist.HashStore()
    return [Attendance(store, rank, world_size, seconds) for rank in range(world_size)]


def on_threads(*functions):
    """Call each function in a thread of its own, and return the results or errors."""
    results = [None] * len(functions)

    def call(index):
        try:
            results[index] = functions[index]()
        except AbsentRanks as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_rank_0_gets_the_outcomes_of_all_ranks():
    ranks = ranks_of(3)
    outcomes = on_threads(*(lambda r=r: r.run("square", lambda: r.rank**2) for r in ranks))
    assert outcomes[0] == {rank: Outcome(rank**2) for rank in range(3)}
    assert outcomes[2] == {2: Outcome(4)}


def test_ranks_that_do_not_come_are_named_on_all_others():
    first, second, *_ = ranks_of(4)
    host = Outcome("node0")
    errors = on_threads(*(lambda r=r: r.collect("start", host, 2.0) for r in (first, second)))
    for error in errors:
        assert isinstance(error, AbsentRanks)
        assert error.ranks == (2, 3)
        assert str(error) == "start: no answer from ranks (2, 3) within 2 s"
    assert errors[0].present == {0: host, 1: host}


def test_without_rank_0_the_others_name_it():
    _, second = ranks_of(2)
    with pytest.raises(AbsentRanks) as error:
        second.collect("start", Outcome(), 0.1)
    assert error.value.ranks == (0,)


def test_a_step_that_does_not_end_names_what_it_waits_for():
    (rank,) = ranks_of(1, seconds=0.1)
    rank = Attendance(None, 0, 1, 0.1)
    release = threading.Event()

    def hang():
        rank.position = "the all-reduce over data ranks (0, 1)"
        release.wait(30)

    started = time.monotonic()
    (outcome,) = rank.run("axes", hang).values()
    assert time.monotonic() - started < 10
    assert outcome.error == (
        "not done within 0.1 s, waiting for the all-reduce over data ranks (0, 1)"
    )
    release.set()
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()


def test_an_error_of_a_step_is_its_outcome():
    rank = Attendance(None, 0, 1, 5.0)

    def fail():
        rank.position = "rank 1"
        raise OSError("connection\nrefused")

    (outcome,) = rank.run("ring", fail).values()
    assert outcome.error == "connection refused (waiting for rank 1)"


def test_a_shared_value_is_that_of_rank_0():
    ranks = ranks_of(2)
    values = on_threads(*(lambda r=r: r.share("x", lambda: [r.rank, None]) for r in ranks))
    assert values == [[0, None], [0, None]]
