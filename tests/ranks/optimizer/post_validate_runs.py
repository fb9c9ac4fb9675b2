"""Functions that train a small GPT with and without post-validation, run on every rank."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.engine.engine import Engine
from pipemega.errors import LossScaleError, PipelineError
from pipemega.optimizer import PostValidatedStep
from pipemega.training import Trainer
from tests.ranks.checkpoint.checkpoint_runs import Sentences
from tests.ranks.checkpoint.checkpoint_runs import build as build_with_data
from tests.ranks.injected_faults import ACTIONS
from tests.ranks.training_runs import build, data

# Step number -> factor of its gradients, on rank 0 only.
Pushes = Mapping[int, float]


def push_gradients(engine: Engine, pushes: Pushes) -> None:
    """Multiply the gradients of some steps before the reduction."""
    step = engine.steps.optimizer_step
    assert step is not None
    original = step._reduce

    def reduce(samples: int) -> Any:
        if step.steps in pushes and engine.mesh.rank == 0:
            for flat in step.gradients.flats.values():
                flat.mul_(pushes[step.steps])
        return original(samples)

    step._reduce = reduce  # type: ignore[method-assign]


def seen_of(engine: Engine) -> dict[str, Any]:
    """Return everything on this rank that the next step depends on."""
    assert engine.steps.optimizer_step is not None
    state = copy.deepcopy(engine.steps.optimizer_step.state_dict())
    parameters = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    buffers = {n: b.clone() for n, b in engine.module.named_buffers()}
    flat = _flat({"state": state, "parameters": parameters, "buffers": buffers})
    return flat | {"counters": (engine.global_steps, engine.consumed_samples)}


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping):
        return {k: v for key in tree for k, v in _flat(tree[key], f"{path}/{key}").items()}
    return {path: tree.double().numpy() if isinstance(tree, Tensor) else repr(tree)}


def train(
    config: Mapping[str, Any],
    sync: Mapping[str, Any],
    *,
    steps: int = 6,
    pushes: Pushes | None = None,
    folder: str | None = None,
    read_norm: bool = False,
) -> dict[str, Any]:
    """Train `steps` steps, with `sync` merged into the pipeline section; evaluate after the third.

    Args:
        folder: save after the fourth step, train one more step and load.
        read_norm: rank 0 alone reads the norm after every second step.
    """
    config = {**config, "pipeline": {**config.get("pipeline", {}), **sync}}
    engine = build(config)
    push_gradients(engine, pushes or {})
    result: dict[str, Any] = {"loss": [], "reports": [], "waited": []}
    for step in range(steps):
        result["loss"].append(repr(engine.train_batch(data(engine, step))))
        result["waited"].append(not getattr(engine.steps.optimizer_step, "_unvalidated", None))
        if read_norm and step % 2 and engine.mesh.rank == 0:
            assert engine.get_global_grad_norm() is not None
        if step == 2:
            result["eval"] = engine.eval_batch(data(engine, 99))
        if step == 3 and folder is not None:
            path = engine.save_checkpoint(Path(folder))
            result["saved"] = path.name
            engine.train_batch(data(engine, 50))
            engine.load_checkpoint(Path(folder))
            engine.take_reports()
        result["reports"] += [_of(report) for report in engine.take_reports()]
    engine.settle()
    result["reports"] += [_of(report) for report in engine.take_reports()]
    last = engine.last_step
    assert last is not None
    # Only `take_reports` has the origin of inf and nan.
    assert _of(last) | {"origin": result["reports"][-1]["origin"]} == result["reports"][-1]
    assert engine.skipped_steps == last.skipped_steps
    result["rollbacks"] = last.rollbacks
    result["state"] = seen_of(engine)
    return result


def _of(report: Any) -> dict[str, Any]:
    """Return the fields as text, since nan != nan; `rollbacks` differs by design."""
    return {k: repr(v) for k, v in vars(report).items() if k != "rollbacks"}


def train_both(
    config: Mapping[str, Any], sync: Mapping[str, Any], **settings: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of (synchronous, post-validated) training."""
    folder = settings.pop("folder", None)
    folders = [None if folder is None else f"{folder}/{name}" for name in ("a", "b")]
    return (
        train(config, {"optimizer_sync": "fenced"}, folder=folders[0], **settings),
        train(
            config, {"optimizer_sync": "post_validate"} | dict(sync), folder=folders[1], **settings
        ),
    )


class RunningMean(nn.Module):
    """Adds the sum of the means of all its inputs, kept in a buffer as in batch norm."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total = self.total + x.detach().mean()
        y: Tensor = self.norm(self.linear(x)) + self.total
        return y


def train_with_buffers(sync: str) -> dict[str, Any]:
    """Train four steps of a model whose forwards change buffers; every step is clipped."""
    engine, *_ = initialize(
        PipelineModule([LayerSpec(RunningMean) for _ in range(4)], nn.functional.mse_loss),
        {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.01,
            "mesh": {"pipeline": 2},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
            "pipeline": {"schedule": "zb-h1", "optimizer_sync": sync, "optimizer_sync_after": 0},
        },
    )
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        batch = [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(4)]
        losses.append(engine.train_batch(iter(batch)))
    engine.settle()
    assert engine.last_step is not None
    return {
        "loss": losses,
        "state": seen_of(engine),
        "rollbacks": engine.last_step.rollbacks,
    }


def overflow(config: Mapping[str, Any], at: int) -> tuple[str, dict[str, Any], list[float]]:
    """Return the error of an inf gradient in step `at`, the state after it and two more losses."""
    engine = build(config)
    push_gradients(engine, {at: float("inf")})
    message = ""
    for step in range(at + 2):
        try:
            engine.train_batch(data(engine, step))
        except (PipelineError, LossScaleError) as error:
            message = str(error)
            break
    state = seen_of(engine)
    return message, state, [engine.train_batch(data(engine, 20 + step)) for step in range(2)]


def log_of(
    config: Mapping[str, Any], sync: str, folder: str, pushes: Pushes
) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl after a whole run of the Trainer."""
    pipeline = {**config["pipeline"], "optimizer_sync": sync, "optimizer_sync_after": 0}
    save = {"save": folder, "interval": 3}
    engine = build_with_data({**config, "pipeline": pipeline, "checkpoint": save}, "float32")
    push_gradients(engine, pushes)
    Trainer(engine, Sentences()).fit()
    if engine.mesh.rank > 0:
        return []
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def fail_in_optimizer_step(config: Mapping[str, Any], what: str, rank: int) -> None:
    """Inject the fault `what` on `rank` in its second optimizer step, before the all-reduce."""
    engine = build_with_data(config, "float32")
    step = engine.steps.optimizer_step
    assert step is not None
    original = step._reduce

    def reduce(samples: int) -> Any:
        if step.steps == 1 and engine.mesh.rank == rank:
            ACTIONS[what]()
        return original(samples)

    step._reduce = reduce  # type: ignore[method-assign]
    # From a dataset: reading from an iterator would synchronize the ranks before each step.
    for _ in range(4):
        engine.train_batch()


def backup_bytes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of the backup and the number of trainable parameters of this rank."""
    engine = build(config)
    for step in range(2):
        engine.train_batch(data(engine, step))
    step_ = engine.steps.optimizer_step
    assert isinstance(step_, PostValidatedStep)
    return step_._backup.bytes, sum(t.numel() for t in step_.masters.named.values())
