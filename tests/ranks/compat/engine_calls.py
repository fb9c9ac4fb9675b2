"""The calls of DeepSpeed's pipeline engine on each rank, and what they return."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipemega.compat.deepspeed as deepspeed
from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.errors import ConfigError, DataError
from tests.ranks.compat.deepspeed_scripts import (
    CLASSES,
    MICRO,
    WIDTH,
    Case,
    ds_config,
    samples,
    vector,
)


class ModelPipe(deepspeed.pipe.PipelineModule):
    """A subclass with arguments of its own, and attributes before and after the constructor."""

    def __init__(self, depth: int, scale: float = 1.0, **kwargs: Any) -> None:
        self.scale, self.specs = scale, []
        spec = deepspeed.pipe.LayerSpec
        for _ in range(depth):
            self.specs.append(spec(nn.Linear, WIDTH, WIDTH))
            self.specs.append(torch.tanh)
        self.specs.append(spec(nn.Linear, WIDTH, CLASSES))
        super().__init__(layers=self.specs, loss_fn=self.scaled_loss, **kwargs)
        self.depth = depth

    def scaled_loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels) * self.scale


def micro_batches(count: int) -> list[Any]:
    case = Case(list, None, vector)
    data = samples(case, count * MICRO)
    starts = range(0, len(data), MICRO)
    return [torch.utils.data.default_collate(data[at : at + MICRO]) for at in starts]


def build(num_pp: int, num_dp: int, **changes: Any) -> tuple[Any, Any]:
    from pipemega.compat.deepspeed.process_topology import PipeModelDataParallelTopology

    deepspeed.init_distributed()
    torch.manual_seed(2)
    topology = PipeModelDataParallelTopology(num_pp=num_pp, num_mp=1, num_dp=num_dp)
    net = ModelPipe(2, scale=2.0, topology=topology)
    engine, *_ = deepspeed.initialize(
        args=Namespace(local_rank=0), model=net, config=ds_config(**changes)
    )
    return net, engine


def grid_calls(num_pp: int, num_mp: int, num_dp: int) -> dict[str, Any]:
    """Return (rank, size, ranks of the group) for each kind of groups of a grid."""
    from pipemega.compat.deepspeed.process_topology import (
        PipelineParallelGrid,
        PipeModelDataParallelTopology,
    )

    deepspeed.init_distributed()
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp, num_mp, num_dp))
    found: dict[str, Any] = {
        kind: (
            getattr(grid, f"get_{kind}_parallel_rank")(),
            getattr(grid, f"get_{kind}_parallel_world_size")(),
            dist.get_process_group_ranks(getattr(grid, f"get_{kind}_parallel_group")()),
        )
        for kind in ("pipe", "data", "slice", "model")
    }
    found["ids"] = grid.get_global_rank(), grid.get_stage_id(), grid.get_data_parallel_id()
    found["data ranks"] = grid.get_data_parallel_group_ranks()
    return found


def engine_calls(folder: str) -> dict[str, Any]:
    """Call the methods of the engine on two stages; return what they say."""
    net, engine = build(2, 1)
    batches = micro_batches(4)
    found: dict[str, Any] = {
        "place": (engine.stage_id, engine.is_first_stage(), engine.is_last_stage()),
        "grid": (
            engine.grid.get_data_parallel_world_size(),
            engine.grid.get_pipe_parallel_rank(),
            engine.mpu.get_model_parallel_world_size(),
            engine.grid.stage_to_global(1),
        ),
        "batch": (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
            engine.micro_batches,
        ),
        "module": (engine.module is net, net.depth, isinstance(engine, deepspeed.PipelineEngine)),
        "lr": engine.get_lr(),
    }
    losses = engine.eval_batch(iter(batches), reduce_output=None)
    mean, logits = engine.eval_batch(iter(batches), return_logits=True)
    outputs = engine.eval_batch(iter(batches), compute_loss=False)
    one = engine.eval_batch(iter(batches), num_micro_batches=1)
    found["evaluation"] = mean.item(), one.item(), None if losses is None else [*map(float, losses)]
    found["outputs"] = [None if x is None else tuple(x.shape) for x in (logits, outputs)]
    loader = deepspeed.utils.RepeatingLoader(batches)
    engine.set_dataloader(loader)
    loss = engine.train_batch()
    found["loss"] = type(loss) is Tensor, loss.item()
    engine.set_batch_fn(lambda pair: (pair["x"], pair["y"]))
    found["batch_fn"] = engine.train_batch(data_iter=named(batches)).item()
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
    engine.train_batch(data_iter=named(batches))
    found["lr after a step"] = engine.get_lr()
    found["steps"] = engine.global_steps, engine.global_samples
    found["norm"] = engine.get_global_grad_norm() > 0
    found |= checkpoint_calls(engine, folder)
    return found


def named(batches: list[Any]) -> Iterator[Any]:
    for x, y in batches:
        yield {"x": x, "y": y}


def checkpoint_calls(engine: Any, folder: str) -> dict[str, Any]:
    """Save, change and load; return what the calls return."""
    client = {"args": Namespace(lr=0.1), "order": np.arange(3, dtype=np.uint32), "best": 1.5}
    nothing = engine.load_checkpoint(f"{folder}/empty")
    saved = engine.save_checkpoint(folder, tag=7, client_state=client)
    before = engine.parameter_state()
    engine.train_batch(data_iter=named(micro_batches(4)))
    path, state = engine.load_checkpoint(folder)
    after = engine.parameter_state()
    return {
        "nothing": nothing,
        "saved": saved,
        "path": path,
        "client": (state["args"].lr, state["order"].tolist(), state["order"].dtype.name),
        "restored": all(torch.equal(before[name], after[name]) for name in before),
        "steps after loading": engine.global_steps,
    }


def other_shapes() -> list[float]:
    """Train with other numbers of samples after `reset_activation_shape`."""
    _, engine = build(2, 1)
    losses = [engine.train_batch(iter(micro_batches(4))).item()]
    engine.reset_activation_shape()
    small = [(x[:1], y[:1]) for x, y in micro_batches(4)]
    return [*losses, engine.train_batch(iter(small)).item()]


def refusals() -> list[str]:
    """Make calls that are refused on two ranks; return the messages."""
    net, engine = build(2, 1)
    spec = deepspeed.pipe.LayerSpec
    calls = [
        lambda: engine(torch.zeros(1)),
        lambda: engine.set_train_batch_size(16),
        lambda: engine.load_checkpoint("x", custom_load_fn=print),
        lambda: engine.eval_batch(iter(()), reduce_output="sum"),
        lambda: net.compile(),
        lambda: deepspeed.pipe.PipelineModule([spec(nn.Linear, 2, 2)] * 3, num_stages=4),
        lambda: deepspeed.initialize(model=net, config=ds_config(mesh={"pipeline": 1})),
        lambda: deepspeed.initialize(
            model=net, config=ds_config(pipeline={"schedule": "interleaved"})
        ),
        lambda: deepspeed.initialize(model=net, config=ds_config(), mpu=object()),
        lambda: deepspeed.initialize(
            model=net, config=ds_config(), optimizer=torch.optim.SGD([torch.zeros(1)], lr=1.0)
        ),
    ]
    engine.micro_batches += 1
    names = [lambda: engine.no_sync(), lambda: engine.no_such]
    calls += [lambda: engine.train_batch(iter(())), *names]
    messages = []
    for call in calls:
        try:
            call()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("no error")
    return messages


class Recomputed(nn.Linear):
    """Counts its forwards."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x)


