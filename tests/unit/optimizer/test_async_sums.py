"""Sums over all ranks whose numbers arrive late from the device; in one process."""

import threading

import pytest
import torch

from pipemega.distributed.host_memory import HostMemory
from pipemega.optimizer import post_validation
from pipemega.optimizer.mixed_precision import Precision
from pipemega.optimizer.post_validation import HostSums
from tests.unit.late_copies import LateHostMemory
from tests.unit.optimizer import test_post_validate as steps

CPU = torch.device("cpu")


def test_a_step_waits_for_the_device_only_when_it_needs_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = LateHostMemory.reset(CPU)
    monkeypatch.setattr(post_validation, "HostMemory", lambda _: memory)
    weight, step = steps.build(steps.PostValidatedStep, "AdamW", Precision(), sync_after=0)
    waits = [("MainThread", "synchronizes")]

    def number_of_waits() -> int:
        return sum(entry in waits for entry in memory.log)

    (weight.sum() * 0.1).backward()
    step.start_loss_sums(torch.tensor(1.0), 3.0, 2)
    assert number_of_waits() == 0  # the backwards would come here
    step(torch.tensor(1.0), 3.0, 2)
    # Loss and weight: the factor of the gradients depends on them.
    assert number_of_waits() == 1
    assert memory.log[-2:] == [("MainThread", "copies"), ("MainThread", "records")]
    assert step.settle()
    assert number_of_waits() == 2
    assert step.last is not None
    assert number_of_waits() == 2


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_steps_with_late_numbers_equal_synchronous_steps(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = LateHostMemory.reset(CPU)
    monkeypatch.setattr(post_validation, "HostMemory", lambda _: memory)
    steps.check("AdamW", dtype)
    assert ("MainThread", "synchronizes") in memory.log


def test_the_thread_of_the_sums_ends_with_their_owner() -> None:
    sums = HostSums(HostMemory(CPU), None)
    started = threading.Event()
    sums._queue().put(started.set)
    assert started.wait(10)
    (thread,) = [t for t in threading.enumerate() if t.name == "sums"]
    del sums
    thread.join(10)
    assert not thread.is_alive()
