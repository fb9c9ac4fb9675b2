"""Top-level keys about gradients: clipping, and the reduction over data ranks.  Floor 1."""

from typing import Literal

from pipemega.config.keys import NotNegative, Positive, Section, honoured, ignored, refused
from pipemega.config.precision import Dtype

_SUMS = "sums over the sequence's slices are made in the dtype of the gradients, fp32 by default"


class GradientKeys(Section):
    """How gradients are reduced and clipped."""

    gradient_clipping: NotNegative = honoured(
        1.0, "Largest global norm of the gradients, over all ranks; 0: no clipping."
    )
    gradient_allreduce_op: Literal["mean", "sum"] = honoured(
        "mean", "Gradients of the data ranks are averaged, or only added up."
    )
    prescale_gradients: bool = honoured(
        False, "Divide by the data ranks before the reduction, in part or in whole."
    )
    gradient_predivide_factor: Positive = honoured(
        1.0, "With `prescale_gradients`: the part of the division that comes before."
    )
    communication_data_type: Dtype | None = honoured(
        None, "Dtype in which gradients cross the network; null: the one they are added up in."
    )
    seq_parallel_communication_data_type: Dtype | None = ignored(
        "fp32",
        "DeepSpeed: dtype of the sums over the ranks of a sequence.",
        _SUMS,
        agrees=["fp32"],
    )
    sparse_gradients: bool = refused(
        False,
        "DeepSpeed: send the gradients of embeddings as sparse tensors.",
        "gradients lie in flat, dense buffers; remove the key",
    )
    disable_allgather: bool = ignored(
        False,
        "DeepSpeed: broadcast in place of all-gather after a ZeRO step.",
        "there is no choice between the two here",
    )
