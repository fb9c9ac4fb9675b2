"""Pinned host memory, and the copies of offload and background saves, on one GPU."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_single import run as gpu_single
from benchmarks.gpu_single.estimate import Sizes
from pipemega.distributed.host_memory import HostCopy, HostMemory
from pipemega.distributed.mesh import Mesh
from pipemega.optimizer.step_outcome import GradientNorms
from tests.gpu.devices import ONE_DEVICE, one_gpu, only_on_a_gpu
from tests.ranks.training_runs import build, data, settings
from tests.unit.checkpoint import test_staging
from tests.unit.optimizer import test_grad_norm

pytestmark = one_gpu

# Copies are asynchronous, and memory is pinned.
ON_GPU = ONE_DEVICE == "cuda"


def memory() -> HostMemory:
    return HostMemory(torch.device(ONE_DEVICE))


def occupy_the_device() -> None:
    if ON_GPU:
        # About 0.1 s of a kernel that only waits, at 2 GHz.
        torch.cuda._sleep(200_000_000)


def test_large_and_small_buffers_are_pinned_and_copied_without_waiting() -> None:
    for numel in (1000, (5 << 20) + 3):
        buffer = memory().empty(numel, dtype=torch.float32)
        assert buffer.is_pinned() == ON_GPU
        source = torch.arange(numel, device=ONE_DEVICE, dtype=torch.float32)
        memory().record().synchronize()
        occupy_the_device()
        memory().copy(buffer, source)
        event = memory().record()
        assert event.query() != ON_GPU
        event.synchronize()
        assert torch.equal(buffer, source.cpu())
        assert memory().holds(buffer)
        assert memory().holds(source) != ON_GPU


def test_freed_pinned_memory_can_be_pinned_again() -> None:
    for _ in range(20):
        views = memory().empty_views([((3 << 20,), torch.float32), ((), torch.int64)])
        assert all(view.is_pinned() == ON_GPU for view in views)
        views[0].fill_(1.0)
        assert torch.equal(views[0].to(ONE_DEVICE), torch.ones(3 << 20, device=ONE_DEVICE))
        del views
    # A failed call would be reported by the next kernel.
    torch.ones(3, device=ONE_DEVICE).sum().item()


def test_copies_on_the_side_stream_run_beside_the_current_stream() -> None:
    used = memory()
    source = torch.ones(1 << 20, device=ONE_DEVICE)
    target = used.empty(1 << 20, dtype=torch.float32)
    with used.side_stream():
        used.copy(target, source)
        copied = used.record()
    occupy_the_device()
    behind = used.record()
    copied.synchronize()
    assert behind.query() != ON_GPU
    assert target.sum() == 1 << 20
    # And a stream can wait for them.
    copied.wait()
    source.zero_()
    assert target.sum() == 1 << 20


def test_a_thread_can_wait_for_a_copy() -> None:
    number = torch.full((), 3.0, device=ONE_DEVICE)
    occupy_the_device()
    started, seen = HostCopy(memory(), number), []
    assert started.is_complete != ON_GPU
    thread = threading.Thread(target=lambda: seen.append(float(started.wait())))
    thread.start()
    thread.join()
    assert seen == [3.0]


def test_the_norms_of_the_gpu_equal_those_of_the_cpu() -> None:
    by_device = []
    for device in ("cpu", ONE_DEVICE):
        named = test_grad_norm.model(range(12), device)
        buffer = test_grad_norm.filled(named, test_grad_norm.GradientBuffer(named))
        compute = GradientNorms(buffer, Mesh.single(device), {}, 12)
        by_device.append(compute().tolist())
    assert by_device[1] == pytest.approx(by_device[0], rel=1e-12)


@contextmanager
def kernels() -> Iterator[list[str]]:
    """Record the names of the kernels and copies that are started."""
    names: list[str] = []
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as recorded:
        yield names
    device = DeviceType.CUDA
    names += [event.name for event in recorded.events() if event.device_type == device]


@only_on_a_gpu
def test_the_norm_starts_as_many_kernels_for_few_layers_as_for_many() -> None:
    counts = []
    for num_layers in (2, 40):
        named = test_grad_norm.model(range(num_layers), ONE_DEVICE)
        compute = test_grad_norm.norms(test_grad_norm.GradientBuffer(named), num_layers)
        compute()
        with kernels() as names:
            compute()
            torch.cuda.synchronize()
        counts.append(len(names))
    # A multi-tensor kernel takes about a hundred tensors, and the stack of the norms too.
    assert counts[1] <= counts[0] + 8, counts
    assert counts[0] < 40


OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_offloaded_training_has_the_losses_of_training_on_the_gpu(
    precision: dict[str, Any], pin: bool
) -> None:
    losses = []
    for zero in ({}, {"offload_optimizer": {"device": "cpu", "pin_memory": pin}}):
        engine = build(settings(mesh={"device": ONE_DEVICE}, zero_optimization=zero, **precision))
        losses.append([engine.train_batch(data(engine, step)) for step in range(4)])
        if zero:
            assert engine.steps.optimizer_step is not None
            assert all(
                m.is_pinned() == (pin and ON_GPU)
                for m in engine.steps.optimizer_step.masters.named.values()
            )
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if precision else 1e-5)


@contextmanager
def pageable_copies_are_errors() -> Iterator[None]:
    """Make torch raise an error at a synchronization: at a read, or a copy of pageable memory."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@only_on_a_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("zero", [{}, OFFLOAD], ids=["on the GPU", "offload"])
