"""Sums over two ranks whose numbers arrive late from the device."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pipemega.distributed.host_memory import HostMemory
from pipemega.errors import PipelineError
from pipemega.optimizer.post_validation import HostSums
from tests.ranks.pool import RankPool
from tests.unit.late_copies import LateHostMemory

CPU = torch.device("cpu")
# A squared norm, number of broken ranks, loss, weight, micro-batches, votes.
NUMBERS = torch.arange(6, dtype=torch.float64)


def late_and_complete_sums() -> Any:
    """Return the sums, the threads that waited for copies, and the error of a failed sum."""
    memory, group = LateHostMemory.reset(CPU), dist.new_group(backend="gloo")
    results = []
    for first in (HostMemory(CPU), memory):
        sums = HostSums(first, group)
        started = [sums.start(f"sum {n}", NUMBERS * (n + dist.get_rank())) for n in range(3)]
        # A sum may be waited for before an earlier one.
        results += [one.sums() for one in reversed(started)]
        assert started[2].sums() is results[-3]
    with patch.object(dist, "all_reduce", side_effect=RuntimeError("Connection closed by peer")):
        failing = sums.start("loss and weight", NUMBERS)
        with pytest.raises(PipelineError) as caught:
            failing.sums()
    threads = {thread for thread, what in memory.log if what == "synchronizes"}
    return results, threads, str(caught.value)


def test_a_thread_waits_for_late_numbers_and_the_main_thread_raises_its_error(
    pool: RankPool,
) -> None:
    for results, threads, error in pool.run(2, late_and_complete_sums):
        expected = [(factor * NUMBERS).tolist() for factor in (5, 3, 1)]
        assert results == 2 * expected
        assert threads == {"sums"}
        assert error == "loss and weight: the all-reduce over all ranks: Connection closed by peer"
