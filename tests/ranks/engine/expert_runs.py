"""Runs of GPTs with experts, and of the dispatch of tokens alone."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipemega import initialize
from pipemega.config import load
from pipemega.diagnostics.replica_check import check_replicas
from pipemega.distributed.mesh import Axis, build_mesh
from pipemega.distributed.topology import Topology
from pipemega.engine.engine import Engine
from pipemega.errors import ReplicaError
from pipemega.layer_costs import tensor_meter
from pipemega.layer_costs.tensor_meter import rates_for
from pipemega.models import GPTConfig, gpt
from pipemega.moe import router as router_module
from pipemega.moe.dispatch import Dispatch
from pipemega.moe.experts import Experts, MixtureOfExperts
from pipemega.moe.router import Router, RouterConfig
from pipemega.optimizer import masters, step_outcome
from pipemega.optimizer.mixed_precision import LossScale
from pipemega.parameters import initialize_parameters, normal, shard_of
from pipemega.pipeline.model.recompute import recompute
from pipemega.pipeline.split_backward import grouped_linear
from pipemega.pipeline.weight_queue import WeightGradQueue
from tests.ranks.training_runs import LENGTH, VOCAB, build, data, train, train_engine


@contextmanager
def in_fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def biases_of(engine: Engine) -> dict[str, list[float]]:
    """Return name -> bias of the routers of this rank."""
    buffers = engine.steps.model.persistent_buffers
    return {name: b.tolist() for name, b in buffers.items() if name.endswith("expert_bias")}


def biases_after(config: Mapping[str, Any], steps: int, skipped: int) -> dict[str, list[float]]:
    """Train with an evaluation after each step; step `skipped` has a gradient that is not finite.

    Return the biases of all ranks.
    """
    with in_fp64():
        engine = build(config)
        for step in range(steps):
            if step == skipped:
                for parameter in engine.steps.model.parameters.values():
                    poison = parameter.register_hook(lambda gradient: gradient * torch.inf)
                    break
            engine.train_batch(data(engine, step))
            if step == skipped:
                poison.remove()
                assert engine.last_step is not None
                assert engine.last_step.skipped
            engine.eval_batch(data(engine, 50 + step))
        engine.settle()
        found: list[Any] = [None] * dist.get_world_size() if dist.is_initialized() else [None]
        if len(found) == 1:
            return biases_of(engine)
        dist.all_gather_object(found, biases_of(engine))
        merged: dict[str, list[float]] = {}
        for biases in found:
            for name, bias in biases.items():
                assert merged.setdefault(name, bias) == bias
        return merged


def parameters_of(engine: Engine) -> dict[str, Any]:
    return {name: p.double().numpy() for name, p in engine.parameter_state().items()}


def initial_values(config: Mapping[str, Any]) -> dict[str, Any]:
    with in_fp64():
        return parameters_of(build(config))


def train_and_save(config: Mapping[str, Any], folder: str, steps: int) -> dict[str, Any]:
    """Train, save, and train the rest: what `resume` has to give."""
    with in_fp64():
        engine = build(config)
        for step in range(steps):
            engine.train_batch(data(engine, step))
        engine.save_checkpoint(folder)
        return _rest(engine, steps)


def resume(config: Mapping[str, Any], folder: str, steps: int) -> dict[str, Any]:
    with in_fp64():
        engine = build(config)
        engine.load_checkpoint(folder)
        assert engine.steps.global_steps == steps
        return _rest(engine, steps)


def _rest(engine: Engine, steps: int) -> dict[str, Any]:
    before = parameters_of(engine), biases_of(engine)
    losses = [engine.train_batch(data(engine, step)) for step in (steps, steps + 1)]
    return {
        "before": before[0],
        "biases": before[1],
        "loss": losses,
        "parameters": parameters_of(engine),
    }


# Other runs of the whole model


def train_scaled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train as with fp16, with a loss scale of 2^10, but compute in fp64."""
    with in_fp64():
        engine = build(config)
        assert engine.steps.optimizer_step is not None
        engine.steps.optimizer_step.loss_scale = LossScale(2.0**10)
        return train_engine(engine, data)


