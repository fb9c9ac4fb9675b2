"""FLOPs of a model, counted by running it unsharded on the meta device."""

from typing import Any

import torch

from pipemega.errors import PipemegaError
from pipemega.models.build_model import ModelContext, build_from, model_section, sample_from
from pipemega.pipeline.module import PipelineModule
from pipemega.profiling.meta_kernels import DeviceKernels
from pipemega.profiling.tensor_meter import TensorMeter

# Backward computes the gradients of both factors of each matrix product.
_BACKWARD = 2


def flops_per_token(context: ModelContext) -> float:
    """Return the FLOPs of forward and backward per token, without recomputation; 0: unknown.

    Args:
        context: on the meta device.
    """
    section = model_section(context.config)
    known, tokens = section.flops_per_token(context), section.sample_tokens()
    if known is not None or tokens is None:
        return known or 0.0
    return _counted_per_sample(context) / tokens


def flops_per_sample(context: ModelContext) -> float:
    """Return the FLOPs of forward and backward per sample, such as an image; 0: unknown."""
    tokens = model_section(context.config).sample_tokens()
    return _counted_per_sample(context) if tokens is None else tokens * flops_per_token(context)


def _counted_per_sample(context: ModelContext) -> float:
    try:
        inputs, _ = sample_from(context)
        forward = forward_flops(build_from(context).on_meta(), inputs)
    except (PipemegaError, RuntimeError, TypeError):
        return 0.0  # a layer reads values, which the meta device does not have
    return (1 + _BACKWARD) * forward / context.micro_batch_size


def forward_flops(net: PipelineModule, inputs: Any) -> float:
    """Return the FLOPs of one forward of `net` for `inputs`; both are on the meta device."""
    x, total = inputs, 0.0
    measured: dict[object, tuple[float, Any]] = {}  # by the key of equal layers
    # The fused kernel of the CPU takes all sizes and dtypes of heads, without dropout.
    with torch.no_grad(), DeviceKernels("cpu"):
        for spec, layer in zip(net.specs, net.meta_layers, strict=True):
            key = spec.equality_key
            if key is None or key not in measured:
                layer.eval()
                with TensorMeter() as meter:
                    x = layer(x) if spec.forward_fn is None else spec.forward_fn(layer, x)
                measured[key] = meter.flops, x
            flops, x = measured[key]
            total += flops
    return total
