"""Top-level keys of the gradients: clipping, and the reduction over the data ranks."""

from typing import Literal

from pipemega.config.key_kinds import Section, honoured, ignored, refused
from pipemega.config.precision import Dtype
from pipemega.config.value_types import NotNegative, Positive


class GradientKeys(Section):
    """How gradients are reduced and clipped."""

    gradient_clipping: NotNegative = honoured(1.0, "Clip the global gradient norm to this; 0: off.")
    gradient_allreduce_op: Literal["mean", "sum"] = honoured(
        "mean", "Whether the reduction over the data ranks averages or sums the gradients."
    )
    prescale_gradients: bool = honoured(
        False, "Before the reduction, divide by the data size, not by `gradient_predivide_factor`."
    )
    gradient_predivide_factor: Positive = honoured(
        1.0, "Divide gradients by this before the reduction, and by (data size / this) after it."
    )
    communication_data_type: Dtype | None = honoured(
        None, "Dtype of gradients in the reduction; null: the dtype in which they are accumulated."
    )
    seq_parallel_communication_data_type: Dtype | None = ignored(
        "fp32",
        "DeepSpeed: dtype of the reductions over sequence-parallel ranks.",
        "these reductions use the dtype of the gradients, fp32 by default",
        agrees=["fp32"],
    )
    sparse_gradients: bool = refused(
        False,
        "DeepSpeed: send the gradients of embeddings as sparse tensors.",
        "gradients are stored in flat, dense buffers; remove the key",
    )
    disable_allgather: bool = ignored(
        False, "Broadcast parameters, do not all-gather them.", "parameters are always all-gathered"
    )
