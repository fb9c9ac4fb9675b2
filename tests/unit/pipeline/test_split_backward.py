"""Split backward gives bitwise the gradients of a full backward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipemega.distributed.mesh import Axis
from pipemega.layer_costs.tensor_meter import DeviceKernels
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.parameters import initialize_parameters
from pipemega.pipeline.split_backward import enable_split_backward
from pipemega.pipeline.weight_queue import WeightGradQueue
from pipemega.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)

COUNT = 3


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(self.linear(x)) * self.scale


class Twice(nn.Module):
    """One module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Conditional(nn.Module):
    """A top-1 router: an expert may get no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 8)
        weights, choice = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            selected = choice == number
            out[selected] = expert(rows[selected]) * weights[selected, None]
        return out.view_as(x)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    return model


def parallel() -> nn.Module:
    axis = Axis("tensor")
    model = nn.Sequential(
        ColumnParallelLinear(8, (8, 4, 4), axis=axis),
        nn.GELU(),
        RowParallelLinear(16, 8, axis=axis),
        VocabParallelHead(50, 8, axis=axis),
    )
    initialize_parameters(model, "layers.0", 1)
    return model


def vocabulary() -> nn.Module:
    axis = Axis("tensor")
    model = nn.Sequential(
        VocabParallelEmbedding(50, 8, axis=axis), nn.LayerNorm(8), nn.Linear(8, 4)
    )
    initialize_parameters(model, "layers.0", 1)
    return model


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linears and norms": (
        lambda: nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4, bias=False)
        ),
        floats(2, 5, 8),
    ),
    "changed in place": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)),
        floats(2, 5, 8),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 1, groups=2)
        ),
        floats(2, 3, 9, 9),
    ),
    "convolutions in one and three dims, padded in other ways": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 3, padding="same"),
            nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"),
            nn.Unflatten(-1, (2, 2, 2)),
            nn.Conv3d(4, 2, 2, dilation=1),
        ),
        floats(2, 3, 8),
    ),
    "embedding and attention": (
        lambda: nn.Sequential(
            nn.Embedding(10, 8),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        ),
        lambda: torch.randint(10, (2, 5)),
    ),
    "an embedding with padding": (
        lambda: nn.Sequential(nn.Embedding(10, 8, padding_idx=3), nn.Linear(8, 4)),
        lambda: torch.randint(10, (2, 5)),
    ),
    "embeddings of other kinds": (
        lambda: nn.Sequential(nn.Embedding(10, 8, scale_grad_by_freq=True), nn.Linear(8, 4)),
        lambda: torch.randint(10, (2, 5)),
    ),
    "a vocabulary": (vocabulary, lambda: torch.randint(50, (2, 5))),
    "an autograd function of the user": (Custom, floats(2, 5, 8)),
    "a module used twice": (Twice, floats(2, 5, 8)),
    "a router": (Conditional, floats(2, 5, 8)),
    "frozen weights": (frozen, floats(2, 5, 8)),
    "tensor-parallel layers": (parallel, floats(2, 5, 8)),
}


def full_backward(
    model: nn.Module, inputs: list[Tensor], run: Callable[..., Tensor], fuses: bool = False
) -> GradientBuffer:
    buffer = GradientBuffer(list(model.named_parameters()))
    if fuses:
        enable_split_backward([model], WeightGradQueue(buffer, fuses=True))
    for x in inputs:
        run(model, x).square().sum().backward()
    return buffer


def split_backward(
    model: nn.Module, inputs: list[Tensor], run: Callable[..., Tensor], fuses: bool = False
) -> GradientBuffer:
    """Run all forwards, then all I, then all W."""
    buffer = GradientBuffer(list(model.named_parameters()))
    queue = WeightGradQueue(buffer, fuses=fuses)
    enable_split_backward([model], queue)
    outputs = [run(model, x) for x in inputs]
    for number, output in enumerate(outputs):
        with queue.defer(number):
            output.square().sum().backward()
    for number in range(len(inputs)):
        queue.run(number)
    assert not queue._queued
    return buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_i_and_w_give_bitwise_the_gradients_of_a_full_backward(
    name: str, checkpointed: bool, dtype: torch.dtype
) -> None:
    build, make_input = MODELS[name]
    torch.manual_seed(0)
    model = build().to(dtype)
    inputs = [make_input() for _ in range(COUNT)]
    inputs = [
        x.to(dtype).requires_grad_(number > 0) if x.is_floating_point() else x
        for number, x in enumerate(inputs)
    ]
    again = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]

    def run(module: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)

    other = copy.deepcopy(model)
    expected, found = full_backward(model, inputs, run), split_backward(other, again, run)
    for (label, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if p.requires_grad and name != "a module used twice":
            assert torch.equal(found.view(q), expected.view(p)), label
        elif p.requires_grad:
            # Its two contributions are added in another order.
            torch.testing.assert_close(found.view(q), expected.view(p))
    for x, y in zip(inputs, again, strict=True):
        assert (x.grad is None and y.grad is None) or torch.equal(x.grad, y.grad)


class TiedLookup(nn.Module):
    """One weight of a lookup and a linear: only the gradient of the linear is a product."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        return self.embedding(y.detach().argmax(-1)) * y


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", [*MODELS, "a tied lookup"])
def test_fused_products_add_equally_in_b_and_in_w(name: str, checkpointed: bool) -> None:
    build, make_input = MODELS.get(name, (TiedLookup, floats(2, 5, 8)))
    torch.manual_seed(0)
    model = build().double()
    inputs = [make_input() for _ in range(COUNT)]
    inputs = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]

    def run(module: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)

    plain = full_backward(copy.deepcopy(model), inputs, run)
    whole = full_backward(copy.deepcopy(model), inputs, run, fuses=True)
    halves = split_backward(copy.deepcopy(model), inputs, run, fuses=True)
    for slots in zip(plain.slots, whole.slots, halves.slots, strict=True):
        expected, found, other = (
            buffer.view(slot.parameter)
            for buffer, slot in zip((plain, whole, halves), slots, strict=True)
        )
        assert torch.equal(found, other), slots[0].name
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_halves_are_multiplied_into_the_fp32_gradient_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch has this product for CUDA devices; the meta device checks its arguments."""
    products: list[tuple[Any, ...]] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func in (torch.ops.aten.addmm.dtype_out, torch.ops.aten.mm.default):
                products.append((func, args, kwargs))
            return func(*args, **(kwargs or {}))

    with torch.device("meta"):
        linear = nn.Linear(8, 6, bias=False, dtype=torch.bfloat16)
        buffer = GradientBuffer([*linear.named_parameters()], dtype=torch.float32)
        enable_split_backward([linear], WeightGradQueue(buffer, fuses=True))
        x, dy = (torch.empty(4, size, dtype=torch.bfloat16) for size in (8, 6))
    assert not buffer.fuses(linear.weight, dy)
    with DeviceKernels("cuda"):
        assert buffer.fuses(linear.weight, dy)
        assert not buffer.fuses(linear.weight, dy.double())
    with Recorded():
        linear(x).backward(dy)
    assert products[-1][0] is torch.ops.aten.mm.default  # on a CPU
    # Modes for functions do not reach backward.
    monkeypatch.setattr(buffer, "fuses", lambda *_: True)
    with Recorded():
        linear(x).backward(dy)
    func, args, kwargs = products[-1]
    assert func is torch.ops.aten.addmm.dtype_out
    assert args[0] is kwargs["out"] is buffer.view(linear.weight)
    assert [tuple(t.shape) for t in args[:3]] == [(6, 8), (6, 4), (4, 8)]
    assert args[3] is torch.float32
    assert linear.weight.grad is None


def test_a_checkpointed_region_is_recomputed_only_once() -> None:
    runs: list[int] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[1].register_forward_hook(lambda *_: runs.append(1))
    split_backward(model, [torch.randn(2, 8)], lambda m, x: checkpoint(m, x, use_reentrant=False))
    assert len(runs) == 2


def test_split_backward_does_not_change_names_and_state() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(2, 2, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    enable_split_backward([model], WeightGradQueue(GradientBuffer([])))
    assert {n: v.tolist() for n, v in model.state_dict().items()} == {
        n: v.tolist() for n, v in before.items()
    }
    assert [type(m) for m in model] == [nn.Linear, nn.Conv1d]


def test_a_hook_on_a_weight_still_receives_its_gradient() -> None:
    seen: list[Tensor] = []
    model = nn.Linear(8, 8)
    model.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    buffer = split_backward(model, [torch.randn(2, 8)], lambda m, x: m(x))
    assert torch.equal(seen[0], buffer.view(model.weight))


def test_under_autocast_the_gradient_has_the_dtype_of_the_weight() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    other, x = copy.deepcopy(model), torch.randn(4, 8)

    def run(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x).float()

    expected, found = full_backward(model, [x], run), split_backward(other, [x], run)
    assert found.view(other.weight).dtype == torch.float32
    torch.testing.assert_close(found.view(other.weight), expected.view(model.weight))


def test_under_autocast_the_queue_keeps_the_cast_input() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    queue = WeightGradQueue(GradientBuffer(list(model.named_parameters())))
    enable_split_backward([model], queue)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x.requires_grad_())
    with queue.defer(0):
        y.sum().backward()
    (job,) = queue._queued[0]
    cells = _cells(job.gradient)
    kept = [cell.dtype for cell in cells if type(cell) is Tensor and cell.dim() == 2]
    assert kept == [torch.bfloat16] * 2


def _cells(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def test_nothing_is_queued_under_no_grad() -> None:
    model = nn.Linear(8, 8)
    queue = WeightGradQueue(GradientBuffer(list(model.named_parameters())))
    enable_split_backward([model], queue)
    with torch.no_grad(), queue.defer(0):
        model(torch.randn(2, 8))
    assert not queue._queued


def test_each_queued_pair_is_freed_after_its_use() -> None:
    buffer = GradientBuffer([])
    queue = WeightGradQueue(buffer)
    held: list[int] = []
    weight = nn.Parameter(torch.zeros(1))
    buffer._views[id(weight)] = torch.zeros(1)

    def gradient() -> Tensor:
        held.append(len(tensors))
        return torch.ones(1)

    tensors = {0: 1, 1: 1}
    with queue.defer("I"):
        for number in (0, 1):
            queue.add(weight, lambda number=number: (tensors.pop(number), gradient())[1])
    queue.run("I")
    assert held == [1, 0]


@pytest.mark.parametrize("kind", ["stock", "parallel"])
def test_the_gradient_of_an_embedding_is_computed_in_w(kind: str) -> None:
    ids = torch.randint(50, (2, 5))
    model = vocabulary() if kind == "parallel" else nn.Sequential(nn.Embedding(50, 8))
    buffer = GradientBuffer(list(model.named_parameters()))
    queue = WeightGradQueue(buffer)
    enable_split_backward([model], queue)
    with queue.defer(0):
        model(ids).sum().backward()
    assert not buffer.view(model[0].weight).any()
    queue.run(0)
    assert buffer.view(model[0].weight).any()


@pytest.mark.parametrize("copies", [False, True])
def test_a_module_of_an_earlier_engine_defers_to_the_new_queue(copies: bool) -> None:
    """The counts of the late choice, on copies of built modules, saw no W: another plan."""
    module = nn.Sequential(nn.Linear(4, 4), VocabParallelEmbedding(8, 4, axis=Axis("tensor")))
    enable_split_backward([module], WeightGradQueue(GradientBuffer([*module.named_parameters()])))
    module = copy.deepcopy(module) if copies else module
    queue = WeightGradQueue(GradientBuffer([*module.named_parameters()]))
    enable_split_backward([module], queue)
    with queue.defer("here"):
        ids = torch.ones(2, 1, dtype=torch.long)
        (module[0](torch.ones(2, 4)) + module[1](ids)[:, 0]).sum().backward()
    assert queue.pending_weights("here") == {id(module[0].weight), id(module[1].weight)}
