"""Makes the meta device use the kernels of the real device.

For some functions torch chooses the kernel by device, and the kernels save different tensors for
backward. For meta tensors torch chooses the unfused version, which saves more:

    function           on the meta device              here
    attention          saves scores [seq, seq]         fused: saves queries, keys, values, output
    dropout            saves a mask, dtype of x        CUDA: saves a mask of bytes
    RMSNorm            saves an fp32 copy of x         CUDA: saves x and one number per row

`Tensor.is_cuda` is that of the real device, so that a model that chooses by it chooses as in a run.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

DeviceType = Literal["cpu", "cuda"]

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class DeviceKernels(TorchFunctionMode):
    """Context in which meta tensors use the kernels of `device`.

    The choice is that of torch 2.13: https://github.com/pytorch/pytorch,
    aten/src/ATen/native/transformers/{sdp_utils_cpp.cpp,cuda/sdp_utils.cpp}.
    """

    def __init__(self, device: DeviceType) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func == _IS_CUDA:
                return self._device == "cuda"
            if func is F.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
            if func is F.dropout and self._device == "cuda":
                return _dropout(*args, **kwargs)
            if func is F.rms_norm and self._device == "cuda":
                return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        grouped = enable_gqa and key.shape[1] != query.shape[1]
        # Flash attention needs values of the size of the queries.
        is_flash = attn_mask is None and value.shape[-1] == query.shape[-1]
        if is_flash and self._device == "cpu" and dropout_p == 0:
            flash = _aten._scaled_dot_product_flash_attention_for_cpu
            return _first(flash(query, key, value, 0.0, is_causal, scale=scale))
        if is_flash and self._device == "cuda" and query.dtype in _HALVES:
            flash = _aten._scaled_dot_product_flash_attention
            return _first(flash(query, key, value, dropout_p, is_causal, scale=scale))
        if self._device == "cuda" and query.dtype != torch.float64 and not grouped:
            efficient = _aten._scaled_dot_product_efficient_attention
            return _first(
                efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
            )
        # The real device uses the unfused attention here too, which saves the scores.
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _first(results: Sequence[Any]) -> Tensor:
    result: Tensor = results[0]
    return result


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1:
        return F.dropout(x, p, training, inplace)
    return _first(torch.native_dropout(x, p, True))


def _rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is not None and weight.dtype != x.dtype:
        return F.rms_norm(x, list(normalized_shape), weight, eps)
    y: Tensor = _FusedRMSNorm.apply(x, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return y


class _FusedRMSNorm(torch.autograd.Function):
    """Shapes of CUDA's fused RMSNorm, which torch does not offer for meta tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = x.shape[: x.dim() - dims]
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None
