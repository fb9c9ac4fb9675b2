"""The block of a transformer: norms, attention and MLP."""

from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.distributed.mesh import Axis
from pipemega.kernels import Kernels
from pipemega.models.attention import Attention
from pipemega.models.block_config import BlockConfig
from pipemega.models.block_linear import column_parallel, row_parallel
from pipemega.models.block_norm import hidden_norm
from pipemega.tensor_parallel import Dropout

Hidden = Tensor | tuple[Tensor, ...]
"""hidden, (hidden, positions), or (hidden, positions, documents); see `models.gpt`."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Shape:
        hidden [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: BlockConfig, kernels: Kernels, axis: Axis) -> None:
        super().__init__()
        c = config
        self.attention_norm = hidden_norm(c, kernels)
        self.attention = Attention(c, kernels, axis)
        self.mlp_norm = hidden_norm(c, kernels)
        self.mlp = MLP(c, axis)
        self.dropout: nn.Module = Dropout(
            c.hidden_dropout,
            axis=axis,
            sequence_parallel=c.sequence_parallel,
            padded_from=c.padded_from,
        )

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, *per_token = inputs if isinstance(inputs, tuple) else (inputs,)
        # No name holds the output of the attention while the MLP runs.
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), *per_token))
        hidden = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return (hidden, *per_token) if per_token else hidden


class MLP(nn.Module):
    """down(gelu(up(x))); down(relu(up(x))²); or with SwiGLU down(silu(gate(x)) * up(x)).

    Shape:
        x [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: BlockConfig, axis: Axis) -> None:
        super().__init__()
        c = config
        self._swiglu, self._squared_relu = c.swiglu, c.squared_relu
        size = c.ffn_hidden_size
        self.up = column_parallel(c, (size, size) if c.swiglu else size, axis, c.add_bias_linear)
        self.down = row_parallel(c, size, axis)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)  # [batch, sequence, (2) ffn / T]
        if self._swiglu:
            gate, up = up.chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]
        activated = F.relu(up).square() if self._squared_relu else F.gelu(up)
        return self.down(activated)  # type: ignore[no-any-return]
