"""The norms of a transformer, of the type that its config selects."""

from torch import nn

from pipemega.distributed.mesh import Axis
from pipemega.kernels import Kernels
from pipemega.models.block_config import BlockConfig
from pipemega.parameters import mark_partial_gradient


def hidden_norm(config: BlockConfig, kernels: Kernels) -> nn.Module:
    """Return a norm over the hidden size.

    Shape:
        [batch, sequence (/ T), hidden]  ->  the same
    """
    module = _norm(config, kernels, config.hidden_size)
    return mark_partial_gradient(module) if config.sequence_parallel else module


def head_norm(config: BlockConfig, kernels: Kernels, axis: Axis) -> nn.Module:
    """Return a norm over the channels of each head; all heads share its parameters.

    Shape:
        [batch, sequence, heads / T, head]  ->  the same
    """
    module = _norm(config, kernels, config.kv_channels)
    # Each tensor rank computes the gradient of its own heads.
    return mark_partial_gradient(module) if axis.size > 1 else module


def _norm(config: BlockConfig, kernels: Kernels, size: int) -> nn.Module:
    norm = kernels.rms_norm if config.normalization == "RMSNorm" else kernels.layer_norm
    return norm(size, eps=config.norm_epsilon)
