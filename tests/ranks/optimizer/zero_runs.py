"""Small models trained with and without ZeRO, on the ranks of the pool."""

import copy
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule
from pipemega.config import Config
from pipemega.config.sections.precision_sections import ZeroSection
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.errors import PipelineError
from pipemega.optimizer import ZeroMasterParams, build_step, zero
from pipemega.optimizer.gradients import (
    DataReduction,
    GradientBuffer,
    ShardingSpec,
    bucketed_layout,
)
from pipemega.optimizer.zero import AllGather, ReduceScatter
from pipemega.parameters import shard_of
from tests.ranks import small_models
from tests.ranks.small_models import WIDTH, engine_of, microbatches, squares
from tests.ranks.training_runs import build, data, train_all
from tests.unit.late_copies import LateHostMemory


class RankDependent(nn.Linear):
    """Uses its weight on the first data rank only, and another parameter never."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) if dist.get_rank() == 0 else x * 2


def rank_dependent() -> PipelineModule:
    layers: list[Any] = []
    for _ in range(3):
        layers += [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(RankDependent), torch.tanh]
    return PipelineModule(layers, squares)


MODELS = {
    name: getattr(small_models, name) for name in ("plain", "tied_thrice", "partly_frozen")
} | {"rank_dependent": rank_dependent}


def train_small(model: str, configs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Train `model` for two steps with each config."""
    torch.set_default_dtype(torch.float64)
    try:
        results = []
        for config in configs:
            engine = engine_of(MODELS[model](), **config)
            count = engine.batch.num_microbatches
            losses = [engine.train_batch(microbatches(s, count)) for s in range(2)]
            parameters = {n: p.numpy() for n, p in engine.parameter_state().items()}
            held = {n: p.detach().numpy().copy() for n, p in engine.steps.model.parameters.items()}
            results.append({"loss": losses, "parameters": parameters, "held": held})
        return results
    finally:
        torch.set_default_dtype(torch.float32)


class _DelayedWork:
    """A collective whose result is written to its place only by `wait`."""

    def __init__(self, work: Any, received: Tensor, place: Tensor) -> None:
        self._work, self._received, self._place = work, received, place

    def wait(self) -> None:
        self._work.wait()
        self._place.copy_(self._received)