def train_packed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train on samples of two documents, or of one with padding."""
    with in_fp64():
        loaded = load(config)
        return train_engine(initialize(gpt(GPTConfig.of(loaded, VOCAB)), loaded)[0], packed)


def packed(engine: Engine, step: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    for number, (tokens, labels) in enumerate(data(engine, step)):
        place = number * engine.mesh.data.size + engine.mesh.data.rank
        first, real = 2 + place % 3, LENGTH - 1 - place % 4
        positions = torch.arange(LENGTH).repeat(len(tokens), 1)
        positions[0, first:] -= first
        mask = torch.ones_like(tokens)
        mask[1, real:] = 0
        inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
        yield inputs, labels.masked_fill(mask == 0, -100)


# Choices of a router


def choices_at_a_tie() -> tuple[list[Any], Any, int]:
    """Recompute a layer with an input that has changed by 1e-7, where all experts are equally good.

    Return the choices of the forward and of the recomputation, those of the changed input, and the
    number of exchanges of counts.
    """
    mesh = build_mesh(Topology(1, 2, 1, 2), torch.device("cpu"))
    axes, init = {"expert": mesh.expert, "tensor": mesh.tensor}, normal(0.5)
    with in_fp64():
        router = Router(RouterConfig(num_experts=EXPERTS, topk=TOPK), HIDDEN, init)
        experts = Experts(
            EXPERTS, HIDDEN, HIDDEN, gated=False, activation=torch.tanh, up_init=init,
            down_init=init, bias=False, **axes,
        )  # fmt: skip
        layer = MixtureOfExperts(router, experts, **axes)
    initialize_parameters(layer, "layer", seed=1)
    router.weight.data.copy_(torch.eye(EXPERTS, HIDDEN))
    x = torch.ones(2, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(mesh.data.rank))
    changed, found = x.detach() + 1e-7 * noise.double(), list[Any]()
    hook = router.register_forward_hook(lambda *args: found.append(args[2].experts.tolist()))
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        y = recompute(lambda x: layer(x + (changed - 1) if found else x), x)
        y.square().sum().backward()
    hook.remove()
    counts = sum(call.args[0].dtype == torch.int64 for call in exchange.call_args_list)
    return found, router(changed).experts.tolist(), counts


@contextmanager
def choices(chosen: str) -> Iterator[None]:
    """Let all tokens go to the last experts, or to the first ones."""
    choose = Router._choose

    def replaced(self: Router, z: Tensor, counted: Tensor | None) -> Tensor:
        experts = choose(self, z, counted)
        some = torch.arange(self.config.topk)
        if chosen == "last":
            some = self.config.num_experts - 1 - some
        return some.expand_as(experts).contiguous()

    with mock.patch.object(Router, "_choose", replaced):
        yield


def train_with_choices(config: Mapping[str, Any], chosen: str) -> dict[str, Any]:
    with choices(chosen):
        return train(config)


# Faults of other engines


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """Apply one of the faults that a comparison with one process must find."""
    if name == "experts averaged over all data ranks":
        reduce = masters.reduce_data

        def averaged(gradients: Any, axis: Axis, reduction: Any, replica: Axis) -> float:
            factor = reduce(gradients, axis, reduction, replica)
            for slot in gradients.slots:
                if shard_of(slot.parameter).is_expert:
                    gradients.view(slot.parameter).mul_(axis.size / replica.size)
            return factor

        patch = mock.patch.object(masters, "reduce_data", averaged)
    elif name == "norm of the experts of data rank 0":
        patch = mock.patch.object(step_outcome, "replicas_of", lambda _, mesh: mesh.data)
    elif name == "experts counted on tensor rank 0":
        counted = step_outcome.is_counted

        def once(name: str, parameter: Tensor, mesh: Any, tied: Any, *, sliced: bool) -> bool:
            found = counted(name, parameter, mesh, tied, sliced=sliced)
            return found and (not shard_of(parameter).is_expert or mesh.tensor.rank == 0)

        patch = mock.patch.object(step_outcome, "is_counted", once)
    else:
        assert name == "auxiliary losses without the share of ignored labels"
        patch = mock.patch.object(router_module, "auxiliary_factor", return_value=1 / 4)
    with patch:
        yield


def train_mutant(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    with mutant(name):
        return train(config)


def replica_error(config: Mapping[str, Any]) -> str:
    """Return the error after a bit of an expert has changed on rank 2."""
    with in_fp64():
        engine = build(config)
    model, mesh = engine.steps.model, engine.mesh
    check_replicas(model, mesh)
    name = "layers.2.mlp.experts.up.weight"
    if mesh.rank == 2:
        model.parameters[name].data.view(-1)[3] += 1
    try:
        check_replicas(model, mesh)
    except ReplicaError as error:
        return str(error)
    return ""


# The dispatch alone


def kept_buffers() -> list[int]:
    """Return how many buffers of exchanges are kept in the forward, and after backward."""
    mesh, buffers = build_mesh(Topology(1, 2, 1, 2), torch.device("cpu")), list[StorageWeakRef]()
    start = dist.all_to_all_single

    def noted(received: Tensor, sent: Tensor, *args: Any, **options: Any) -> Any:
        buffers.extend(StorageWeakRef(x.untyped_storage()) for x in (received, sent))
        return start(received, sent, *args, **options)

    def kept() -> int:
        end = time.monotonic() + 5.0
        # A thread of gloo may hold them a little longer.
        while not all(b.expired() for b in buffers) and time.monotonic() < end:
            time.sleep(0.01)
        return sum(not b.expired() for b in buffers)

    tokens, experts, weights = _problem(mesh.data.rank, "any")
    with mock.patch.object(dist, "all_to_all_single", noted):
        dispatch = Dispatch(tokens.requires_grad_(), experts, EXPERTS, mesh.expert, mesh.tensor)
        found = [len(buffers), kept()] if (rows := dispatch.arrived()) is not None else []
        y = dispatch.combine(rows, weights.requires_grad_())
        found += [len(buffers), kept()]
        y.square().sum().backward()
        found += [len(buffers), kept()]
    return found


HIDDEN, EXPERTS, TOPK, TOKENS = 6, 4, 2, 9


def _problem(rank: int, chosen: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, their experts and weights; each data rank has other ones."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS + rank, HIDDEN, generator=generator, dtype=torch.float64)
    scores = torch.rand(len(tokens), EXPERTS, generator=generator)
    if chosen == "first":
        scores[:, TOPK:] = -1
    elif chosen == "one":
        scores[:, 1:] = torch.tensor([0.1, -1.0, -1.0])
        scores[:, 0] = 2
    weights, experts = scores.topk(TOPK)
    return tokens, experts, weights.double()


def dispatched(sizes: tuple[int, int, int], chosen: str) -> float:
    """Return the largest difference from the experts in one process, of results and gradients."""
    mesh = build_mesh(Topology(1, *sizes), torch.device("cpu"))
    generator = torch.Generator().manual_seed(99)
    matrix = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)

    def run(expert: Axis, tensor: Axis) -> tuple[Tensor, ...]:
        tokens, experts, weights = _problem(mesh.data.rank, chosen)
        tokens.requires_grad_()
        weights.requires_grad_()
        local, columns = EXPERTS // expert.size, HIDDEN // tensor.size
        own = matrix[expert.rank * local : (expert.rank + 1) * local]
        own = own[..., tensor.rank * columns : (tensor.rank + 1) * columns]
        dispatch = Dispatch(tokens, experts, EXPERTS, expert, tensor)
        rows = dispatch.arrived()
        rows = rows[:, tensor.rank * columns : (tensor.rank + 1) * columns]
        y = dispatch.combine(grouped_linear(rows, own, dispatch.routes.sizes), weights)
        y.square().sum().backward()
        return y.detach(), tokens.grad, weights.grad

    pairs = zip(run(mesh.expert, mesh.tensor), run(Axis("expert"), Axis("tensor")), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


# W within exchanges


def filled(
    config: Mapping[str, Any], filling: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Train with both configs; return the results, and how many jobs of W ran within exchanges."""
    plain, jobs = train(config), 0
    run_part, rates = WeightGradQueue.run_part, rates_for(None, Topology())
    # So slow that a part of W fits into the exchange of a few tokens.
    slow = replace(rates, exchange=1e7)

    def counted(self: WeightGradQueue, key: Any, share: float) -> None:
        nonlocal jobs
        before = len(self._queued[key])
        run_part(self, key, share)
        jobs += before - len(self._queued[key])

    with (
        mock.patch.object(WeightGradQueue, "run_part", counted),
        mock.patch.object(tensor_meter, "_FULL", slow),
    ):
        result = train(filling)
    return plain, result, jobs


