"""The test that decides whether an optimizer of the user works on parts of the parameters."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError
from pipemega.optimizer import Lamb
from pipemega.optimizer.user_optimizer import check_cuts
from tests.optional_packages import needs_muon
from tests.sampling import some
from tests.unit.optimizer import user_optimizers

CPU = torch.device("cpu")


def mesh_of(pipeline: int = 1, tensor: int = 1) -> Mesh:
    """Return a mesh of one process that looks like one of several."""
    axes = [Axis(name, tuple(range(n))) for name, n in (("pipeline", pipeline), ("tensor", tensor))]
    return Mesh(Topology(pipeline, 1, tensor), axes[0], Axis("data"), axes[1], Axis("world"), CPU)


MESHES = {
    "pipeline": (mesh_of(pipeline=2), None),
    "tensor": (mesh_of(tensor=2), None),
    "ZeRO": (mesh_of(), Axis("data", (0, 1))),
    "all": (mesh_of(2, 2), Axis("data", (0, 1))),
}
WORKS = {
    name: getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam",
        "RMSprop", "Rprop",
    )
} | {
    "Lion": user_optimizers.Lion,
    "Corrected": user_optimizers.Corrected,
    "OnlyFp32": user_optimizers.OnlyFp32,
    "SGD of lr 0": lambda params: torch.optim.SGD(params, lr=0.0),
    "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
}  # fmt: skip


def check(make: Any, mesh: str, shapes: Any = ((4, 3), (5,)), **options: Any) -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    groups = [{"params": parameters}, {"params": parameters[:1], "weight_decay": 0.1, **options}]
    sharded = MESHES[mesh]
    check_cuts(make, groups, *sharded)


class Late(user_optimizers.GlobalNorm):
    """Uses the norm after 25 steps only, as optimizers with a start-up phase do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        if self.count > 25:
            super().step()


@pytest.mark.parametrize("name", some(WORKS, 0, 3, 6, 9, 12))
def test_optimizers_that_update_each_element_separately_work_on_every_mesh(name: str) -> None:
    check(WORKS[name], "all", ((4, 3), (5,), (), (3, 2, 2, 2)))


def matrices(params: Any) -> Optimizer:
    return torch.optim.Muon(params, lr=0.01)


@pytest.mark.parametrize(
    ("make", "mesh", "words"),
    [
        (lambda params: Lamb(params), "tensor", ["On this mesh mesh.tensor (2) shards", "update "
         "each element separately", "Set mesh.tensor to 1, or use an optimizer such as AdamW"]),
        (lambda params: Lamb(params), "ZeRO", ["zero_optimization.stage 1 gives each of 2 data "
         "ranks a 1-D slice", "Set zero_optimization.stage to 0"]),
        (user_optimizers.Factored, "tensor", ["its updates of cut parameters differ from those of "
         "whole ones by"]),
        (torch.optim.Adafactor, "tensor", ["differ"]),
        (user_optimizers.Shampoo, "tensor", ["differ"]),
        (Late, "tensor", ["differ"]),
        (user_optimizers.GlobalNorm, "pipeline", ["mesh.pipeline (2) gives each rank the "
         "parameters of its stages, so the optimizer must update each parameter without the "
         "others. Set mesh.pipeline"]),
        (user_optimizers.Stochastic, "pipeline", ["if the test is wrong, set "
         "zero_allow_untested_optimizer to true"]),
    ],
)  # fmt: skip
def test_an_optimizer_that_computes_with_more_than_a_rank_has_is_refused(
    make: Any, mesh: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(make, mesh)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.on_every_rank


@needs_muon
def test_muon_updates_matrices_on_pipeline_ranks_but_no_parts_of_them() -> None:
    check(matrices, "pipeline", [(4, 3)])
    with pytest.raises(ConfigError, match="differ from those of whole ones"):
        check(matrices, "tensor", [(4, 3)])
    with pytest.raises(ConfigError) as caught:
        check(matrices, "ZeRO", [(4, 3)])
    assert "the optimizer cannot update parts of parameters: optimizer raised ValueError: " in str(
        caught.value
    )
    with pytest.raises(ConfigError, match=r"fails with small parameters of as many dims .* 2D"):
        check(matrices, "pipeline", [(4, 3), (5,)])


def by_dims(params: Any) -> Optimizer:
    """Groups parameters by their dims, which are 1 for every slice."""
    whole = [p for group in params for p in group["params"]]
    groups = [
        {"params": [p for p in whole if p.dim() > 1], "weight_decay": 1e-2},
        {"params": [p for p in whole if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


def test_a_function_that_looks_at_the_dims_of_slices_is_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (5,))]
    for name in ("pipeline", "tensor"):
        check_cuts(by_dims, [{"params": parameters}], *MESHES[name])
    with pytest.raises(ConfigError, match="differ from those of whole ones by"):
        check_cuts(by_dims, [{"params": parameters}], *MESHES["ZeRO"])


def test_the_test_uses_the_options_of_the_groups() -> None:
    """Without gradients of all groups, or with other options, it would test another optimizer."""
    seen: list[Any] = []

    def make(params: Any) -> Optimizer:
        seen.append([({**group, "params": None}, len(group["params"])) for group in params])
        return torch.optim.SGD(params, lr=0.1)

    check(make, "ZeRO", momentum=0.5)
    for groups in seen:
        assert [options for options, _ in groups] == [
            {"params": None}, {"params": None, "weight_decay": 0.1, "momentum": 0.5},
        ]  # fmt: skip
    # Two parameters of each number of dims in each group; whole, then three slices.
    assert [[count for _, count in groups] for groups in seen] == 4 * [[4, 2]]


def test_no_mesh_means_no_test_and_random_numbers_stay() -> None:
    def never(params: Any) -> Optimizer:
        raise AssertionError("called")

    check_cuts(never, [{"params": []}], mesh_of(), None)
    before = torch.get_rng_state()
    with pytest.raises(ConfigError):
        check(user_optimizers.Stochastic, "all")
    assert torch.equal(torch.get_rng_state(), before)
