"""Moves the stages of a run, and compares it with one that loads a checkpoint under the new cut."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from pipemega.config import load
from pipemega.distributed.exchanges import Piece, TensorInfo, exchange
from pipemega.distributed.mesh import Axis
from pipemega.engine.engine import Engine
from pipemega.engine.train_step import PlanChange, StepFeature, TrainStep
from pipemega.errors import NonFiniteError
from pipemega.hf.hf_module import from_pretrained
from pipemega.models import GPTConfig, gpt
from pipemega.optimizer.param_groups import pack
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.schedules import build_plan
from tests.ranks.lora.hf_runs import config_of, microbatch
from tests.ranks.training_runs import NUM_MICROBATCHES, VOCAB, data, settings

BEFORE, AFTER, WIDTH = 2, 2, 6
# A move to two stages per rank.
TO_V: Any = {"bounds": ([0, 5, 8], [0, 2, 4, 6, 8]), "schedules": (("1f1b", 1), ("zb-v", 2))}

Schedule = tuple[str, int]  # name, chunks


class Plain(nn.Module):
    """An affine layer with running statistics, as in a residual net."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.requires_grad_(False)


def small_net() -> PipelineModule:
    """Return eight layers: one matrix is tied over three of them, one weight is frozen."""
    tied = [TiedLayerSpec("matrix", nn.Linear, WIDTH, WIDTH) for _ in range(3)]
    plain = [LayerSpec(Plain) for _ in range(4)]
    layers = [tied[0], plain[0], plain[1], LayerSpec(Frozen), tied[1], *plain[2:], tied[2]]
    return PipelineModule(layers, F.mse_loss)


def traced_net() -> PipelineModule:
    def build() -> nn.Module:
        return nn.Sequential(*(Plain() for _ in range(8)))

    return PipelineModule.from_module(build, torch.zeros(2, WIDTH), loss_fn=F.mse_loss)


class Switched(nn.Linear):
    """A linear layer with a dropout, and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


def switched_net() -> PipelineModule:
    return PipelineModule([LayerSpec(Switched) for _ in range(8)], F.mse_loss)


def hf_net() -> PipelineModule:
    config = config_of("qwen3")
    config.num_hidden_layers, config.layer_types = 6, ["full_attention"] * 6
    return from_pretrained(config, pretrained=False)


def built_net() -> PipelineModule:
    return PipelineModule([nn.Linear(WIDTH, WIDTH) for _ in range(8)], F.mse_loss)


NETS: Mapping[str, Callable[[], PipelineModule]] = {
    "small": small_net,
    "traced": traced_net,
    "built": built_net,
    "switched": switched_net,
    "hf": hf_net,
}


@dataclass(frozen=True)
class Move:
    """A move from one cut to another.

    Args:
        bounds: before and after.
        schedules: before and after.
        changes: changes to the config.
        model: changes to the section `model` of a "gpt".
        net: "gpt", or a key of `NETS`.
        arguments: returns further arguments of `initialize`.
    """

    bounds: tuple[list[int], list[int]] = ([0, 5, 8], [0, 3, 8])
    schedules: tuple[Schedule, Schedule] = (("1f1b", 1), ("zb-h1", 1))
    changes: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    net: str = "gpt"
    arguments: Callable[[], Mapping[str, Any]] = dict

    def build(self, at: int) -> Engine:
        """Return an engine with the first or the second cut."""
        name, chunks = self.schedules[at]
        pipeline = {"partition": self.bounds[at], "schedule": name, "chunks": chunks}
        changes = {"mesh": {"pipeline": 2}, "gradient_clipping": 0.5, **self.changes}
        changes["pipeline"] = {**pipeline, **self.changes.get("pipeline", {})}
        changes["model"] = {"num_layers": 4, **self.model} if self.net == "gpt" else None
        config = load(settings(**changes))
        net = gpt(GPTConfig.of(config, VOCAB)) if self.net == "gpt" else NETS[self.net]()
        return initialize(net, config, **self.arguments())[0]

    def plan(self, engine: Engine) -> Plan:
        name, chunks = self.schedules[1]
        count = NUM_MICROBATCHES // engine.mesh.data.size
        return lower(build_plan(name, engine.mesh.pipeline.size, count, chunks))

    def batches(self, engine: Engine, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self.net == "gpt":
            yield from data(engine, step)
            return
        if self.net == "hf":
            yield from (microbatch(step, m) for m in range(engine.batch.num_microbatches))
            return
        for tokens, _ in data(engine, step):
            x = tokens[:, :WIDTH] / VOCAB
            yield x, x.flip(1)


def all_moved_and_loaded(moves: Sequence[Move], folder: str) -> list[dict[str, Any]]:
    return [moved_and_loaded(move, f"{folder}/{number}") for number, move in enumerate(moves)]


def moved_and_loaded(move: Move, folder: str) -> dict[str, Any]:
    """Return what differs between the two runs, and the log of the move."""
    moving = move.build(0)
    before = moving.optimizer, moving.module, moving.lr_scheduler
    for step in range(BEFORE):
        moving.train_batch(move.batches(moving, step))
    moving.save_checkpoint(folder)
    with logged() as lines:
        plan, bounds = move.plan(moving), tuple(move.bounds[1])
        assert moving.steps.mover is not None
        assert moving.steps.optimizer_step is not None
        # Every rank has an iterator, whatever it has read before.
        obstacle = moving.steps.mover.obstacle(
            moving.steps.model, moving.steps.optimizer_step, bounds
        )
        moving.steps._move_stages(plan, bounds)
    found = after(move, moving)
    moving.finish_saving()
    loading = move.build(1)
    loading.load_checkpoint(folder)
    wanted = after(move, loading)
    now = moving.optimizer, moving.module, moving.lr_scheduler
    return {
        "obstacle": obstacle,
        "different": different(found, wanted),
        "compared": len(wanted),
        "log": [line for line in lines if "moved" in line],
        "same objects": all(one is other for one, other in zip(before, now, strict=True)),
        "layers": [stage.extra_repr() for stage in moving.module],
    }


@contextmanager
def logged() -> Iterator[list[str]]:
    """Yield the list to which the log lines of the block are added."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipemega").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("pipemega").removeHandler(handler)


