"""Names and abilities that differ between versions of torch."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipemega.config.sections.optimizer_section import PARAMS
from pipemega.distributed import torch_versions
from pipemega.errors import ConfigError
from pipemega.kernels import Kernels
from pipemega.optimizer import build_optimizer
from pipemega.pipeline.executor import run_backward

c10d = dist.distributed_c10d


@pytest.fixture
def reloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    yield lambda: importlib.reload(torch_versions)
    monkeypatch.undo()
    importlib.reload(torch_versions)


@pytest.mark.parametrize("name", ["_accelerator_setAllocatorSettings", "older"])
@pytest.mark.parametrize("configured", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_are_expandable_unless_the_user_has_configured_the_allocator(
    monkeypatch: pytest.MonkeyPatch, name: str, configured: str | None
) -> None:
    calls: list[str] = []
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    if configured is not None:
        monkeypatch.setenv(configured, "backend:native")
    if name == "older":
        name = "_cuda_cudaCachingAllocator_set_allocator_settings"
        monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    monkeypatch.setattr(torch._C, name, calls.append, raising=False)
    torch_versions.use_expandable_segments()
    assert calls == ([] if configured else ["expandable_segments:True"])


def test_the_timeout_is_set_by_the_name_that_this_torch_does_not_deprecate(
    monkeypatch: pytest.MonkeyPatch, reloaded: Callable[[], Any]
) -> None:
    monkeypatch.setattr(dist, "set_timeout", lambda: "new", raising=False)
    assert reloaded().set_timeout() == "new"
    monkeypatch.delattr(dist, "set_timeout")
    assert reloaded().set_timeout is c10d._set_pg_timeout


def test_collectives_have_the_names_that_this_torch_does_not_deprecate(
    monkeypatch: pytest.MonkeyPatch, reloaded: Callable[[], Any]
) -> None:
    monkeypatch.setattr(dist, "all_gather_single", lambda: "new", raising=False)
    monkeypatch.setattr(dist, "reduce_scatter_single", lambda: "new", raising=False)
    new = reloaded()
    assert new.all_gather_single() == new.reduce_scatter_single() == "new"
    assert new.ALL_GATHERS == "all_gather_single_coalesced"
    monkeypatch.delattr(dist, "all_gather_single")
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda: "old", raising=False)
    monkeypatch.setattr(dist, "reduce_scatter_tensor", lambda: "old", raising=False)
    old = reloaded()
    assert old.all_gather_single() == old.reduce_scatter_single() == "old"
    assert old.ALL_GATHERS == "allgather_into_tensor_coalesced"
    assert old.REDUCE_SCATTERS == "reduce_scatter_tensor_coalesced"


def test_a_group_has_the_methods_of_this_torch() -> None:
    assert hasattr(dist.ProcessGroup, torch_versions.ALL_GATHERS)
    assert hasattr(dist.ProcessGroup, torch_versions.REDUCE_SCATTERS)


def test_an_optimizer_that_this_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an AttributeError of torch.optim."""
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    params = PARAMS["Muon"](lr=0.01)
    message = (
        r"^optimizer.type 'Muon' needs torch 2\.9 or newer, and this is torch \d+\.\d+.*install"
    )
    with pytest.raises(ConfigError, match=message):
        build_optimizer("Muon", params, [], kernels=Kernels.detect("cpu"))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.parametrize("own_graphs", [torch_versions._edges_own_graphs, False])
def test_an_edge_keeps_the_graph_of_a_custom_function(
    monkeypatch: pytest.MonkeyPatch, own_graphs: bool
) -> None:
    """torch 2.8 freed it with the loss: "element 0 of tensors does not require grad"."""
    monkeypatch.setattr(torch_versions, "_edges_own_graphs", own_graphs)
    x = torch.ones(3, requires_grad=True)

    def edge() -> GradientEdge:
        output: Tensor = Double.apply(x)
        return torch_versions.gradient_edge(output)

    run_backward([edge()], [torch.ones(3)])
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
