"""A description of a model needs no memory for its parameters."""

import torch
from torch import nn

from pipemega.hf.placeholders import allocate, parameters_on_meta


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.experts = nn.Parameter(torch.empty(size))
        self.linear = nn.Linear(2, 3)
        self.register_buffer("frequencies", torch.arange(3.0))


def test_a_parameter_larger_than_any_memory_can_be_described():
    """The experts of one layer of DeepSeek-V3 have 30 GB, and were allocated before the move."""
    with parameters_on_meta():
        layer = Layer(1 << 50)
    assert layer.experts.is_meta
    assert layer.linear.weight.is_meta


def test_buffers_keep_their_values_and_parameters_get_memory():
    with parameters_on_meta():
        layer = Layer(4)
    allocate(layer, "cpu")
    assert layer.frequencies.tolist() == [0.0, 1.0, 2.0]
    assert not layer.experts.is_meta
    assert not layer.linear.weight.is_meta
