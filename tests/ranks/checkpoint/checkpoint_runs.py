"""Functions for the rank pool: runs that save checkpoints, fail while saving, and resume."""

import gc
import logging
import os
import random
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule
from pipemega.checkpoint import newest
from pipemega.config import load
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import initialize
from pipemega.errors import CheckpointError
from pipemega.models import GPTConfig, gpt
from tests.ranks.small_models import squared_error
from tests.ranks.training_runs import LENGTH, VOCAB

BEFORE, AFTER = 3, 3


class Sentences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random tokens; an epoch is not a whole number of steps."""

    fingerprint = "forty random sentences"

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCAB, (LENGTH + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[: index % 3] = -100
        return tokens[:-1], labels


def build(config: Mapping[str, Any], dtype: str) -> Engine:
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        loaded = load(config)
        engine, *_ = initialize(gpt(GPTConfig.of(loaded, VOCAB)), loaded, Sentences())
        return engine
    finally:
        torch.set_default_dtype(torch.float32)


def steps(engine: Engine, count: int) -> dict[str, Any]:
    """Train `count` steps; return all their results and the state after them, for `==`."""
    seen: dict[str, Any] = {"steps": []}
    for _ in range(count):
        loss = engine.train_batch()
        last = engine.last_step
        assert last is not None
        # As text, since nan is not nan.
        seen["steps"].append(
            (repr(loss), repr(last.grad_norm), last.loss_scale, last.learning_rate)
        )
    assert engine.loader is not None
    seen["parameters"] = {
        name: p.view(-1).view(torch.uint8).numpy().tobytes()
        for name, p in engine.parameter_state().items()
    }
    seen["counters"] = (engine.global_steps, engine.consumed_samples, engine.skipped_steps)
    seen["loader"] = engine.loader.state_dict()
    seen["draws"] = (torch.rand(2).tolist(), numpy.random.rand(2).tolist(), random.random())
    return seen


def seed_streams(seed: int) -> None:
    """Seed the global generators, with another seed on each rank."""
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def resume(config: Mapping[str, Any], dtype: str, folder: str) -> dict[str, Any]:
    """Train, save and train on; then load the checkpoint into a new run and train it too."""
    first = build(config, dtype)
    seed_streams(1 + first.mesh.rank)
    before = steps(first, BEFORE)
    path = first.save_checkpoint(folder, client_state={"best": 1.5, "table": torch.arange(3)})
    continued = steps(first, AFTER)
    first.finish_saving()
    second = build(config, dtype)
    seed_streams(99)
    found, client = second.load_checkpoint(folder)
    assert found == path
    assert client["best"] == 1.5
    assert client["table"].tolist() == [0, 1, 2]
    return {"before": before, "continued": continued, "resumed": steps(second, AFTER)}


def resume_all(
    cases: list[tuple[Mapping[str, Any], str]], folder: str
) -> list[tuple[list[Any], list[str]]]:
    """Return the steps of each case, and the results in which the two runs differ."""
    seen = []
    for number, (config, dtype) in enumerate(cases):
        run = resume(config, dtype, f"{folder}/{number}")
        keys = run["continued"]
        differ = [key for key in keys if run["resumed"][key] != run["continued"][key]]
        seen.append((run["before"]["steps"] + keys["steps"], differ))
    return seen


def unsaved(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the same steps without saving a checkpoint."""
    engine = build(config, dtype)
    seed_streams(1 + engine.mesh.rank)
    steps(engine, BEFORE)
    return steps(engine, AFTER)


def save_at(config: Mapping[str, Any], folder: str, tags: list[str | None]) -> list[str]:
    """Save a checkpoint after each step; return their paths."""
    engine = build(config, "float64")
    paths = []
    for tag in tags:
        engine.train_batch()
        paths.append(str(engine.save_checkpoint(folder, tag=tag)))
    return paths


def load_step(config: Mapping[str, Any], folder: str, tag: str | None = None) -> int | str:
    """Return the loaded step or the error; then train a step to check that the groups work."""
    engine = build(config, "float64")
    try:
        engine.load_checkpoint(folder, tag)
    except CheckpointError as error:
        if not error.on_every_rank:
            raise
        return str(error)
    found = engine.global_steps
    engine.train_batch()
    return found


def load_each(
    config: Mapping[str, Any], folders: list[str], tag: str | None = None
) -> list[tuple[int | str, list[str]]]:
    """Return `load_step` of each folder, with the warnings that this rank logged."""
    seen = []
    for folder in folders:
        with captured_logs(logging.WARNING) as warnings:
            found = load_step(config, folder, tag)
        seen.append((found, warnings))
    return seen


