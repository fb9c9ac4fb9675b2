"""Initial weights of a ViT.

            weights                                    biases             positions   head
    jax     patches: LeCun normal; blocks: Xavier      patches: 0         N(0, 0.02)  0
            uniform                                    blocks: N(0, 1e-6)
    torch   U(-1/sqrt(in), 1/sqrt(in))                 the same           0           the same

where `in` is the number of inputs of an output. The class token starts at 0.

Sources: google-research/vision_transformer (jax); torch's `nn.Linear` and `nn.Conv2d` (torch).
"""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from pipemega.parameters import InitMethod, attach_shard, normal, shard_of
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear

Init = Literal["torch", "jax"]

# Standard deviation of a normal distribution that is cut off at 2 standard deviations.
_TRUNCATED_STD = 0.87962566103423978


Weights = nn.Conv2d | nn.Linear | ColumnParallelLinear | RowParallelLinear


def initialize_patches(layer: Weights, init: Init) -> None:
    """Set the init methods of the patch embedding."""
    fan_in = _fan_in(layer)
    if init == "jax":
        _set(layer, _truncated_normal(1 / math.sqrt(fan_in)), zero)
    else:
        _initialize_as_torch(layer)


def initialize_linear(layer: Weights, init: Init, blocks: int = 1) -> None:
    """Set the init methods of a linear layer of a block.

    Args:
        blocks: linear layers whose outputs it stacks: query, key and value.
    """
    if init == "jax":
        fan_out, fan_in = shard_of(layer.weight).shape
        bound = math.sqrt(6 / (fan_in + fan_out / blocks))
        _set(layer, uniform(bound), normal(1e-6))
    else:
        _initialize_as_torch(layer)


def initialize_head(layer: Weights, init: Init) -> None:
    """Set the init methods of the head."""
    if init == "jax":
        _set(layer, zero, zero)
    else:
        _initialize_as_torch(layer)


def positions_method(init: Init) -> InitMethod:
    """Return the init method of the position embeddings."""
    return normal(0.02) if init == "jax" else zero


def zero(tensor: Tensor, generator: torch.Generator) -> object:
    """Fill with 0."""
    return tensor.zero_()


def uniform(bound: float) -> InitMethod:
    """Return an initializer with a uniform distribution from -bound to bound."""
    return lambda tensor, generator: tensor.uniform_(-bound, bound, generator=generator)


def _truncated_normal(std: float) -> InitMethod:
    full = std / _TRUNCATED_STD

    def fill(tensor: Tensor, generator: torch.Generator) -> object:
        return nn.init.trunc_normal_(tensor, 0.0, full, -2 * full, 2 * full, generator=generator)

    return fill


def _initialize_as_torch(layer: Weights) -> None:
    method = uniform(1 / math.sqrt(_fan_in(layer)))
    _set(layer, method, method)


def _fan_in(layer: Weights) -> int:
    return math.prod(shard_of(layer.weight).shape[1:])


def _set(layer: Weights, weight: InitMethod, bias: InitMethod) -> None:
    for parameter, method in ((layer.weight, weight), (layer.bias, bias)):
        if parameter is not None:
            set_init_method(parameter, method)


def set_init_method(parameter: Tensor, method: InitMethod) -> None:
    """Let `initialize_parameters` fill the parameter by `method`."""
    assert isinstance(parameter, nn.Parameter)
    attach_shard(parameter, replace(shard_of(parameter), init_method=method))
