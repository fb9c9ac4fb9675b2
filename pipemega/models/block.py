"""The block of a GPT: norms, attention and MLP."""

from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.distributed.mesh import Axis
from pipemega.kernels import Kernels
from pipemega.models.attention import Attention
from pipemega.models.gpt_config import GPTConfig
from pipemega.models.gpt_linear import column_parallel, row_parallel
from pipemega.parameters import mark_partial_gradient
from pipemega.pipeline.recompute import recompute
from pipemega.tensor_parallel import Dropout

Hidden = Tensor | tuple[Tensor, ...]
"""hidden, (hidden, positions), or (hidden, positions, documents); see `models.gpt`."""


def gpt_norm(config: GPTConfig, kernels: Kernels) -> nn.Module:
    """Return the norm that the config selects, over the hidden size."""
    norm = kernels.rms_norm if config.normalization == "RMSNorm" else kernels.layer_norm
    module: nn.Module = norm(config.hidden_size, eps=config.norm_epsilon)
    return mark_partial_gradient(module) if config.sequence_parallel else module


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Shape:
        hidden [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: GPTConfig, kernels: Kernels, axis: Axis) -> None:
        super().__init__()
        c = config
        self.attention_norm = gpt_norm(c, kernels)
        self.attention = Attention(c, axis)
        self.mlp_norm = gpt_norm(c, kernels)
        self.mlp = MLP(c, axis)
        self.dropout = Dropout(c.hidden_dropout, axis=axis, sequence_parallel=c.sequence_parallel)
        self._recompute = c.recompute == "full"
        self._attention_dropout = c.attention_dropout

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, *per_token = inputs if isinstance(inputs, tuple) else (inputs,)
        if self._recompute:
            restore_rng = self.training and self._uses_rng()
            hidden = recompute(self._block, hidden, *per_token, restore_rng=restore_rng)
        else:
            hidden = self._block(hidden, *per_token)
        return (hidden, *per_token) if per_token else hidden

    def _uses_rng(self) -> bool:
        # Adapters bring dropout of their own.
        dropouts = (getattr(module, "p", 0.0) for module in self.modules())
        return self._attention_dropout > 0 or any(p > 0 for p in dropouts)

    def _block(self, x: Tensor, *per_token: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), *per_token))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(gelu(up(x))), or down(silu(gate(x)) * up(x)) with SwiGLU.

    Shape:
        x [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: GPTConfig, axis: Axis) -> None:
        super().__init__()
        c = config
        self._swiglu = c.swiglu
        size = c.ffn_hidden_size
        self.up = column_parallel(c, (size, size) if c.swiglu else size, axis, c.add_bias_linear)
        self.down = row_parallel(c, size, axis)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)  # [batch, sequence, (2) ffn / T]
        if self._swiglu:
            gate, up = up.chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]
        return self.down(F.gelu(up))  # type: ignore[no-any-return]
