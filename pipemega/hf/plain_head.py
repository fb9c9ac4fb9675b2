"""Finds out whether a model returns the output of its head, a plain linear, as it is."""

from typing import Any

from torch import Tensor, nn


def head_outputs(description: Any, shell: nn.Module) -> list[tuple[Tensor, int]]:
    """Return a list that takes what the head of `shell` returns, with its version.

    It remains empty if the head is no plain linear.

    Args:
        description: a `ModelDescription`; its model has the head.
        shell: with stubs for all modules with parameters.
    """
    d, outputs = description, list[tuple[Tensor, int]]()
    head = d.model.get_output_embeddings()
    name = next((name for name in d.owners if d.model.get_submodule(name) is head), None)

    def take(stub: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        # As a linear returns it: `contiguous()` of a model then does nothing.
        output = output.contiguous()
        outputs.append((output, output._version))
        return output

    if name is not None and type(head) is nn.Linear:
        shell.get_submodule(name).register_forward_hook(take)
    return outputs


def is_last_of(outputs: list[tuple[Tensor, int]], output: Any) -> bool:
    """Return whether a model returned what its head returned last, not changed in place."""
    if not outputs:
        return False
    from_head, version = outputs[-1]
    return output is from_head and output._version == version
