"""What only a GPU shows: pinned batches, fused attention in fp32, tables of rotary positions."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

from pipemega import LayerSpec, PipelineModule
from pipemega.distributed.host_memory import HostMemory
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import initialize
from pipemega.models.attention import (
    causal_attention,
    document_attention,
    document_mask,
    takes_block_mask,
    takes_grouped_queries,
)
from pipemega.models.rotary import Rotary
from pipemega.pipeline.split_backward import grouped_linear
from tests.gpu.devices import ONE_DEVICE, needs_gpus, one_gpu, only_on_a_gpu

pytestmark = one_gpu

FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_grouped_attention_runs_on_a_fused_kernel(dtype: torch.dtype, channels: int) -> None:
    q = torch.randn(2, 8, 128, channels, device=ONE_DEVICE, dtype=dtype, requires_grad=True)
    k, v = torch.randn(2, 2, 2, 128, channels, device=ONE_DEVICE, dtype=dtype).unbind()
    # Without the math kernel torch raises an error if no fused one takes the arguments.
    with sdpa_kernel(FUSED):
        mixed = causal_attention(q, k, v)
        mixed.float().sum().backward()
    exact = causal_attention(q.detach().double().cpu(), k.double().cpu(), v.double().cpu())
    error = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(mixed.double().cpu(), exact, rtol=error, atol=error)


@only_on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_attention_compiles_without_a_graph_break(dtype: torch.dtype) -> None:
    q = torch.randn(1, 4, 64, 64, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 1, 2, 64, 64, device="cuda", dtype=dtype).unbind()
    compiled = torch.compile(causal_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), causal_attention(q, k, v))


@only_on_a_gpu
def test_grouped_attention_in_fp32_holds_no_scores() -> None:
    heads, length = 8, 4096
    q = torch.randn(1, heads, length, 64, device="cuda", requires_grad=True)
    k, v = torch.randn(2, 1, 2, length, 64, device="cuda").unbind()
    assert not takes_grouped_queries(q)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    causal_attention(q, k, v).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < heads * length * length * 4 / 4


@only_on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_documents_by_blocks_equal_the_mask(dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, 500, 64, device="cuda", dtype=dtype, requires_grad=True)
    k, v = torch.randn(2, 2, 2, 500, 64, device="cuda", dtype=dtype).unbind()
    documents = (torch.rand(2, 500, device="cuda") < 0.02).cumsum(-1)
    assert takes_block_mask(q)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = document_attention(q, k, v, documents)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = causal_attention(q, k, v, document_mask(documents))
    error = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, rtol=error, atol=error)
    gradients = [torch.autograd.grad(y.float().square().sum(), q)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=10 * error, atol=10 * error)


@only_on_a_gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_the_grouped_product_equals_one_product_for_each_expert(transposed: bool) -> None:
    """Some experts have no rows."""
    sizes = [0, 40, 1, 0, 87, 0]
    x = torch.randn(sum(sizes), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    shape = (64, 32) if transposed else (32, 64)
    weight = nn.Parameter(torch.randn(len(sizes), *shape, device="cuda", dtype=torch.bfloat16))
    found = grouped_linear(x, weight, sizes, transposed)
    matrices = weight if transposed else weight.transpose(1, 2)
    pairs = zip(x.split(sizes), matrices, strict=True)
    expected = torch.cat([rows @ matrix for rows, matrix in pairs])
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    of_both = [torch.autograd.grad(y.square().sum(), (x, weight)) for y in (found, expected)]
    for one, other in zip(*of_both, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-1)


class Pairs(Dataset[Any]):
    deterministic = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        row = torch.arange(5.0) + index
        return row[:4], row[1:]


class Sources(TorchDispatchMode):
    """Records whether the host tensors that are copied to the GPU are pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.is_cuda and not args[0].is_cuda:
            self.pinned.append(args[0].is_pinned())
        return result


@only_on_a_gpu
@pytest.mark.parametrize("own_iterator", [False, True])
def test_a_step_copies_its_batch_from_pinned_memory(own_iterator: bool) -> None:
    net = PipelineModule([LayerSpec(torch.nn.Linear, 4, 4)], torch.nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "mesh": {"device": "cuda"},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    engine: Engine = initialize(net, config, training_data=None if own_iterator else Pairs())[0]
    tokens = torch.arange(10.0).view(2, 5)
    given = ((tokens[:, :4], tokens[:, 1:]) for _ in range(6)) if own_iterator else None
    with Sources() as sources:
        for _ in range(3):
            data = engine.steps.read(given, None)
            if own_iterator:
                for part, expected in ((data.inputs, tokens[:, :4]), (data.labels, tokens[:, 1:])):
                    assert all(torch.equal(tensor.cpu(), expected) for tensor in part)
    assert sources.pinned == [True] * 12
    if engine.loader is not None:
        engine.loader.close()


@only_on_a_gpu
def test_pinned_memory_is_not_reused_before_its_copy_is_complete() -> None:
    memory = HostMemory(torch.device("cuda", torch.cuda.current_device()))
    copies: list[Tensor] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        # The copies wait behind this, while the host frees and pins memory again.
        torch.cuda._sleep(200_000_000)
        for number in range(8):
            source = memory.pinned(torch.full((1 << 20,), float(number)))
            assert source.is_pinned()
            copies.append(source.to("cuda", non_blocking=True))
            del source
        torch.cuda.current_stream().synchronize()
    assert [copy.unique().tolist() for copy in copies] == [[float(n)] for n in range(8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_tables_of_the_gpu_rotate_as_those_of_the_cpu(dtype: torch.dtype) -> None:
    layer, x = Rotary(64, 10000.0), torch.randn(2, 2, 100, 64, dtype=dtype)
    error = 1e-6 if dtype == torch.float32 else 1e-2
    positions = torch.randint(1 << 17, (2, 100))
    for at in (None, positions):
        expected, _ = layer(x, x, at)
        given = None if at is None else at.to(ONE_DEVICE)
        for _ in range(2):
            got, _ = layer(x.to(ONE_DEVICE), x.to(ONE_DEVICE), given)
            torch.testing.assert_close(got.cpu(), expected, rtol=error, atol=error)


@needs_gpus(2)
def test_collectives_that_are_split_by_sample_run_over_nccl() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    result = subprocess.run(
        [*launch, "-m", "tests.gpu.split_collectives_run", "cuda"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("equal") == 2
