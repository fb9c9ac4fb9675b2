"""Top-level keys of the gradients: clipping, and the reduction over the data ranks."""

from collections.abc import Mapping
from typing import Any, Literal

from pipemega.config.key_kinds import Section, honoured, ignored, refused, replaced
from pipemega.config.precision import Dtype
from pipemega.config.value_types import NotNegative, Positive


class GradientKeys(Section):
    """How gradients are reduced and clipped."""

    gradient_clipping: NotNegative = honoured(1.0, "Clip the global gradient norm to this; 0: off.")
    gradient_allreduce_op: Literal["mean", "sum"] = honoured(
        "mean", "Whether the result of the reduction over the data ranks is the mean or the sum."
    )
    prescale_gradients: bool = honoured(
        False,
        "Before the reduction, divide by the number of data ranks, not by "
        "`gradient_predivide_factor`.",
    )
    gradient_predivide_factor: Positive = honoured(
        1.0,
        "Divide gradients by this before the reduction; a second factor after it gives the mean or "
        "the sum.",
    )
    communication_data_type: Dtype | None = honoured(
        None, "Dtype of gradients in the reduction; null: the dtype in which they are accumulated."
    )
    fp32_allreduce: bool = replaced(
        'GPT-NeoX: true is `communication_data_type` "fp32"; false has no effect.',
        "communication_data_type",
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


def with_communication_dtype(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace `fp32_allreduce` by `communication_data_type`, unless this key contradicts it."""
    given, dtype = raw.get("fp32_allreduce"), raw.get("communication_data_type")
    if not isinstance(given, bool) or (given and dtype not in (None, "auto", "fp32")):
        return raw
    rest = {key: value for key, value in raw.items() if key != "fp32_allreduce"}
    return {**rest, "communication_data_type": "fp32"} if given else rest