def after(move: Move, engine: Engine) -> dict[str, Any]:
    """Train some steps; return the losses and the whole state of this rank."""
    found: dict[str, Any] = {"steps": engine.global_steps, "random": torch.get_rng_state()}
    assert engine.steps.optimizer_step is not None
    assert engine.optimizer is not None
    for step in range(BEFORE, BEFORE + AFTER):
        found[f"loss {step}"] = engine.train_batch(move.batches(engine, step))
        engine.settle()
        assert engine.last_step is not None
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        found[f"report {step}"] = engine.last_step.grad_norm, engine.last_step.loss_scale, rates
    for name, entry in pack(
        engine.steps.optimizer_step.optimizer, engine.steps.optimizer_step.masters
    ).items():
        found |= {f"{kind} of {name}": value for kind, value in entry.items()}
    found |= {f"parameter {n}": p.detach() for n, p in engine.steps.model.parameters.items()}
    found |= {f"buffer {n}": b for n, b in engine.steps.model.persistent_buffers.items()}
    found["eval"] = engine.eval_batch(move.batches(engine, 99))
    found["output"] = engine.infer([batch[0] for batch in move.batches(engine, 98)])
    engine.check_replicas()
    return found


def different(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ in a bit."""
    keys = sorted({*found, *wanted})
    return [key for key in keys if not _equal(found.get(key), wanted.get(key))]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


# Arguments of `initialize`


def own_optimizer() -> dict[str, Any]:
    """Return an optimizer with one more group, and a scheduler over it."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.RAdam([{"params": [], "lr": 0.003}, *groups])

    return {"optimizer": make, "lr_scheduler": partial(_exponential, gamma=0.9)}


def _exponential(optimizer: torch.optim.Optimizer, gamma: float) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)


# Runs whose stages cannot move


def obstacle(case: str) -> tuple[str, list[str], bool]:
    """Return why the stages stay, their layers, and whether training goes on."""
    cases: dict[str, Move] = {
        "built": Move(net="built"),
        "reader": Move(bounds=([0, 2, 4, 6, 8], [0, 5, 8]), schedules=(("zb-v", 2), ("1f1b", 1))),
    }
    move = cases.get(case, Move())
    engine = move.build(0)
    engine.train_batch(move.batches(engine, 0))
    reason = engine.steps.obstacle_to_move(move.plan(engine), tuple(move.bounds[1]))
    loss = engine.train_batch(move.batches(engine, 1))
    return reason, [stage.extra_repr() for stage in engine.module], loss > 0


