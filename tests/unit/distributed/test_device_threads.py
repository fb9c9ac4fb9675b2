"""Threads of ours use the GPU of their process, not GPU 0."""

import threading

import pytest
import torch

from pipemega.checkpoint import async_save
from pipemega.data import read_ahead
from pipemega.distributed import device_waits, process_groups
from pipemega.distributed.process_groups import device_thread
from pipemega.optimizer import post_validation


def test_a_thread_uses_the_device_of_the_thread_that_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: used.append((threading.current_thread().name, device)),
    )
    thread = device_thread(lambda *words: used.append(("called", words)), "copies", 1, 2)
    assert thread.daemon
    assert used == []
    thread.start()
    thread.join()
    assert used == [("copies", 3), ("called", (1, 2))]


def test_a_thread_of_a_process_without_cuda_does_not_start_it() -> None:
    called: list[bool] = []
    thread = device_thread(lambda: called.append(torch.cuda.is_initialized()), "plain")
    thread.start()
    thread.join()
    assert called == [False]


@pytest.mark.parametrize(
    "module", [async_save, read_ahead, post_validation, device_waits, process_groups]
)
def test_all_threads_that_touch_tensors_are_started_so(module: object) -> None:
    assert module.device_thread is device_thread
