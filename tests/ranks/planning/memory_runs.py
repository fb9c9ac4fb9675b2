"""Trains a small GPT on real ranks and measures the memory of each."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipemega.config import load
from pipemega.distributed.host_memory import HostMemory
from pipemega.engine.initialize import initialize
from pipemega.layer_costs.tensor_meter import TensorMeter, unmetered
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.spec import LayerSpec
from tests.ranks.training_runs import offload_on_cpus

STEPS = 2


def held_bytes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of weights, gradients, optimizer state and masters, and the peak of all
    tensors.

    The peak includes all tensors since before the model was built, also those of the transport and
    of the optimizer step, but not the temporary memory inside kernels and gloo.
    """
    settings = load(config)
    assert settings.model is not None
    vocab, length = settings.model.vocab_size, settings.model.seq_length
    assert isinstance(vocab, int)
    with offload_on_cpus(), TensorMeter() as meter, uncounted_host_memory(meter):
        engine, *_ = initialize(gpt(GPTConfig.of(settings, vocab)), settings)
        for step in range(STEPS):
            engine.train_batch(
                (tokens(step, m, engine.batch.micro_batch_size, length, vocab),) * 2
                for m in range(engine.batch.num_microbatches)
            )
    optimizer, step = engine.optimizer, engine.steps.optimizer_step
    assert optimizer is not None
    assert step is not None
    states = [v for state in optimizer.state.values() for v in state.values()]
    weights = [*engine.module.parameters(), *engine.module.buffers()]
    return {
        "weights": storage_bytes(weights),
        "gradients": storage_bytes(step.gradients.flats.values()),
        "masters": storage_bytes(step.masters.named[name] for name in step.masters.saved_masters),
        "optimizer": storage_bytes(v for v in states if isinstance(v, Tensor)),
        "peak": meter.peak,
    }


@contextmanager
def uncounted_host_memory(meter: TensorMeter) -> Iterator[None]:
    """Let `HostMemory` allocate memory that does not count, as that of a GPU's host."""

    def empty(_: HostMemory, *shape: int, dtype: torch.dtype) -> Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        with unmetered():
            memory = torch.from_numpy(numpy.empty(nbytes, numpy.uint8))
        meter._track(memory.untyped_storage(), counted=False)
        return memory.view(dtype).view(shape)

    with mock.patch.object(HostMemory, "empty", empty):
        yield


def linears_peak(schedule: str, with_data: bool) -> int:
    """Return the peak of all tensors of a rank that trains linears.

    Args:
        with_data: the sizes of a micro-batch are known before the run.
    """
    width, rows, count = 32, 512, 8
    data = TensorDataset(torch.randn(rows * count, width), torch.randn(rows * count, width))
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": count,
        "mesh": {"pipeline": 2, "device": "cpu"},
        "pipeline": {"schedule": schedule, "partition": "uniform"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    with TensorMeter() as meter:
        net = PipelineModule(
            [LayerSpec(nn.Linear, width, width) for _ in range(16)], nn.functional.mse_loss
        )
        engine, *_ = initialize(net, load(config), training_data=data if with_data else None)
        for _ in range(STEPS):
            batches = (data[m * rows : (m + 1) * rows] for m in range(count))
            engine.train_batch(None if with_data else batches)
    return meter.peak


def tokens(step: int, microbatch: int, size: int, length: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randint(vocab, (size, length), generator=generator)


def storage_bytes(tensors: Any) -> int:
    """Return the bytes of the storages, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