def obstacles_by_caller() -> list[str]:
    """Return why the stages stay after a hook, a setting, or a buffer of a layer was changed."""
    move = Move(net="switched")
    engine = move.build(0)
    engine.train_batch(move.batches(engine, 0))
    arguments = move.plan(engine), tuple(move.bounds[1])
    reasons = [engine.steps.obstacle_to_move(*arguments)]
    layer = engine.module[0].layers["7"] if engine.mesh.rank == 1 else Switched()
    hook = layer.register_forward_hook(lambda *_: None)
    reasons.append(engine.steps.obstacle_to_move(*arguments))
    hook.remove()
    layer.dropout.p = 0.5
    reasons.append(engine.steps.obstacle_to_move(*arguments))
    layer.dropout.p = 0.0
    reasons.append(engine.steps.obstacle_to_move(*arguments))
    layer.calls += 1
    return [*reasons, engine.steps.obstacle_to_move(*arguments)]


# What the caller uses in the step of a move and after it


def used_over_a_move(folder: str) -> dict[str, Any]:
    """Move after step 1, whose outputs are returned; step 2 is profiled, then saved and loaded."""
    profiler = {"enabled": True, "profile_step": 2, "output_file": f"{folder}/profile.txt"}
    move = Move(**TO_V, net="switched", changes={"flops_profiler": profiler})
    engine = move.build(0)
    callback = MoveAfterStep(move.plan(engine), move.bounds[1])
    engine.add_feature(callback)
    outputs = engine.train_batch(move.batches(engine, 0), return_outputs=True)[1]
    moved = engine.steps.model.bounds
    engine.train_batch(move.batches(engine, 1))
    engine.save_checkpoint(folder)
    saved = engine.parameter_state()
    other = replace(move, bounds=([0, 2, 8], move.bounds[1]), changes={}).build(0)
    other.load_checkpoint(folder)
    loaded = other.parameter_state()
    profile = engine.steps.profiler and engine.steps.profiler.profile
    return {
        "outputs": None if outputs is None else len(outputs),
        "obstacle": callback.obstacle,
        "bounds": moved,
        "profiled": profile and profile.step,
        "differs": [name for name in saved if not torch.equal(saved[name], loaded[name])],
        "compared": len(saved),
    }


def nonfinite_step_of_a_move() -> tuple[str, list[int], int, float]:
    """Move after a step that post-validation undoes; return its error, and the step after it."""
    # A net without buffers: the search for the origin of nan writes them back.
    move = Move(**TO_V, net="small", changes={"pipeline": {"optimizer_sync": "post_validate"}})
    engine = move.build(0)
    engine.add_feature(MoveAfterStep(move.plan(engine), move.bounds[1]))
    batch = [(x * float("nan"), y) for x, y in move.batches(engine, 0)]
    message = ""
    try:
        engine.train_batch(iter(batch))
    except NonFiniteError as error:
        message = str(error)
    loss = engine.train_batch(move.batches(engine, 1))
    engine.settle()
    return message, list(engine.steps.model.bounds), engine.global_steps, loss


# Schedule `auto`