# Records


def recorded(config: Mapping[str, Any], folder: str, steps: int) -> dict[str, Any]:
    """Train with an evaluation after each step, and close the run.

    Return the names of the files of the run, and the numbers about experts of each step.
    """
    path = Path(folder)
    with in_fp64():
        engine = build(dict(config) | {"checkpoint": {"save": folder, "overwrite": True}})
        for step in range(steps):
            has_data = engine.config.training.epochs is not None
            engine.train_batch(None if has_data else data(engine, step))
            engine.eval_batch(data(engine, 50 + step))
        engine.close()
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    numbers = [
        {name: value for name, value in row["extra"].items() if name.startswith("moe/")}
        for row in rows
        if row["kind"] == "train"
    ]
    return {"numbers": numbers, "kinds": [row["kind"] for row in rows]}


def tokens_in_records(config: Mapping[str, Any], folder: str, steps: int) -> Any:
    """Return the numbers of one process, and what its routers have chosen [step, layer, expert]."""
    counts: list[list[Tensor]] = []
    choose = Router._choose

    def kept(self: Router, z: Tensor, counted: Tensor | None) -> Tensor:
        experts = choose(self, z, counted)
        if self.training:
            counts[-1].append(experts.flatten().bincount(minlength=self.config.num_experts))
        return experts

    run = Engine.train_batch

    def step(self: Engine, *arguments: Any) -> float:
        counts.append([])
        return run(self, *arguments)

    with mock.patch.object(Router, "_choose", kept), mock.patch.object(Engine, "train_batch", step):
        found = recorded(config, folder, steps)
    # Each micro-batch passes all layers before the next one.
    by_step = [torch.stack([sum(each[0::2]), sum(each[1::2])]).tolist() for each in counts]
    return found["numbers"], by_step


def calls_in_a_step(config: Mapping[str, Any], folder: str) -> list[str]:
    """Return the collectives of the second step, by name."""
    names = ("all_reduce", "all_gather", "all_to_all_single", "broadcast")
    calls: list[str] = []
    with in_fp64(), ExitStack() as patches:
        engine = build(dict(config) | ({"checkpoint": {"save": folder}} if folder else {}))
        engine.train_batch(data(engine, 0))
        for name in names:
            original = getattr(dist, name)

            def counted(*args: Any, name: str = name, original: Any = original, **kw: Any) -> Any:
                calls.append(name)
                return original(*args, **kw)

            patches.enter_context(mock.patch.object(dist, name, counted))
        engine.train_batch(data(engine, 1))
    engine.close()
    return calls