@contextmanager
def captured_logs(level: int) -> Iterator[list[str]]:
    """Collect the log messages of pipemega.checkpoint."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, collector = logging.getLogger("pipemega.checkpoint"), Collector(level)
    logger.addHandler(collector)
    try:
        yield messages
    finally:
        logger.removeHandler(collector)


def save_with(config: Mapping[str, Any], folder: str, tags: list[str], client: Any = None) -> str:
    """Save with one tag per rank; return the path or the error."""
    engine = build(config, "float64")
    try:
        return str(engine.save_checkpoint(folder, tags[engine.mesh.rank], client_state=client))
    except CheckpointError as error:
        if not error.on_every_rank:
            raise
        return str(error)


def save_in_different_folders(config: Mapping[str, Any], folders: list[str]) -> str:
    engine = build(config, "float64")
    try:
        return str(engine.save_checkpoint(folders[engine.mesh.rank]))
    except CheckpointError as error:
        return str(error)


def save_on_full_disk(
    config: Mapping[str, Any], disk: str, free_bytes: list[int]
) -> list[tuple[str, int]]:
    """Save with each number of free bytes; return (error, step that loads afterwards) for each.

    Training continues after each failure; the last save has enough space and succeeds.
    """
    engine = build(config, "float64")
    engine.train_batch()
    engine.save_checkpoint(disk)
    seen = []
    for number in free_bytes:
        engine.train_batch()
        filler = Path(disk) / "filler"
        engine.mesh.world.group.barrier().wait()
        if engine.mesh.rank == 0:
            with filler.open("wb") as file:
                file.write(bytes(max(0, shutil.disk_usage(disk).free - number)))
        engine.mesh.world.group.barrier().wait()
        try:
            engine.save_checkpoint(disk)
            result = "saved"
        except CheckpointError as error:
            if not error.on_every_rank:
                raise
            result = str(error)
        engine.mesh.world.group.barrier().wait()
        if engine.mesh.rank == 0:
            filler.unlink()
        other = build(config, "float64")
        other.load_checkpoint(disk)
        seen.append((result, other.global_steps))
    engine.save_checkpoint(disk)
    return seen


def save_with_small_files(config: Mapping[str, Any], folder: str, limit: int) -> str:
    """Save while rank 1 cannot write more than `limit` bytes to a file."""
    engine = build(config, "float64")
    engine.train_batch()
    engine.save_checkpoint(folder)
    engine.train_batch()
    try:
        with small_files(limit if engine.mesh.rank == 1 else None):
            return str(engine.save_checkpoint(folder))
    except CheckpointError as error:
        if not error.on_every_rank:
            raise
        return str(error)


def fail_in_the_background(
    config: Mapping[str, Any], folder: str
) -> tuple[str, int, list[str], str]:
    """Save in the background while rank 1 cannot write: twice, with a working save between.

    Returns:
        the error of `finish_saving`; the step that loads after the next, working save, and the
        warnings of that save; the error of a save that follows while the disk still fails.
    """
    engine = build(config, "float64")
    engine.train_batch()
    engine.save_checkpoint(folder)
    engine.finish_saving()

    def error_of(action: Any) -> str:
        try:
            action()
        except CheckpointError as error:
            if not error.on_every_rank:
                raise
            return str(error)
        return "no error"

    def save() -> None:
        engine.train_batch()
        engine.save_checkpoint(folder)

    with small_files(1_000 if engine.mesh.rank == 1 else None):
        save()
        finish = error_of(engine.finish_saving)
    # Again, without a call of `finish_saving` before the next save.
    engine.steps.global_steps -= 1
    with small_files(1_000 if engine.mesh.rank == 1 else None):
        save()
        engine.run.checkpointer._background._thread.join()  # type: ignore[union-attr]
    with captured_logs(logging.WARNING) as warnings:
        save()
    other = build(config, "float64")
    other.load_checkpoint(folder)
    with small_files(1_000 if engine.mesh.rank == 1 else None):
        save()
        broken = error_of(save)
    engine.finish_saving()
    return finish, other.global_steps, warnings, broken


@contextmanager
def small_files(limit: int | None) -> Iterator[None]:
    """Limit the size of the files that this process writes."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is not None:
        # torch's FileStore writes when it is freed, and aborts the process if it cannot: free those
        # of earlier runs now.
        gc.collect()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_forever(config: Mapping[str, Any], folder: str, pids: str, tag: str | None) -> None:
    engine = build(config, "float64")
    (Path(pids) / f"{engine.mesh.rank}").write_text(str(os.getpid()))
    while True:
        engine.train_batch()
        engine.save_checkpoint(folder, tag)


