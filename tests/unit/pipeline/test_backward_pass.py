"""`run_backward` computes what `torch.autograd.backward` does."""

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from pipemega.pipeline.executor import run_backward


def test_gradients_are_accumulated_from_tensors_and_edges() -> None:
    x = torch.arange(3.0, requires_grad=True)
    a, b = x * 2, x * x
    run_backward([a, get_gradient_edge(b)], [torch.ones(3), torch.full((3,), 10.0)])
    assert torch.equal(x.grad, 2 + 20 * x.detach())


def test_a_gradient_of_another_shape_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        run_backward([x * 2], [torch.ones(4)])
