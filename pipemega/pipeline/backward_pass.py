"""Backward from the outputs of a stage, without the checks of `torch.autograd.backward` in Python.

They compare each gradient with its output through `torch.fx.experimental.symbolic_shapes`, which
imports sympy: 0.3 s in the first backward of every process. The engine checks the shapes too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph


def run_backward(outputs: Sequence[Any], gradients: Sequence[Tensor]) -> None:
    """Accumulate the gradients of the leaves, from one gradient for each output.

    Args:
        outputs: tensors or `GradientEdge`s.

    Raises:
        RuntimeError: a gradient has another shape than its output.
    """
    # torch's own entry, which passes the context variables on to the engine's threads.
    run = getattr(graph, "_engine_run_backward", None)
    if run is None:
        torch.autograd.backward(outputs, gradients)
        return
    run(
        tuple(outputs),
        tuple(gradients),
        False,  # retain_graph
        False,  # create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