def die_at(config: Mapping[str, Any], folder: str, call: int, tag: str | None) -> int:
    """Kill rank 0 before the `call`-th file operation of its second save.

    Returns:
        the number of file operations, if there were fewer.
    """
    engine = build(config, "float64")
    engine.train_batch()
    engine.save_checkpoint(folder, tag)
    engine.train_batch()
    calls = 0

    def counted(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    before = {name: getattr(os, name) for name in ("fsync", "rename", "mkdir", "unlink", "rmdir")}
    if engine.mesh.rank == 0:
        for name, function in before.items():
            setattr(os, name, counted(function))
    try:
        engine.save_checkpoint(folder, tag)
    finally:
        for name, function in before.items():
            setattr(os, name, function)
    return calls


class Frozen(nn.Linear):
    """A layer whose parameters are frozen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.requires_grad_(False)


def small_net(*, statistics: bool) -> PipelineModule:
    """A net with a frozen layer, a scalar parameter and running statistics."""
    return PipelineModule(
        [
            LayerSpec(nn.Linear, 6, 8),
            LayerSpec(nn.BatchNorm1d, 8) if statistics else LayerSpec(nn.LayerNorm, 8),
            LayerSpec(Frozen, 8, 8),
            LayerSpec(nn.PReLU),
            LayerSpec(nn.Linear, 8, 4),
        ],
        loss_fn=squared_error,
    )


def small_config(optimizer: str, params: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": optimizer, "params": dict(params)},
        **changes,
    }


def small_data(engine: Engine, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + engine.mesh.data.rank)
    for _ in range(engine.batch.num_microbatches):
        yield torch.randn(4, 6, generator=generator), torch.randn(4, 4, generator=generator)


def resume_small(
    config: Mapping[str, Any], folder: str, net: PipelineModule | None = None
) -> list[str]:
    """Like `resume` for a small net, with an evaluation that uses the running statistics."""

    def run(engine: Engine, first: int) -> dict[str, Any]:
        losses = [engine.train_batch(small_data(engine, s)) for s in range(first, first + 2)]
        state = {name: p.tolist() for name, p in engine.parameter_state().items()}
        buffers = {name: b.tolist() for name, b in engine.module.named_buffers()}
        evaluated = engine.eval_batch(small_data(engine, 99))
        return {"losses": losses, "state": state, "buffers": buffers, "eval": evaluated}

    # torch's batch norm does not support bf16 inputs with fp32 statistics.
    net = net or small_net(statistics=not config["bf16"]["enabled"])
    engine, *_ = initialize(net, config)
    run(engine, 0)
    engine.save_checkpoint(folder)
    continued = run(engine, 2)
    # Into an engine that already has optimizer state, as after a bad step.
    engine.load_checkpoint(folder)
    again = run(engine, 2)
    other, *_ = initialize(net, config)
    other.load_checkpoint(folder)
    resumed = run(other, 2)
    assert newest(folder) == "global_step2"
    return [key for key in continued if not continued[key] == resumed[key] == again[key]]


def matrices() -> PipelineModule:
    """A net of matrices only, as Muon needs."""
    layers = [LayerSpec(nn.Linear, m, n, bias=False) for m, n in ((6, 8), (8, 4))]
    return PipelineModule(layers, loss_fn=squared_error)


def wide(mesh: Mapping[str, int]) -> Engine:
    """Build an engine with 100 MB of parameters and optimizer state."""
    layers = [LayerSpec(nn.Linear, m, n) for m, n in ((2048, 1024), (1024, 2048)) * 2]
    config = small_config("AdamW", {"lr": 0.01}, mesh=dict(mesh))
    return initialize(PipelineModule(layers, loss_fn=squared_error), config)[0]


def wide_data(engine: Engine) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(engine.batch.num_microbatches):
        yield torch.randn(4, 2048), torch.randn(4, 2048)


def save_wide(mesh: Mapping[str, int], folder: str) -> None:
    engine = wide(mesh)
    engine.train_batch(wide_data(engine))
    engine.save_checkpoint(folder)


def growth_of_loading(mesh: Mapping[str, int], folder: str) -> int:
    """Return by how many bytes the peak memory during loading exceeds the memory before."""
    engine = wide(mesh)

    def memory(which: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (found,) = (line for line in lines if line.startswith(which))
        return int(found.split()[1]) * 1024

    # Reset the peak.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    engine.load_checkpoint(folder)
    return memory("VmHWM") - before
