"""The experts of a layer, and the layer in place of an MLP.

    x --> router --> Dispatch --> up, activation, down of each expert --> combine --> y
      `-> shared expert (all tokens, while the tokens are exchanged) ------------> +

The weights of all experts are one parameter [E, out, in]. The expert axis cuts its rows, the tensor
axis the channels between up and down; so experts of one rank are one grouped product.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.moe.dispatch import Dispatch
from pipemega.moe.router import Router
from pipemega.parameters import InitMethod, Shard, attach_shard
from pipemega.pipeline.split_backward import grouped_linear
from pipemega.tensor_parallel.collectives import (
    SEQUENCE_DIM,
    gather_from_tensor,
    scatter_to_tensor,
)
from pipemega.tensor_parallel.layers import block_ranges


class ExpertLinear(nn.Module):
    """One linear for each expert of this rank.

    Args:
        num_experts: E of all ranks.
        in_features: columns of each weight.
        out_features: rows of each weight; several sizes: blocks that are cut separately.
        expert, tensor: axes of the mesh.
        cut: "out": the tensor ranks have parts of the rows; "in": of the columns. Then each has a
            part of the sum, to which the caller adds the bias.
        bias: add a bias; with `cut` "in" each tensor rank has a slice of it.
        init_method: initializes the weight.

    Shape:
        rows [m, in (/ T)], sorted by expert  ->  [m, out (/ T)]
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: tuple[int, ...],
        *,
        expert: Axis,
        tensor: Axis,
        cut: str,
        bias: bool,
        init_method: InitMethod,
    ) -> None:
        super().__init__()
        local, out = num_experts // expert.size, sum(out_features)
        rows = None
        if expert.size > 1:
            rows = (expert.rank * local, (expert.rank + 1) * local)
        self._num_experts, self._cut = num_experts, cut
        by_rows = block_ranges(out_features, tensor)
        by_columns = block_ranges([in_features], tensor)
        shape = [local, out, in_features]
        shape[1 if cut == "out" else 2] //= tensor.size
        shard = Shard(
            (num_experts, out, in_features),
            dim=1 if cut == "out" else 2,
            ranges=by_rows if cut == "out" else by_columns,
            init_method=init_method,
            rows=rows,
            is_stacked=True,
        )
        self.weight = attach_shard(nn.Parameter(torch.full(shape, torch.nan)), shard)
        self.bias = None
        if bias:
            # Cut along the channels in both cases, so that no gradient is a part of a sum.
            shard = Shard((num_experts, out), dim=1, ranges=by_rows, rows=rows, is_stacked=True)
            zeros = torch.zeros(local, out // tensor.size)
            self.bias = attach_shard(nn.Parameter(zeros), shard)

    # Split backward replaces it.
    grouped_product = staticmethod(grouped_linear)

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        y: Tensor = self.grouped_product(rows, self.weight, sizes)
        if self.bias is None or self._cut == "in":
            return y
        bias = self.bias_of(sizes)
        assert bias is not None
        return y + bias

    def bias_of(self, sizes: list[int]) -> Tensor | None:
        """Return the bias of each row [m, out / T]; None without a bias."""
        if self.bias is None:
            return None
        counts = torch.tensor(sizes, device=self.bias.device)
        return self.bias.repeat_interleave(counts, dim=0, output_size=sum(sizes))

    def extra_repr(self) -> str:
        _, out, columns = self.weight.shape
        return f"{self.weight.shape[0]} of {self._num_experts} experts, in={columns}, out={out}"


class Experts(nn.Module):
    """down(activation(up(x))) of each expert.

    Args:
        num_experts, hidden_size, ffn_hidden_size: E, and the sizes of each expert.
        gated: up has two blocks, of which `activation` takes both: the gate first.
        activation: what up returns -> what down takes.
        up_init, down_init: initialize the weights.
        bias: add biases.
        expert, tensor: axes of the mesh.

    Attributes:
        used_share: (experts of a token, all experts); see `count_used_parameters`.

    Shape:
        rows [m, hidden], sorted by expert  ->  [m, hidden]: with several tensor ranks a part of the
        sum, without the bias
    """

    used_share: tuple[int, int]

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        gated: bool,
        activation: Callable[[Tensor], Tensor],
        up_init: InitMethod,
        down_init: InitMethod,
        bias: bool,
        expert: Axis,
        tensor: Axis,
    ) -> None:
        super().__init__()
        self._activation = activation
        size = (ffn_hidden_size,) * (2 if gated else 1)
        self.up = ExpertLinear(
            num_experts, hidden_size, size,
            expert=expert, tensor=tensor, cut="out", bias=bias, init_method=up_init,
        )  # fmt: skip
        self.down = ExpertLinear(
            num_experts, ffn_hidden_size, (hidden_size,),
            expert=expert, tensor=tensor, cut="in", bias=bias, init_method=down_init,
        )  # fmt: skip

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        y: Tensor = self.down(self._activation(self.up(rows, sizes)), sizes)
        return y


class MixtureOfExperts(nn.Module):
    """Sends each token to the experts that the router chooses, and adds a shared expert.

    Args:
        router, experts: the router, and the experts of this rank.
        shared: the shared expert, a module of x; None: there is none.
        shared_gate: a linear from x to one number, whose sigmoid multiplies the shared expert.
        expert, tensor: axes of the mesh.
        sequence_parallel: x is this rank's slice of the sequence.

    Shape:
        x [batch, sequence (/ T), hidden]; counted [batch, sequence]: whether a token counts for the
        balance of the experts, None for all  ->  as x
    """

    # The numbers of rows, by tolist(), which is no operation: CUDA graphs leave the layer out.
    reads_host = True

    def __init__(
        self,
        router: Router,
        experts: Experts,
        *,
        shared: nn.Module | None = None,
        shared_gate: nn.Module | None = None,
        expert: Axis,
        tensor: Axis,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self._num_experts = router.config.num_experts
        self._expert, self._tensor = expert, tensor
        self._sequence_parallel = sequence_parallel and tensor.size > 1
        self.router, self.experts = router, experts
        self.experts.used_share = router.config.topk, router.config.num_experts
        self.shared, self.shared_gate = shared, shared_gate

    def forward(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        whole = x
        if self._sequence_parallel:
            # All tensor ranks route all tokens, so each has the whole gradient.
            whole = gather_from_tensor(x, self._tensor, SEQUENCE_DIM)
        chosen, weights = self.router(whole, counted)
        tokens = whole.flatten(0, 1)
        dispatch = Dispatch(tokens, chosen, self._num_experts, self._expert, self._tensor)
        shared = None if self.shared is None else self.shared(x)
        if shared is not None and self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        sizes = dispatch.routes.sizes
        rows = self.experts(dispatch.arrived(), sizes)
        y = dispatch.combine(rows, weights, self.experts.down.bias_of(sizes)).view_as(whole)
        if self._sequence_parallel:
            y = scatter_to_tensor(y, self._tensor, SEQUENCE_DIM)
        return y if shared is None else y + shared
