"""Sequence parallelism copies no tensor of the size of the hidden states of a micro-batch."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipemega.distributed.mesh import Axis
from pipemega.kernels import Kernels
from pipemega.layer_costs.tensor_meter import DeviceKernels
from pipemega.models.gpt import GPTConfig
from pipemega.models.transformer_block import Block
from pipemega.tensor_parallel import collectives
from pipemega.tensor_parallel.collectives import (
    gather_from_tensor,
    start_all_gather,
    start_reduce_scatter,
)

_aten = torch.ops.aten
COPIES = {_aten.clone.default, _aten.copy_.default, _aten._to_copy.default, _aten.cat.default}
AXIS = Axis("tensor", tuple(range(8)), 1)
LENGTH, HIDDEN = 2048, 512


class LargeCopies(TorchDispatchMode):
    """Counts the copies of tensors with at least `numel` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._numel = numel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COPIES and result.numel() >= self._numel:
            self.counts[str(func)] += 1
        return result


def copies_of_a_block(batch: int) -> int:
    """Return the number of copies of [batch, sequence, hidden] in forward and backward."""
    config = GPTConfig(
        vocab_size=64, seq_length=LENGTH, num_layers=1, hidden_size=HIDDEN,
        num_attention_heads=8, ffn_hidden_size=4 * HIDDEN, num_query_groups=8, kv_channels=64,
        position_embedding_type="rope", attention_dropout=0.0, hidden_dropout=0.0,
        sequence_parallel=True,
    )  # fmt: skip
    with torch.device("meta"):
        block = Block(config, Kernels.detect("cpu"), AXIS).bfloat16()
        x = torch.empty(batch, LENGTH // 8, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    # Without the kernels of a GPU the attention would hold its scores.
    with DeviceKernels("cuda"), LargeCopies(batch * LENGTH * HIDDEN) as copies:
        y = block(x)
        assert isinstance(y, torch.Tensor)
        y.backward(torch.empty_like(y))
    return copies.counts.total()


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_block_copies_no_hidden_states(batch: int) -> None:
    assert copies_of_a_block(batch) == 0


def test_copies_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the split, each of the ten collectives of a block copies the micro-batch."""
    monkeypatch.setattr(collectives, "_pieces", lambda *_: 0)
    assert copies_of_a_block(1) == 0
    assert copies_of_a_block(4) == 10


def test_small_and_many_parts_are_one_collective() -> None:
    def copies(*shape: int, start: Any = start_all_gather, dim: int = 1) -> int:
        x = torch.empty(shape, device="meta")
        with LargeCopies(x.numel()) as found:
            start(x, AXIS, dim)()
        return found.counts.total()

    assert copies(2, 16, 64) == 1  # 32 KiB for each sample
    assert copies(2, 64, 512) == 0  # 1 MiB
    assert copies(65, 64, 512) == 1
    assert copies(2, 64, 64, start=start_reduce_scatter) == 1  # 16 KiB
    assert copies(2, 512, 512, start=start_reduce_scatter) == 0
    logits = torch.empty(2, 256, 4096, device="meta")
    with LargeCopies(logits.numel()) as found:
        gather_from_tensor(logits, AXIS)
    assert found.counts.total() == 1
