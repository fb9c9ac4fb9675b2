"""Finds out whether a model returns the output of its head, a plain linear, as it is."""

from typing import Any

from torch import Tensor, nn


def head_outputs(description: Any, shell: nn.Module) -> list[Tensor]:
    """Return a list that takes what the head of `shell` returns; nothing if it is no plain linear.

    Args:
        description: a `ModelDescription`; its model has the head.
        shell: with stubs for all modules with parameters.
    """
    d, outputs = description, list[Tensor]()
    head = d.model.get_output_embeddings()
    name = next((name for name in d.owners if d.model.get_submodule(name) is head), None)

    def take(stub: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        # As a linear returns it: `contiguous()` of a model then does nothing.
        outputs.append(output.contiguous())
        return outputs[-1]

    if name is not None and type(head) is nn.Linear:
        shell.get_submodule(name).register_forward_hook(take)
    return outputs
