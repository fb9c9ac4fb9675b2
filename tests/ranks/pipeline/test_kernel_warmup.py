"""The run of one micro-batch that loads kernels leaves nothing behind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipemega
from tests.ranks.nccl_like import LAZY
from tests.ranks.pool import RankPool


class Noisy(nn.Module):
    """Draws numbers, counts in a buffer and in an attribute, and changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        y: Tensor = self.norm(self.linear(nn.functional.dropout(x.mul_(2), 0.5)))
        return y


def train(schedule: str, warm_up: bool) -> dict[str, Any]:
    """Return what a run of partial and whole steps leaves on this rank."""
    torch.manual_seed(3)
    layers = [pipemega.LayerSpec(Noisy) for _ in range(4)]
    model = pipemega.PipelineModule(layers, loss_fn=nn.functional.mse_loss)
    generator = torch.Generator().manual_seed(1)
    data = [tuple(torch.randn(2, 4, generator=generator)) for _ in range(15)]
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "mesh": {"pipeline": 2, "device": "cpu"},
        "pipeline": {"schedule": schedule, "warm_up": warm_up},
        "training": {"epochs": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    engine, *_ = pipemega.initialize(config=config, model=model, training_data=data)
    losses = [engine.train_batch() for _ in range(4)]
    losses.append(engine.eval_batch(iter([(torch.ones(4, 4), torch.ones(4, 4))] * 2)))
    layers_here = [m for m in engine.module.modules() if isinstance(m, Noisy)]
    return {
        "losses": [float(loss) for loss in losses],
        "state": {k: v.tolist() for k, v in engine.module.state_dict().items()},
        "calls": [layer.calls for layer in layers_here],
        "next": torch.rand(2).tolist(),
    }


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_losses_parameters_buffers_and_generators_are_those_without_it(
    pool: RankPool, schedule: str
) -> None:
    """NCCL's order of messages on CPU ranks; the last step of an epoch is not full."""
    runs = {warm: pool.run(2, train, schedule, warm, backend=LAZY) for warm in (True, False)}
    for with_warmup, without in zip(runs[True], runs[False], strict=True):
        # A whole step, a step that is not full with its two micro-batches, an evaluation.
        more = zip(with_warmup.pop("calls"), without.pop("calls"), strict=True)
        assert {count - fewer for count, fewer in more} == {1 + 2 + 1}
        assert with_warmup == without


def test_gloo_needs_no_warmup(pool: RankPool) -> None:
    runs = [pool.run(2, train, "1f1b", warm) for warm in (True, False)]
    assert runs[0] == runs[1]
