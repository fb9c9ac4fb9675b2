"""Trains on ranks with different devices, on a machine without a GPU.

"pretended"   tensors of a rank on "cuda" are on the CPU; groups, routes and bounds are those of
              a rank on a GPU, with gloo in place of NCCL
"fake"        they are on the device of `tests.ranks.fake_device`, so that a tensor on the wrong
              device is an error; all messages go through host memory
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.distributed import mesh as mixed_mesh
from pipemega.distributed.host_memory import HostCopy, HostMemory
from pipemega.engine.engine import Engine
from pipemega.engine.run import run_arguments
from pipemega.pipeline import activation_offload, connections
from pipemega.pipeline.execution_state import MicroBatches
from pipemega.pipeline.plan.instructions import Instruction, Kind
from tests.ranks import small_models
from tests.ranks.fake_device import NAME, FakeModule, load_fake_device


@contextmanager
def gpus(folder: str = "") -> Iterator[None]:
    """Pretend that this machine has GPUs; with the folder of the fake device, ranks use that."""
    device = torch.device("cpu")
    with mock.patch.object(run_arguments, "_auto_device", return_value="cuda"):
        if folder:
            load_fake_device(folder)
            device = torch.device(NAME, 0)

        def pick(rank: int, wishes: Any, hosts: Any) -> torch.device:
            return device if wishes[rank] == "cuda" else torch.device("cpu")

        moved = mock.patch.object(activation_offload, "SMALLEST_BYTES", 64)
        with mock.patch.object(mixed_mesh, "pick_mixed_device", pick), moved:
            if not folder:
                yield
                return
            # gloo cannot transfer tensors of the fake device, even between two of its ranks.
            by_host = mock.patch.object(connections, "_tagged_channels", lambda p, d, ends: [*ends])
            with by_host:
                yield


def train_each(configs: list[dict[str, Any]], folder: str | None = "") -> list[dict[str, Any]]:
    """Train a model for each config; return losses, parameters and devices by logical name.

    Args:
        configs: each with "net", the name of a function of `small_models` or of this module.
        folder: see `gpus`; None: on the GPUs of this machine.
    """
    results = []
    torch.set_default_dtype(torch.float64)
    try:
        for config in configs:
            with nullcontext() if folder is None else gpus(folder):
                results.append(_train(**config))
    finally:
        torch.set_default_dtype(torch.float32)
    return results


def _train(net: str, steps: int = 3, **config: Any) -> dict[str, Any]:
    make = globals().get(net) or getattr(small_models, net)
    engine = small_models.engine_of(make(), **config)
    count, rank = engine.batch.num_microbatches, engine.mesh.data.rank
    losses = []
    for step in range(steps):
        data = [*small_models.microbatches(step, 4)][rank * count :][:count]
        losses.append(engine.train_batch(iter(data)))
        losses.append(engine.eval_batch(small_models.microbatches(50 + step, 3), 3))
    state = engine.optimizer.state.values() if engine.optimizer else ()
    return {
        "losses": losses,
        "norm": engine.get_global_grad_norm(),
        "parameters": {n: p.numpy() for n, p in engine.parameter_state().items()},
        "device": engine.mesh.device.type,
        "of parameters": sorted({p.device.type for p in engine.module.parameters()}),
        "of state": sorted({t.device.type for s in state for t in s.values() if t.ndim}),
    }


def placed() -> PipelineModule:
    """A model whose first layer asks for the CPU."""
    specs = list(small_models.plain().specs)
    first = specs[0]
    specs[0] = LayerSpec(first.typename, *first.args, device="cpu")
    return PipelineModule(specs, small_models.squares)


def replicas_with_rounding(config: dict[str, Any]) -> list[float]:
    """Train where each "GPU" rounds the optimizer step differently; return the losses.

    `check_replicas` raises if the replicas of the tied matrix are not equal.
    """
    torch.set_default_dtype(torch.float64)
    try:
        with gpus():
            # Each rank has parameters.
            pipeline = {"partition": "parameters", **config.pop("pipeline", {})}
            net = small_models.tied_thrice()
            engine = small_models.engine_of(net, pipeline=pipeline, **config)
            mesh, optimizer, losses = engine.mesh, engine.optimizer, []
            assert optimizer is not None

            def round_differently(*_: Any) -> None:
                if mesh.pipeline.devices[mesh.pipeline.rank] == "cuda":
                    for group in optimizer.param_groups:
                        torch._foreach_mul_([p.data for p in group["params"]], 1 + 1e-12)

            optimizer.register_step_post_hook(round_differently)
            count, rank = engine.batch.num_microbatches, mesh.data.rank
            for step in range(4):
                data = [*small_models.microbatches(step, 4)][rank * count :][:count]
                losses.append(engine.train_batch(iter(data)))
                engine.check_replicas()
            return losses
    finally:
        torch.set_default_dtype(torch.float32)


def save_and_load(folder: str, fake: str, mesh: dict[str, Any]) -> list[float]:
    """Train two steps, save; load in a new engine, and train a third step."""
    torch.set_default_dtype(torch.float64)
    try:
        with gpus(fake):
            engine = _saved_engine(mesh)
            losses = [engine.train_batch(small_models.microbatches(step, 4)) for step in range(2)]
            engine.save_checkpoint(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    return losses + resume(folder, fake, mesh)


def resume(folder: str, fake: str, mesh: dict[str, Any]) -> list[float]:
    """Load what `save_and_load` has saved, and train the third step."""
    torch.set_default_dtype(torch.float64)
    try:
        with gpus(fake):
            engine = _saved_engine(mesh)
            engine.load_checkpoint(folder)
            return [engine.train_batch(small_models.microbatches(2, 4))]
    finally:
        torch.set_default_dtype(torch.float32)


def _saved_engine(mesh: dict[str, Any]) -> Engine:
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    return small_models.engine_of(small_models.tied_thrice(), mesh=mesh, optimizer=optimizer)


def without_gpus(device: list[str]) -> str:
    """Return the error of a list with GPUs where there are none."""
    try:
        initialize(
            small_models.plain(),
            {"train_batch_size": 4, "mesh": {"pipeline": len(device), "device": device}},
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def order_of_copies(folder: str) -> list[str]:
    """Return what the fake device notes: a number to the host, and a save beside computation."""
    load_fake_device(folder)
    memory, tensor = HostMemory(torch.device(NAME)), torch.arange(4.0).to(NAME)
    FakeModule.log.clear()
    number = HostCopy(memory, tensor)
    assert number.wait().tolist() == [0, 1, 2, 3]
    saved = memory.empty(4, dtype=torch.float32)
    with memory.side_stream():
        memory.copy(saved, tensor)
        complete = memory.record()
    # The next optimizer step waits for it, before it changes the tensor.
    complete.wait()
    tensor.add_(1)
    assert saved.tolist() == [0, 1, 2, 3]
    return list(FakeModule.log)


def order_of_offload(folder: str, text: str) -> list[str]:
    """Return what the fake device notes while the saved activations of a program move."""
    load_fake_device(folder)
    program = tuple(map(Instruction.parse, text.split()))
    inputs: dict[int, torch.Tensor] = {}
    outputs: dict[int, torch.Tensor] = {}

    def forward(step: Instruction) -> None:
        FakeModule.log.append(str(step))
        x = torch.full((64,), 2.0 + step.microbatch).to(NAME).requires_grad_()
        inputs[step.microbatch], outputs[step.microbatch] = x, x.mul(3).square().sum()

    def backward(step: Instruction) -> None:
        FakeModule.log.append(str(step))
        outputs.pop(step.microbatch).backward()  # type: ignore[no-untyped-call]

    with mock.patch.object(activation_offload, "SMALLEST_BYTES", 64):
        offload = activation_offload.ActivationOffload(torch.device(NAME), [])
        handlers = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
        FakeModule.log.clear()
        run: Any = SimpleNamespace(train=True, batch=MicroBatches((), ()))
        offload.begin(run, program)
        for step in program:
            offload.run(handlers[step.kind], step)
    for m, x in inputs.items():
        assert x.grad is not None
        assert x.grad.cpu().tolist() == [18.0 * (2 + m)] * 64
    return list(FakeModule.log)