class Kept(Recomputed):
    """A layer whose class is not checkpointable."""


def counted_forwards() -> tuple[dict[str, int], bool]:
    """Train a step with checkpointable_layers; return the forwards by class.

    Also whether an error of a constructor names the layer.
    """
    deepspeed.init_distributed()
    spec = deepspeed.pipe.LayerSpec
    layers = [
        spec(Recomputed, WIDTH, WIDTH),
        spec(Kept, WIDTH, WIDTH),
        spec(nn.Linear, WIDTH, CLASSES),
    ]
    net = deepspeed.pipe.PipelineModule(
        layers,
        num_stages=1,
        loss_fn=nn.CrossEntropyLoss(),
        activation_checkpoint_interval=1,
        checkpointable_layers=["Recomputed"],
    )
    engine, *_ = deepspeed.initialize(
        model=net, config=ds_config(), model_parameters=net.parameters()
    )
    engine.train_batch(iter(micro_batches(4)))
    counts = {type(m).__name__: m.forwards for m in net.children() if isinstance(m, Recomputed)}
    try:
        deepspeed.pipe.PipelineModule([spec(nn.Linear, "x", 2)], num_stages=1)
    except ConfigError as error:
        return counts, "LayerSpec(Linear, 'x', 2) could not be built" in str(error)
    return counts, False


def different_samples(part: str) -> str:
    """Train on micro-batches of which each stage draws `part` at random; return the error."""
    _, engine = build(2, 1)
    own = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        (torch.randn(inputs.shape, generator=own), labels)
        if part == "inputs"
        else (inputs, torch.randint(CLASSES, labels.shape, generator=own))
        for inputs, labels in micro_batches(4)
    ]
    try:
        engine.train_batch(iter(batches))
    except DataError as error:
        return str(error)
    return ""


def plan_of_auto() -> bool:
    """Return whether schedule `auto` has the plan of a native engine with the same stages."""
    net, engine = build(2, 1, pipeline={"schedule": "auto"})
    data = micro_batches(8)
    engine.train_batch(iter(data))
    layers = [layer for _ in range(2) for layer in (LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh)]
    layers.append(LayerSpec(nn.Linear, WIDTH, CLASSES))
    # The same operations: `auto` counts them.
    same = PipelineModule(layers, lambda y, t: nn.functional.cross_entropy(y, t) * 2.0)
    pipeline = {"schedule": "auto", "partition": list(net.parts)}
    settings = {**ds_config(), "mesh": {"pipeline": 2}, "pipeline": pipeline}
    native, *_ = initialize(same, settings, example=data[0])
    plans = engine.pipemega_engine.plan, native.plan
    return bool(plans[0] == plans[1] and plans[0].name == "auto")