class Slow(nn.Module):
    """A layer whose time cannot be counted."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            time.sleep(self.seconds)
        return x + torch.tanh(self.linear(x))


def tuned(
    schedule: str, cache: str, steps: int, changes: Mapping[str, Any], *, hook: bool = False
) -> dict[str, Any]:
    """Train four layers, of which the first two are slow; return what the ranks did."""
    with logged() as lines:
        engine, optimizer = _slow_engine(schedule, cache, changes)
        if hook and engine.mesh.rank == 1:
            engine.module[0].register_forward_hook(lambda *_: None)
        losses, stages = [], []
        for _ in range(steps):
            stages.append(engine.steps.model.bounds)
            losses.append(engine.train_batch())
        state = {name: p.numpy() for name, p in engine.parameter_state().items()}
    log = [line for line in lines if "schedule auto" in line or "moved" in line]
    follows = optimizer is engine.optimizer
    return {"losses": losses, "stages": stages, "state": state, "log": log, "follows": follows}


def _slow_engine(
    schedule: str, cache: str, changes: Mapping[str, Any]
) -> tuple[Engine, torch.optim.Optimizer | None]:
    os.environ["XDG_CACHE_HOME"] = cache
    layers = [LayerSpec(Slow, 0.006 if number < 2 else 0.0) for number in range(4)]
    x = torch.rand(8 * 4, WIDTH, generator=torch.Generator().manual_seed(3))
    samples = list(zip(x, x.flip(1), strict=True))
    changes = {"model": None, "mesh": {"pipeline": 2}, **changes}
    config = settings(train_batch_size=8, **changes)
    # Without a limit of 1F1B's bytes: fewer slow layers on a rank means more layers on the other.
    limit = {"memory_limit": 1e9, "chunks": 1} if schedule == "auto" else {}
    config["pipeline"] = {"schedule": schedule, **limit, **config.get("pipeline", {})}
    return initialize(PipelineModule(layers, F.mse_loss), config, samples)[:2]


def tuned_in_a_ramp_up(schedule: str, cache: str, folder: str, measured: int) -> dict[str, Any]:
    """Return twice to the ramp-up: within the measured steps, and after the stages have moved.

    Steps of 2, 2, 4, 6 and then 8 samples.

    Args:
        folder: the folder for the checkpoints of step 2 and, at the end, of step 3.
        measured: steps of a full batch after which schedule `auto` moves the stages.
    """
    changes = {"training": {"rampup_batch_size": [2, 2, 12]}, "train_micro_batch_size_per_gpu": 1}
    engine, _ = _slow_engine(schedule, cache, changes)
    losses, stages, sizes = list[float](), list[Any](), list[int]()

    def train(steps: int) -> None:
        for _ in range(steps):
            stages.append(engine.steps.model.bounds)
            losses.append(engine.train_batch())
            sizes.append(engine.step_samples)

    train(2)
    engine.save_checkpoint(f"{folder}/2")
    train(2 + measured - 2)
    engine.load_checkpoint(f"{folder}/2")
    train(2 + 2 + 2)
    engine.load_checkpoint(f"{folder}/2")
    train(1)
    engine.save_checkpoint(f"{folder}/3")
    train(3)
    state = {name: p.numpy() for name, p in engine.parameter_state().items()}
    return {"losses": losses, "stages": stages, "sizes": sizes, "state": state}


def resumed_in_a_ramp_up(schedule: str, cache: str, folder: str, steps: int) -> dict[str, Any]:
    """Train from the checkpoint of step 3 that `tuned_in_a_ramp_up` has saved."""
    changes = {"training": {"rampup_batch_size": [2, 2, 12]}, "train_micro_batch_size_per_gpu": 1}
    engine, _ = _slow_engine(schedule, cache, changes)
    engine.load_checkpoint(f"{folder}/3")
    losses = [engine.train_batch() for _ in range(steps)]
    state = {name: p.numpy() for name, p in engine.parameter_state().items()}
    return {"losses": losses, "state": state}


class MoveAfterStep(StepFeature):
    """Lets the engine move its stages after a step."""

    obstacle = ""

    def __init__(self, plan: Plan, bounds: Sequence[int]) -> None:
        self._plan, self._bounds = plan, tuple(bounds)

    def next_change(self, step: TrainStep, trace: object) -> PlanChange | None:
        if step.plan is self._plan:
            return None
        return PlanChange(step.plan, (self._plan, self._bounds))

    def on_change(self, change: PlanChange, obstacle: str) -> None:
        self.obstacle = obstacle


def fail_in_move() -> None:
    move = Move()
    engine = move.build(0)
    assert engine.steps.mover is not None
    if engine.mesh.rank == 1:

        def fail(*_: Any) -> int:
            raise ValueError("no memory for the new stages")

        engine.steps.mover._fill = fail  # type: ignore[method-assign]
    engine.add_feature(MoveAfterStep(move.plan(engine), move.bounds[1]))
    engine.train_batch(move.batches(engine, 0))


def moves_of_a_hooked_model(cache: str, steps: int) -> list[str]:
    """Return what schedule `auto` logs about stages that a hook keeps where they are."""
    found = tuned("auto", cache, steps, {}, hook=True)
    assert len(set(found["stages"])) == 1
    return [line for line in found["log"] if "stages" in line]


# The exchange of bytes


def exchanged(largest: int) -> tuple[list[list[int]], list[int]]:
    """Return what this rank of three has after an exchange, and the bytes of each all-to-all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = Axis("all", tuple(range(size)), rank, dist.group.WORLD)
    held = {("x", str(rank)): torch.arange(5, dtype=torch.int16) + 10 * rank}
    wanted: dict[tuple[str, str], TensorInfo] = {}
    pieces = []
    for source in range(size):
        key, target = ("x", str(source)), (source + 1) % size
        # The last elements go to the next rank, the first ones stay.
        pieces += [Piece(key, source, source, 0, 0, 4, "cpu")]
        pieces += [Piece(key, source, target, 4, 0, 6, "cpu")]
        if rank in (source, target):
            wanted[key] = TensorInfo((2 if rank == source else 3,), torch.int16, "cpu")
    sizes: list[int] = []
    send = dist.all_to_all_single

    def counted(output: Tensor, data: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(data.nbytes)
        return send(output, data, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        found = exchange(pieces, held, wanted, axis, torch.device("cpu"), largest)
    finally:
        dist.all_to_all_single = send
    assert not held
    return [found[key].tolist() for key in sorted(found)], sizes
