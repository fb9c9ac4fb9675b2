"""The linears of a transformer block, sharded over the tensor ranks."""

import math

from pipemega.distributed.mesh import Axis
from pipemega.models.block_config import BlockConfig
from pipemega.parameters import normal
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def column_parallel(
    c: BlockConfig, out_features: int | tuple[int, ...], axis: Axis, bias: bool
) -> ColumnParallelLinear:
    """Return the linear hidden -> out_features, whose output features are sharded over `axis`."""
    return ColumnParallelLinear(
        c.hidden_size,
        out_features,
        axis=axis,
        bias=bias,
        sequence_parallel=c.sequence_parallel,
        init_method=normal(c.init_method_std),
    )


def row_parallel(c: BlockConfig, in_features: int, axis: Axis) -> RowParallelLinear:
    """Return the linear in_features -> hidden, whose input features are sharded over `axis`."""
    return RowParallelLinear(
        in_features,
        c.hidden_size,
        axis=axis,
        bias=c.add_bias_linear,
        sequence_parallel=c.sequence_parallel,
        # As in GPT-2: the residual stream is a sum of 2 L outputs.
        init_method=normal(c.init_method_std / math.sqrt(2 * c.num_layers)),
    )
