"""Calls that belong in a loop of torch or DeepSpeed are refused in a loop around `train_batch`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipemega
from pipemega import LayerSpec, PipelineModule
from pipemega.errors import ConfigError, PipelineError

CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
}


@pytest.fixture
def engine() -> Any:
    net = PipelineModule([LayerSpec(nn.Linear, 3, 2)], loss_fn=nn.functional.cross_entropy)
    data = [(torch.ones(3), index % 2) for index in range(8)]
    return pipemega.initialize(model=net, config=CONFIG, training_data=data)[0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda engine: engine.optimizer.step(), "optimizer.step() is called by train_batch()"),
        (lambda engine: engine.lr_scheduler.step(), "lr_scheduler.step() is called by train_batch"),
        (lambda engine: engine(torch.ones(2, 3)), "train_batch() does them"),
        (lambda engine: engine.backward(torch.ones(())), "train_batch() does them"),
        (lambda engine: engine.step(), "train_batch() does them"),
    ],
    ids=["optimizer.step", "lr_scheduler.step", "call", "backward", "step"],
)
def test_a_step_of_the_callers_loop_is_refused_and_changes_nothing(
    engine: Any, call: Callable[[Any], None], words: str
) -> None:
    engine.train_batch()
    before = [p.detach().clone() for p in engine.module.parameters()]
    rate = engine.lr_scheduler.get_last_lr()
    with pytest.raises(ConfigError) as refused:
        call(engine)
    assert words in str(refused.value)
    assert all(map(torch.equal, before, engine.module.parameters()))
    assert engine.lr_scheduler.get_last_lr() == rate
    engine.train_batch()
    assert engine.global_steps == 2


@pytest.mark.parametrize(
    ("section", "dtype", "words"),
    [
        ({"fp16": {"enabled": True}}, torch.float32, "cast the data, or set fp16.auto_cast"),
        ({}, torch.float64, "parameters are torch.float32 and its input is torch.float64: cast"),
    ],
    ids=["fp16", "double"],
)
def test_inputs_of_another_dtype_than_the_parameters_are_refused_with_a_remedy(
    section: Any, dtype: torch.dtype, words: str
) -> None:
    net = PipelineModule([LayerSpec(nn.Linear, 3, 2)], loss_fn=nn.functional.cross_entropy)
    data = [(torch.ones(3, dtype=dtype), 0)] * 4
    engine = pipemega.initialize(model=net, config=CONFIG | section, training_data=data)[0]
    with pytest.raises(PipelineError) as refused:
        engine.train_batch()
    assert words in str(refused.value)


class Buffered(nn.Linear):
    """Multiplies by a buffer, after the product or before it."""

    def __init__(self, *, before: bool) -> None:
        super().__init__(3, 3)
        self.before = before
        self.register_buffer("table", torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.table if self.before else x * self.table[0])


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([LayerSpec(Buffered, before=True)], "its buffer 'table' is torch.float32: cast the buf"),
        (
            [lambda x: x * torch.ones(3), LayerSpec(nn.Linear, 3, 3)],
            "its input is torch.float32: cast the output of the layer before, which may have a",
        ),
    ],
    ids=["own buffer", "buffer before"],
)
def test_a_buffer_of_another_dtype_is_named_and_not_the_data(layers: Any, words: str) -> None:
    """The advice was to cast the data, which were fp16 already."""
    net = PipelineModule(layers, loss_fn=nn.functional.cross_entropy)
    data = [(torch.ones(3, dtype=torch.float16), 0)] * 4
    config = CONFIG | {"fp16": {"enabled": True}}
    engine = pipemega.initialize(model=net, config=config, training_data=data)[0]
    with pytest.raises(PipelineError) as refused:
        engine.train_batch()
    assert words in str(refused.value)


def test_the_end_of_the_callers_iterator_says_how_to_continue(engine: Any) -> None:
    batches = iter([(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))] * 2)
    engine.train_batch(batches)
    with pytest.raises(StopIteration, match="no micro-batch left: end the loop"):
        engine.train_batch(batches)


def test_saving_without_a_folder_is_refused(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes a folder as save_dir, not None: give a path"):
        engine.save_checkpoint(None)