def train_with_late_parameters(configs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Run `train_all` with copies of sent gradients and delayed writes of gathered parameters."""
    gather, send = zero.all_gather_single, zero._send

    def delayed_gather(flat: Tensor, own: Tensor, **settings: Any) -> _DelayedWork:
        received = torch.empty_like(flat)
        return _DelayedWork(gather(received, own.clone(), **settings), received, flat)

    def copying_send(sent: Tensor, share: int, axis: Axis) -> Any:
        return send(sent.clone(), share, axis)

    with (
        patch.object(zero, "all_gather_single", delayed_gather),
        patch.object(zero, "_send", copying_send),
    ):
        return train_all([(config, "float32") for config in configs])


def train_with_and_without_offload(configs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Run `train_all` with masters on the device, then on a host whose copies arrive late."""
    runs = [(config, "float32") for config in configs]
    on_device = train_all(runs)

    def host_memory(config: Config, mesh: Mesh) -> HostMemory | None:
        return LateHostMemory.reset(mesh.device) if config.zero_optimization.offloads else None

    with patch.object(build_step, "_host_memory", host_memory):
        offloaded = train_all(runs)
    assert any(what == "copies" for _, what in LateHostMemory.log)
    return on_device + offloaded


def bucket_starts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the instruction of the second step at which each bucket starts; None: after all."""
    engine = build(config)
    assert engine.steps.optimizer_step is not None
    masters, executor = engine.steps.optimizer_step.masters, engine.steps.executor
    assert isinstance(masters, ZeroMasterParams)
    scatter, started = masters._reduce_scatter, []
    start = scatter.start_next

    def record() -> None:
        program = engine.plan.programs[engine.mesh.pipeline.rank]
        at = executor._run.completed
        started.append((scatter.started, program[at] if at < len(program) else None))
        start()

    scatter.start_next = record  # type: ignore[method-assign]
    engine.train_batch(data(engine, 0))
    started.clear()
    engine.train_batch(data(engine, 1))
    stage_of = {
        name: number
        for number, stage in engine.steps.model.stages.items()
        for name in stage.logical_names()
    }
    buckets = masters.layout.buckets
    return {
        "started": [(number, None if step is None else tuple(step)) for number, step in started],
        "stages": [sorted({stage_of[slot.name] for slot in b.slots}) for b in buckets],
        "late": [bucket.late for bucket in buckets],
        "program": [tuple(step) for step in engine.plan.programs[engine.mesh.pipeline.rank]],
    }


def spans_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spans in the state after two steps; check that training continues from it."""
    engine = build(config)
    for step in range(2):
        engine.train_batch(data(engine, step))
    engine.settle()
    assert engine.steps.optimizer_step is not None
    state = copy.deepcopy(engine.steps.optimizer_step.state_dict())
    spans = {}
    for name, entry in state["parameters"].items():
        parameter = engine.steps.model.parameters[name]
        start, stop = entry["span"]
        for key, value in entry.items():
            if isinstance(value, Tensor) and key != "step":
                assert value.shape == (stop - start,), (name, key)
        if "master" in entry:
            mine = parameter.detach().view(-1)[start:stop]
            assert torch.equal(mine, entry["master"].to(mine.dtype))
        spans[name] = (start, stop, parameter.numel(), len(shard_of(parameter).shape))
    straight = [engine.train_batch(data(engine, step)) for step in (2, 3)]
    # Another engine, with the parameters of a loaded checkpoint.
    other = build(config)
    assert other.steps.optimizer_step is not None
    first = {n: p.detach().clone() for n, p in other.steps.model.parameters.items()}
    for step in range(2):
        other.train_batch(data(other, step))
    whole = {n: p.detach().clone() for n, p in other.steps.model.parameters.items()}
    fresh = build(config)
    assert fresh.steps.optimizer_step is not None
    with torch.no_grad():
        for name, parameter in fresh.steps.model.parameters.items():
            assert torch.equal(parameter, first[name])
            if "master" not in state["parameters"].get(name, {}):
                parameter.copy_(whole[name])
    fresh.steps.optimizer_step.load_state_dict(state)
    fresh.steps.global_steps = 2
    assert [fresh.train_batch(data(fresh, step)) for step in (2, 3)] == straight
    return spans


def sum_of_buckets(dtype: torch.dtype | None, window: int) -> tuple[list[float], list[float]]:
    """Return this rank's reduced slices, and the sums computed in the order of the ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis("data", tuple(range(ranks)), rank, dist.group.WORLD)
    named = [(f"p{i}", nn.Parameter(torch.zeros(size))) for i, size in enumerate((100, 7, 300))]
    layout = bucketed_layout(named, None, ShardingSpec(axis, 128))
    gradients = GradientBuffer(named, layout=layout)
    inputs = [
        torch.randn(layout.sizes[torch.float32], generator=torch.Generator().manual_seed(r))
        for r in range(ranks)
    ]
    flat = gradients.flats[torch.float32]
    flat.copy_(inputs[rank])
    scatter = ReduceScatter(gradients, ranks, DataReduction(dtype=dtype), window)
    scatter.finish()
    want = inputs[0].to(dtype or torch.float32)
    for other in inputs[1:]:
        want = want + other.to(want.dtype)
    mine = [slice(*bucket.place.owned_by(rank)) for bucket in layout.buckets]
    return (
        torch.cat([flat[s] for s in mine]).tolist(),
        torch.cat([want.float()[s] for s in mine]).tolist(),
    )


def gathered(overlap: bool) -> list[float]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis("data", tuple(range(ranks)), rank, dist.group.WORLD)
    named = [(name, nn.Parameter(torch.zeros(ranks * 64))) for name in "cba"]
    layout = bucketed_layout(named, None, ShardingSpec(axis, 1))
    flats = [torch.zeros(ranks * 64) for _ in layout.buckets]
    for number, flat in enumerate(flats):
        flat[64 * rank : 64 * rank + 64] = 10.0 * number + rank
    gather = AllGather(layout.buckets, dict(enumerate(flats)), overlap=overlap)
    gather.start()
    gather.wait_for((1,))
    gather.wait()
    return [float(x) for flat in flats for x in flat[::32]]


def one_rank_does_not_join() -> str:
    """Return the error of the rank that waits."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    dist.barrier(group)
    if rank == 1:
        dist.barrier()
        return ""
    named = [("layers.0.weight", nn.Parameter(torch.zeros(9)))]
    layout = bucketed_layout(named, None, ShardingSpec(Axis("data", (0, 1), 0, group), 64))
    scatter = ReduceScatter(GradientBuffer(named, layout=layout), 2, DataReduction(), window=1)
    try:
        scatter.finish()
    except PipelineError as error:
        return str(error)
    finally:
        dist.barrier()
    return "no error"


def train_all_and_as_on_a_gpu(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train with each config, and with the second one as with its defaults on a GPU."""
    results = train_all([(case, "float32") for case in cases])
    with patch.object(ZeroSection, "overlap", lambda section, device: "reductions"):
        return [*results, *train_all([(cases[1], "float32")])]