def test_a_step_copies_nothing_to_or_from_pageable_memory(
    zero: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(settings(mesh={"device": ONE_DEVICE}, zero_optimization=zero))
    for step in range(2):
        engine.train_batch(data(engine, step))
    tolist = torch.Tensor.tolist

    def the_read_of_a_step(tensor: torch.Tensor) -> Any:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        numbers = tolist(tensor)
        torch.cuda.set_sync_debug_mode(mode)
        return numbers

    monkeypatch.setattr(torch.Tensor, "tolist", the_read_of_a_step)
    with pageable_copies_are_errors():
        engine.train_batch(data(engine, 2))
    assert engine.last_step is not None
    assert engine.last_step.grad_norm > 0


@only_on_a_gpu
def test_activations_on_the_host_free_device_memory() -> None:
    sizes = Sizes(
        hidden=512, layers=8, heads=8, seq=512, vocab=256, micro_batch=2, num_microbatches=12
    )
    peaks = []
    for moves in (False, True):
        engine = gpu_single.build(
            sizes,
            "none",
            torch.device(ONE_DEVICE),
            pipeline={"schedule": "gpipe"},
            bf16={"enabled": True},
            activation_checkpointing={"cpu_checkpointing": moves},
        )
        engine.train_batch()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.train_batch()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        engine.close()
    # Of the micro-batches in flight, at most three are on the device.
    assert peaks[1] < 0.5 * peaks[0], peaks


def test_a_background_save_neither_waits_nor_sees_the_next_step(tmp_path: Path) -> None:
    engine = test_staging.engine_of(mesh={"device": ONE_DEVICE})
    test_staging.train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="warm")
    engine.finish_saving()
    test_staging.train(engine, 2)
    assert engine.steps.optimizer_step is not None
    expected = copy.deepcopy(engine.steps.optimizer_step.state_dict()["parameters"])
    # The copies wait behind this on the device, and the next step behind the copies.
    occupy_the_device()
    engine.save_checkpoint(tmp_path, tag="saved")
    assert engine.steps.optimizer_step._copied is not None
    assert engine.steps.optimizer_step._copied.query() != ON_GPU
    losses = test_staging.train(engine, 3, 4)
    engine.finish_saving()

    resumed = test_staging.engine_of(mesh={"device": ONE_DEVICE})
    resumed.load_checkpoint(tmp_path, tag="saved")
    assert resumed.steps.optimizer_step is not None
    for name, entry in resumed.steps.optimizer_step.state_dict()["parameters"].items():
        for key, value in entry.items():
            assert torch.equal(value, expected[name][key]), (name, key)
    assert test_staging.train(resumed, 3, 4) == losses
