"""Keys and values with fewer heads than tensor ranks: each rank computes the head it needs.

4 ranks, 8 heads of queries, 2 heads of keys      rank 0   q0 q1   k0
                                                  rank 1   q2 q3   k0
                                                  rank 2   q4 q5   k1
                                                  rank 3   q6 q7   k1
"""

import torch.nn.functional as F
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.parameters import Shard, attach_shard
from pipemega.tensor_parallel.collectives import copy_to_tensor


class OneHeadLinear(nn.Module):
    """The rows of one head of a linear; the weight is replicated, its gradient partial.

    Args:
        linear: the linear of all heads, on meta.
        groups: its heads; the tensor ranks are a multiple of it.
        copies_input: x is replicated; False: the caller has copied or gathered it.

    Attributes:
        output_rows: of the weight, which this rank computes.

    Shape:
        x [..., in], equal on all tensor ranks  ->  [..., head]
    """

    def __init__(self, linear: nn.Linear, groups: int, axis: Axis, copies_input: bool) -> None:
        super().__init__()
        self.axis, self.copies_input = axis, copies_input
        head = linear.out_features // groups
        start = axis.rank * groups // axis.size * head
        self.output_rows = slice(start, start + head)
        self.weight, self.bias = linear.weight, linear.bias
        for parameter in self.parameters():
            attach_shard(parameter, Shard(tuple(parameter.shape), partial_gradient=True))

    def forward(self, x: Tensor) -> Tensor:
        if self.copies_input:
            x = copy_to_tensor(x, self.axis)
        bias = None if self.bias is None else self.bias[self.output_rows]
        return F.linear(x, self.weight[self.output_rows], bias)
