"""Attention with grouped queries uses a fused kernel on every device and in every dtype."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pipemega.config import load
from pipemega.models import attention as module
from pipemega.models.attention import causal_attention, takes_grouped_queries
from pipemega.planning.estimate import Request, estimate

HEADS, GROUPS, LENGTH, CHANNELS = 6, 2, 9, 8


def heads(seed: int, number: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, number, LENGTH, CHANNELS, dtype=torch.float64, generator=generator)
    return x.to(dtype).requires_grad_()


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute each head by itself."""
    mixed = []
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        scores = q[:, head] @ k[:, group].mT / CHANNELS**0.5
        future = torch.ones(LENGTH, LENGTH).triu(1).bool()
        mixed.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ v[:, group])
    return torch.stack(mixed, 1)


@pytest.mark.parametrize("fused_takes_groups", [True, False])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_grouped_attention_equals_the_formula(
    dtype: torch.dtype, error: float, fused_takes_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "takes_grouped_queries", lambda q: fused_takes_groups)
    inputs = [heads(i, n, dtype) for i, n in enumerate((HEADS, GROUPS, GROUPS))]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mixed, expected = causal_attention(*inputs), by_formula(*exact)
    assert mixed.dtype == dtype
    torch.testing.assert_close(mixed.double(), expected, rtol=error, atol=error)
    weights = torch.linspace(-1, 1, mixed.numel(), dtype=torch.float64).view_as(mixed)
    (mixed * weights.to(dtype)).sum().backward()
    (expected * weights).sum().backward()
    for x, reference in zip(inputs, exact, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), reference.grad, rtol=error, atol=error)


class Attentions(TorchFunctionMode):
    """Records the heads of q and k and `enable_gqa` of each call of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls.append((args[0].shape[1], args[1].shape[1], kwargs["enable_gqa"]))
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "channels", "architecture", "hip", "passed"),
    [
        (torch.bfloat16, 128, 9, None, (6, 2, True)),
        (torch.float16, 256, 8, None, (6, 2, True)),
        (torch.float32, 128, 9, None, (6, 6, False)),
        (torch.float64, 128, 9, None, (6, 6, False)),
        (torch.bfloat16, 288, 9, None, (6, 6, False)),
        (torch.float16, 64, 7, None, (6, 6, False)),  # before Ampere
        (torch.bfloat16, 64, 9, "6.4", (6, 6, False)),  # AMD
    ],
)
def test_on_cuda_keys_are_expanded_where_flash_attention_does_not_run(
    dtype: torch.dtype,
    channels: int,
    architecture: int,
    hip: str | None,
    passed: tuple[int, int, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = SimpleNamespace(major=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    with FakeTensorMode(), Attentions() as attentions:  # type: ignore[no-untyped-call]
        q = torch.empty(2, 6, 16, channels, dtype=dtype, device="cuda")
        k = torch.empty(2, 2, 16, channels, dtype=dtype, device="cuda")
        causal_attention(q, k, k)
        causal_attention(q, q, q)
    assert attentions.calls == [passed, (6, 6, False)]


def test_on_a_cpu_keys_are_not_expanded() -> None:
    with Attentions() as attentions:
        q = torch.empty(2, 6, 16, 8)
        assert takes_grouped_queries(q)
        causal_attention(q, q[:, :2], q[:, :2])
    assert attentions.calls == [(6, 2, True)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_plan_of_a_gpu_counts_no_scores_with_grouped_queries(dtype: str) -> None:
    """In fp32 the plan counted the scores [heads, sequence, sequence], as torch then kept them."""

    def held(length: int) -> int:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "mesh": {"device": "cuda"},
            "model": {
                "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
                "seq_length": length, "vocab_size": 64, "position_embedding_type": "rope",
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
        }  # fmt: skip
        return estimate(Request(load(config))).stages[0].held

    # The scores would make it quadratic.
    assert held(2048) == pytest.approx(2 * held(1024), rel=0.02)


@pytest.mark.parametrize("groups", [GROUPS, HEADS])
def test_attention_compiles_without_a_graph_break(groups: int) -> None:
    q, k, v = (heads(i, n, torch.float32) for i, n in enumerate((HEADS, groups, groups)))
    compiled = torch.compile(causal_attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), causal_attention(q, k, v))
