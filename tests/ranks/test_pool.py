"""The pool of ranks ends a test in which some ranks wait for a rank that has failed."""

import os
import time
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from tests.ranks import pool as pool_module
from tests.ranks.pool import RankPool, RanksFailed


def wait_for_a_failed_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("injected error")
    time.sleep(600)


def test_ranks_that_wait_for_a_failed_rank_end_soon_and_the_next_test_gets_new_ranks(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool waited for the whole timeout of the test, up to 300 s, in each of many tests.

    It happened with an empty ATEN_CPU_CAPABILITY: see the next test.
    """
    monkeypatch.setattr(pool_module, "AFTER_FAILURE_SECONDS", 0.5)
    with pytest.raises(RanksFailed) as caught:
        pool.run(2, wait_for_a_failed_rank, timeout=100.0)
    assert caught.value.errors[1][0] == "ValueError: injected error"
    assert caught.value.errors[0] == ("hang", "not done after 0.5 s, rank 1 has failed")
    assert pool.run(2, dist.get_rank) == [0, 1]


def serve_with_an_invalid_setting(pipe: Connection) -> None:
    os.environ["ATEN_CPU_CAPABILITY"] = ""
    pool_module._serve(pipe)


def compute() -> float:
    return float(torch.ones(3).sum())


def test_an_invalid_instruction_set_of_torch_stops_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns in the first operation of a process, and ranks raise warnings.

    So after tests with two ranks, a test with four failed on two of them, while the others waited
    for these in the creation of a process group.
    """
    monkeypatch.setattr(pool_module, "_serve", serve_with_an_invalid_setting)
    ranks = RankPool(1)
    try:
        assert ranks.run(1, compute) == [3.0]
    finally:
        ranks.close()
