"""What a step reads from the device and copies to it, in every variant of a step.

Tested without a GPU on torch's meta device. Its tensors have no values, so the only reads that a
step may do, of its sums, are given numbers here; any other read raises an error.
"""

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipemega import LayerSpec, PipelineModule
from pipemega.checkpoint.async_save import BackgroundTask
from pipemega.config import load
from pipemega.distributed.mesh import Axis, Mesh, build_mesh
from pipemega.distributed.topology import Topology
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import initialize
from pipemega.models import GPTConfig, gpt
from pipemega.optimizer import PostValidatedStep, build_step
from tests.optional_packages import needs_meta_collectives
from tests.sampling import some

MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8}


class Transfers(TorchDispatchMode):
    """Records copies between host and device, and the reads of a step.

    On a CUDA device each of these copies makes the host wait, unless the host memory is pinned.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.copies: list[str] = []
        self.reads: list[str] = []
        self.squared_norm = 0.01
        for name in ("tensor", "as_tensor"):
            monkeypatch.setattr(torch, name, partial(self._made, getattr(torch, name)))
        tolist = Tensor.tolist

        def read(tensor: Tensor) -> Any:
            if not tensor.is_meta:
                return tolist(tensor)
            self.reads.append(_caller())
            # Squared norms, ranks with inf or nan, loss, weight, micro-batches, votes.
            norms = (tensor.numel() - 5) * [0.0]
            return [*norms[1:], self.squared_norm, 0.0, 2.0, 1.0, 2.0, 0.0]

        monkeypatch.setattr(Tensor, "tolist", read)
        assign = Tensor.__setitem__

        def assigned(tensor: Tensor, index: Any, value: Any) -> None:
            # torch copies the number to a GPU, from pageable memory, if it is for one element.
            if tensor.is_meta and not isinstance(value, Tensor) and tensor[index].dim() == 0:
                self.copies.append(_caller())
            assign(tensor, index, value)

        monkeypatch.setattr(Tensor, "__setitem__", assigned)

    def _made(self, make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_meta and not (isinstance(args[0], Tensor) and args[0].is_meta):
            self.copies.append(_caller())
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if copies:
            given.append(result)
        # A number of the host is an argument of a kernel, unless it is to be copied.
        kinds = {tensor.is_meta for tensor in given if tensor.dim() or tensor.is_meta or copies}
        if len(kinds) == 2:
            self.copies.append(f"{func} in {_caller()}")
        return result


def _caller() -> str:
    frames = [f for f in traceback.extract_stack() if "/pipemega/" in f.filename]
    return f"{Path(frames[-1].filename).name}: {frames[-1].name}" if frames else "test"


class Dropped(BackgroundTask):
    """Writes nothing: tensors of the meta device have no values."""

    def start(self, action: Callable[[Axis], object]) -> None:
        self.connect()


def engine_of(mesh: Mesh | None = None, **changes: Any) -> Engine:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "model": MODEL,
        "data": {"compare_every": 0},
        **changes,
    }
    net = gpt(GPTConfig.of(load({"train_batch_size": 4, "model": MODEL}), 50))
    return initialize(net, config, mesh=mesh or Mesh.single("meta"))[0]


def tokens() -> Iterator[tuple[Tensor, Tensor]]:
    """Return micro-batches that are on the device: test_pinned_batches.py covers their copies."""
    batch = torch.empty(2, 8, dtype=torch.int64, device="meta")
    return ((batch, batch) for _ in range(2))


OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
    "bf16 gradients": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "SGD": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    "Lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}},
    "learning rates": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}},
    "offload": {"zero_optimization": OFFLOAD},
    "offload of bf16": {"zero_optimization": OFFLOAD, "bf16": {"enabled": True}},
    "split backward": {"pipeline": {"schedule": "zb-h1"}},
    "background save": {"checkpoint": {"async": True}},
    "timed": {"training": {"stragglers": {"factor": 1.5}}},
}


@pytest.mark.parametrize("variant", some(VARIANTS, 0, 2, 5, 8, 9, 10))
def test_a_step_copies_nothing_and_reads_once(
    variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pipemega.checkpoint.checkpointer.BackgroundTask", Dropped)
    engine = engine_of(**VARIANTS[variant])
    with Transfers(monkeypatch) as transfers:
        for step in range(1, 3):
            engine.train_batch(tokens())
            assert transfers.reads == step * ["step.py: __call__"]
            if "checkpoint" in VARIANTS[variant]:
                engine.save_checkpoint(tmp_path)
    if "checkpoint" in VARIANTS[variant]:
        # Adam counts its steps in host tensors, and "meta" stands for pinned memory too.
        counters = 2 * sum(p.requires_grad for p in engine.module.parameters())
        assert transfers.copies == counters * ["aten.copy_.default in host_memory.py: copy"]
    else:
        assert transfers.copies == []
    assert transfers.reads == 2 * ["step.py: __call__"]


@pytest.mark.parametrize("offload", some([{}, OFFLOAD], 1), ids=["on the device", "offload"])
def test_a_post_validated_step_reads_its_two_sums_only_when_it_needs_them(
    offload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        build_step, "_step_class", lambda *_: partial(PostValidatedStep, sync_after=0)
    )
    engine = engine_of(zero_optimization=offload)
    step = engine.steps.optimizer_step
    assert isinstance(step, PostValidatedStep)
    events: list[str] = []
    with Transfers(monkeypatch) as transfers:
        for name in ("start_loss_sums", "_reduce", "settle", "_execute"):
            _note_calls(monkeypatch, step, name, events, transfers)
        for squared_norm in (0.01, 100.0, 0.01):
            engine.train_batch(tokens())
            # The norm of this step, which the next step reads.
            transfers.squared_norm = squared_norm
    assert transfers.copies == []
    assert step.rollbacks == 1
    # Loss and weight are read after all work of the step is queued, the norm in the next step.
    first = ["settle: 0", "start_loss_sums: 0", "_reduce: 0", "_execute: 1"]
    assert events == [
        *first,
        "settle: 1", "start_loss_sums: 2", "_reduce: 2", "_execute: 3",
        "settle: 3", "_execute: 4", "start_loss_sums: 4", "_reduce: 4", "_execute: 5",
    ]  # fmt: skip


def _note_calls(
    monkeypatch: pytest.MonkeyPatch, step: Any, name: str, events: list[str], transfers: Transfers
) -> None:
    original = getattr(step, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append(f"{name}: {len(transfers.reads)}")
        return original(*args, **kwargs)

    monkeypatch.setattr(step, name, noted)


@pytest.fixture
def two_data_ranks() -> Iterator[Mesh]:
    """Data rank 0 of 2 on the meta device; a collective leaves its tensor as it is."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield build_mesh(Topology(1, 2, 1), torch.device("meta"))
    dist.destroy_process_group()


