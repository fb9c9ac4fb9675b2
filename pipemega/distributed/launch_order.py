"""Whether a GPU starts the kernels of several streams in the order in which they were launched."""

import os

import torch

_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"

# From this compute capability on Megatron-LM does not require the variable (Blackwell).
_ORDERED_CAPABILITY = 10


def launch_order_advice(device: torch.device, tensor_ranks: int) -> str | None:
    """Return how to make tensor-parallel communication overlap with computation; None if it does.

    In backward the all-reduce of an input gradient is launched just before the matrix product of
    the weight gradient, on another stream. If the product is started first, it takes all
    multiprocessors, and the all-reduce runs after it. With one queue between host and GPU, kernels
    start in the order of their launch. CUDA reads the number of queues when a process first uses
    the GPU, so it has to be set before.

    Source: Megatron-LM requires the same setting for tensor parallelism before Blackwell.
    """
    if device.type != "cuda" or tensor_ranks == 1 or torch.version.hip is not None:
        return None
    value = os.environ.get(_VARIABLE)
    if value == "1" or torch.cuda.get_device_capability(device)[0] >= _ORDERED_CAPABILITY:
        return None
    return (
        f"{_VARIABLE} is {value or 'not set'}, and mesh.tensor is {tensor_ranks}: on this GPU the "
        "all-reduce of an input gradient may start only after the weight gradient that it should "
        f"overlap with. Start the job with {_VARIABLE}=1; this changes the speed, not the results"
    )
