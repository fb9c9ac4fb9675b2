"""Packed documents by flex_attention: the results of a mask, without the mask of all pairs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from pipemega.distributed.mesh import Axis
from pipemega.kernels import Kernels
from pipemega.layer_costs.tensor_meter import DeviceKernels, TensorMeter
from pipemega.models import attention, transformer_block
from pipemega.models.gpt import GPTConfig
from pipemega.models.transformer_block import Block
from pipemega.parameters import initialize_parameters

HIDDEN, HEADS, LENGTH = 64, 4, 300


def block(**changes: Any) -> Block:
    config = GPTConfig(
        vocab_size=64, seq_length=LENGTH, num_layers=1, hidden_size=HIDDEN, ffn_hidden_size=64,
        num_attention_heads=HEADS, num_query_groups=2, kv_channels=HIDDEN // HEADS,
        position_embedding_type="rope",
        **{"attention_dropout": 0.0, "hidden_dropout": 0.0} | changes,
    )  # fmt: skip
    made = Block(config, Kernels.detect("cpu"), Axis("tensor", (0,), 0)).double()
    initialize_parameters(made, "", seed=1)
    return made


def inputs(batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden, positions and documents: short ones, one of three blocks, and padding."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, LENGTH, HIDDEN, dtype=torch.float64, generator=generator)
    starts = torch.rand(batch, LENGTH, generator=generator) < 0.05
    starts[-1] = False
    documents = starts.cumsum(-1)
    documents[0, 280:] = -1
    positions = torch.arange(LENGTH).expand(batch, -1)
    return hidden, positions, documents


def results(layer: Any, batch: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Return the output and all gradients."""
    hidden = batch[0].clone().requires_grad_()
    y, *_ = layer((hidden, *batch[1:]))
    gradients = torch.autograd.grad(y.square().sum(), [hidden, *layer.parameters()])
    return [y, *gradients]


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the CPU take block masks; return those that it gets.

    torch's backward on the CPU is right, but refused, because it stores the scores.
    """
    got: list[Any] = []

    def noted(*args: Any, block_mask: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            got.append(block_mask)
        return torch_flex.flex_attention(*args, block_mask=block_mask, **options)

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_warn_once", lambda **_: None, raising=False)
    monkeypatch.setattr(transformer_block, "takes_block_mask", lambda q: True)
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: noted)
    return got


@pytest.mark.filterwarnings("ignore")  # torch's eager flex_attention
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_flex_attention_equals_the_mask(flex: list[Any], recompute: str) -> None:
    batch = inputs()
    expected = results(block(document_attention="mask", recompute=recompute), batch)
    assert not flex
    found = results(block(recompute=recompute), batch)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    # The recomputation finds the same mask again.
    assert len(flex) == (2 if recompute == "selective" else 1)
    assert all(mask is flex[0] for mask in flex)


def test_blocks_of_other_documents_are_left_out(flex: list[Any]) -> None:
    documents = torch.zeros(1, 512, dtype=torch.long)
    documents[0, 128:384], documents[0, 384:] = 1, 2
    mask = attention._block_mask(documents)
    # Each block sees itself in part; of the earlier ones, block 2 sees block 1 as a whole.
    assert mask.kv_num_blocks.flatten().tolist() == [1, 1, 1, 1]
    assert mask.kv_indices[0, 0, :, 0].tolist() == [0, 1, 2, 3]
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 0, 1, 0]
    assert mask.full_kv_indices[0, 0, 2, 0] == 1


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # torch's compiler
def test_a_compiled_block_contains_flex_attention(flex: list[Any]) -> None:
    layer, batch = block(), inputs()
    expected = results(layer, batch)
    layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    for one, other in zip(results(layer, batch), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_planner_counts_no_mask() -> None:
    def saved(**changes: Any) -> int:
        with torch.device("meta"):
            layer = block(**changes).bfloat16()
            hidden, positions, documents = (x.to("meta") for x in inputs())
            hidden = hidden.bfloat16().requires_grad_()
        with TensorMeter([hidden]) as meter, DeviceKernels("cuda"):
            outputs = layer((hidden, positions, documents))
            size = meter.now
            del outputs
            return size

    # The mask has 2 * LENGTH² bytes; without it, a view of v keeps the whole qkv.
    assert saved(document_attention="mask") > saved() + LENGTH * LENGTH
    # Dropout needs the mask.
    assert saved(attention_dropout=0.1) > saved() + LENGTH * LENGTH


def test_attention_dropout_and_short_samples_use_the_mask() -> None:
    on_cuda = type("Query", (), {"is_cuda": True})
    q = on_cuda()
    for length, head, taken in [(128, 16, True), (127, 16, False), (128, 8, False)]:
        q.shape = (1, 2, length, head)
        assert attention.takes_block_mask(q) is taken
    assert not attention.takes_block_mask(torch.empty(1, 2, 128, 16))