@needs_meta_collectives
@pytest.mark.filterwarnings("ignore:Set timeout is now only supported for either nccl or gloo")
@pytest.mark.parametrize("offload", some([{}, OFFLOAD], 1), ids=["on the device", "offload"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_on_data_ranks_copies_nothing_and_reads_once(
    stage: int, offload: dict[str, Any], two_data_ranks: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = {"stage": stage, "overlap_comm": bool(stage), "reduce_bucket_size": 500, **offload}
    engine = engine_of(two_data_ranks, zero_optimization=zero, bf16={"enabled": True})
    with Transfers(monkeypatch) as transfers:
        for step in range(1, 3):
            engine.train_batch(tokens())
            assert transfers.reads == step * ["step.py: __call__"]
    assert transfers.copies == []


class Transferring(nn.Module):
    """Makes one copy from the host in each of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.way == "to":
            return y + torch.ones(4).to(y.device)
        if self.way == "tensor":
            return y * torch.tensor([2.0], device=y.device)
        return y[torch.tensor([1, 0])]


@pytest.mark.parametrize("way", ["to", "tensor", "index"])
def test_a_layer_that_copies_from_the_host_is_found(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = PipelineModule([LayerSpec(Transferring, way)], nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    engine = initialize(net, config, mesh=Mesh.single("meta"))[0]
    x = torch.empty(2, 4, device="meta")
    with Transfers(monkeypatch) as transfers:
        engine.train_batch(iter([(x, x)]))
    assert len(transfers.copies) >= 1
