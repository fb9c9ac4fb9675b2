"""An engine that its caller drops frees its memory.

On a GPU the weights and gradients of each former bf16 engine of a process stayed allocated: torch's
collector of garbage does not see a cycle through a hook of a parameter.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.distributed.mesh import Mesh
from tests.ranks.small_models import squared_error

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "split backward": {"bf16": {"enabled": True}, "pipeline": {"schedule": "zb-h1"}},
    "ZeRO": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "overlap_comm": True}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_dropped_engine_frees_its_weights_masters_and_gradients(case: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **CASES[case],
    }
    net = PipelineModule([LayerSpec(nn.Linear, 4, 4), torch.tanh], squared_error)
    engine = initialize(net, config, mesh=Mesh.single("cpu"))[0]
    pair = torch.ones(2, 4), torch.zeros(2, 4)
    engine.train_batch(iter([pair, pair]))
    assert engine.steps.optimizer_step is not None
    held = [
        *engine.module.parameters(),
        *engine.steps.optimizer_step.masters.named.values(),
        *engine.steps.optimizer_step.gradients.flats.values(),
    ]
    alive = [weakref.ref(tensor) for tensor in held]
    del engine, held
    gc.collect()
    assert [tensor for reference in alive if (tensor := reference()) is not None] == []
