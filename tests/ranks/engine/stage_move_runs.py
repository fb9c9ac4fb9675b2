"""Moves the stages of a small GPT in a run, and compares it with one that loads a checkpoint."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipemega.engine.engine import Engine
from pipemega.optimizer.state_by_name import pack
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.schedules import build_plan
from tests.ranks.training_runs import NUM_MICROBATCHES, build, data, settings

BEFORE, AFTER = 2, 2  # steps


@dataclass(frozen=True)
class Move:
    """A move from one cut to another.

    Args:
        bounds: before and after.
        schedules: before and after; (name, chunks).
        changes: of the config.
    """

    bounds: tuple[list[int], list[int]] = ([0, 5, 8], [0, 3, 8])
    schedules: tuple[tuple[str, int], tuple[str, int]] = (("1f1b", 1), ("zb-h1", 1))
    changes: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    def config(self, at: int) -> dict[str, Any]:
        name, chunks = self.schedules[at]
        # Groups of blocks, so that no stage of the config has fewer layers than it needs.
        pipeline = {"partition": self.bounds[at], "schedule": name}
        if chunks > 1:
            pipeline["chunks"] = chunks
        # A plan with I and W may follow, as with schedule `auto`.
        model = {"num_layers": 4}
        whole = {"mesh": {"pipeline": 2}, "model": model, "gradient_clipping": 0.5}
        whole |= {key: value for key, value in self.changes.items() if key != "pipeline"}
        whole["pipeline"] = {**pipeline, **self.changes.get("pipeline", {})}
        return settings(**whole)

    def plan(self, engine: Engine) -> Plan:
        name, chunks = self.schedules[1]
        ranks = engine.mesh.pipeline.size
        count = NUM_MICROBATCHES // engine.mesh.data.size
        return lower(build_plan(name, ranks, count, chunks))


def moved_and_loaded(move: Move, folder: str) -> dict[str, Any]:
    """Return what differs between the two runs, and the log of the move."""
    torch.set_default_dtype(getattr(torch, move.dtype))
    try:
        return _moved_and_loaded(move, folder)
    finally:
        torch.set_default_dtype(torch.float32)


def all_moved_and_loaded(moves: Sequence[Move], folder: str) -> list[dict[str, Any]]:
    return [moved_and_loaded(move, f"{folder}/{number}") for number, move in enumerate(moves)]


def _moved_and_loaded(move: Move, folder: str) -> dict[str, Any]:
    moving = build(move.config(0))
    optimizer, module, schedule = moving.optimizer, moving.module, moving.lr_scheduler
    for step in range(BEFORE):
        moving.train_batch(data(moving, step))
    moving.save_checkpoint(folder)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipemega").addHandler(handler)
    try:
        obstacle = moving._move_stages(move.plan(moving), move.bounds[1])
    finally:
        logging.getLogger("pipemega").removeHandler(handler)
    same_objects = moving.optimizer is optimizer and moving.lr_scheduler is schedule
    found = after(moving)
    loading = build(move.config(1))
    loading.load_checkpoint(folder)
    wanted = after(loading)
    return {
        "obstacle": obstacle,
        "different": different(found, wanted),
        "compared": len(wanted),
        "log": [line for line in lines if "moved" in line],
        "same objects": same_objects and moving.module is module,
        "layers": [stage.extra_repr() for stage in module],
    }


def after(engine: Engine) -> dict[str, Any]:
    """Train some steps; return the losses and the whole state of this rank."""
    found: dict[str, Any] = {"steps": engine.global_steps}
    found["random"] = torch.get_rng_state()
    assert engine._step is not None
    for step in range(BEFORE, BEFORE + AFTER):
        found[f"loss {step}"] = engine.train_batch(data(engine, step))
        assert engine.last_step is not None
        found[f"norm {step}"] = engine.last_step.grad_norm
        assert engine.optimizer is not None
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        found[f"scale and rates {step}"] = engine.last_step.loss_scale, rates
    engine.settle()
    for name, entry in pack(engine._step.optimizer, engine._step.masters).items():
        found |= {f"{kind} of {name}": value for kind, value in entry.items()}
    found |= {f"parameter {n}": p.detach() for n, p in engine._model.parameters.items()}
    found |= {f"buffer {n}": b for n, b in engine._model.persistent_buffers.items()}
    found["eval"] = engine.eval_batch(data(engine, 99))
    found["output"] = engine.infer([batch[0] for batch in data(engine, 98)])
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
