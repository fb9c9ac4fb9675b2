"""Trains a small GPT on real ranks, and says how many bytes each of them came to hold."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipemega.assemble import initialize
from pipemega.config import load
from pipemega.models import GPTConfig, gpt
from pipemega.planning.meter import Meter

STEPS = 2


def held_bytes(config: Mapping[str, Any]) -> dict[str, int]:
    """Weights, gradients, optimizer state and masters of this rank, and the peak of all tensors.

    The peak is over all tensors that live at one time, from before the model is built: those of
    the transport and of the optimizer's step are among them. What kernels and gloo make and drop
    inside themselves is not.
    """
    settings = load(config)
    assert settings.model is not None
    vocab, length = settings.model.vocab_size, settings.model.seq_length
    assert isinstance(vocab, int)
    with Meter() as meter:
        engine, *_ = initialize(gpt(GPTConfig.of(settings, vocab)), settings)
        for step in range(STEPS):
            engine.train_batch(
                (tokens(step, m, engine.batch.micro_batch_size, length, vocab),) * 2
                for m in range(engine.batch.num_microbatches)
            )
    optimizer, step = engine.optimizer, engine._step
    assert optimizer is not None
    assert step is not None
    states = [v for state in optimizer.state.values() for v in state.values()]
    weights = [*engine.module.parameters(), *engine.module.buffers()]
    return {
        "weights": storage_bytes(weights),
        "gradients": storage_bytes(step.gradients.flats.values()),
        "masters": storage_bytes(
            target for name, target in step.targets.named.items() if name in step.targets.masters
        ),
        "optimizer": storage_bytes(v for v in states if isinstance(v, Tensor)),
        "peak": meter.peak,
    }


def tokens(step: int, microbatch: int, size: int, length: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randint(vocab, (size, length), generator=generator)


def storage_bytes(tensors: Any) -> int:
    """Of each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
