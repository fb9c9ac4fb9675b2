"""Saved activations leave the device after F, and are back before B; on the CPU."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipemega.distributed.host_memory import CopyEvent, HostMemory
from pipemega.errors import PipelineError
from pipemega.pipeline import activation_offload
from pipemega.pipeline.activation_offload import ActivationOffload
from pipemega.pipeline.execution_state import MicroBatches
from pipemega.pipeline.plan.instructions import Instruction, Kind, Program
from pipemega.pipeline.plan.lowering import offload_points
from tests.ranks import small_models
from tests.ranks.training_runs import build, data, offload_on_cpus, settings

CPU = torch.device("cpu")


def program(text: str) -> Program:
    return tuple(map(Instruction.parse, text.split()))


GPIPE = program("F0@0 F1@0 F2@0 B0@0 B1@0 B2@0")


@pytest.mark.parametrize(
    ("steps", "moved", "fetched"),
    [
        ("F0@0 F1@0 F2@0 B0@0 B1@0 B2@0", "F0@0 F1@0 F2@0", "F2@0 B0@0 B1@0"),
        ("F0@0 F1@0 B0@0 F2@0 B1@0 B2@0", "F1@0", "F2@0"),
        ("F0@0 SA0@0 F1@0 RG0@0 B0@0 B1@0", "", ""),
        # With W between, and of two stages.
        ("F0@1 F0@2 I0@2 W0@2 I0@1 W0@1", "F0@1", "W0@2"),
    ],
)
def test_activations_move_if_two_instructions_lie_between_forward_and_backward(
    steps: str, moved: str, fetched: str
) -> None:
    points = offload_points(program(steps))
    assert points.moved == {*program(moved)}
    assert [*points.fetched] == [*program(fetched)]


@contextmanager
def noted() -> Iterator[list[str]]:
    """Note copies, what is recorded and what waits, in order."""
    log: list[str] = []

    class _Event:
        def __init__(self, name: str) -> None:
            self._name = name

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            log.append(f"the host waits for {self._name}")

        def wait(self) -> None:
            log.append(f"wait for {self._name}")

    class _Noted(HostMemory):
        ways: Any = iter(["out", "back"] * 99)

        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self._way = next(self.ways)

        def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
            log.append("allocate")
            return super().empty(*shape, dtype=dtype)

        def copy(self, target: Tensor, source: Tensor) -> None:
            assert self._inside, "copies run on the side stream"
            log.append(f"copy {self._way}")
            super().copy(target, source)

        def record(self) -> CopyEvent:
            assert self._inside
            log.append(f"record {self._way}")
            return _Event(self._way)

        _inside = False

        @contextmanager
        def side_stream(self) -> Iterator[None]:
            self._inside = True
            yield
            self._inside = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_offload, "HostMemory", _Noted)
        yield log


class Stage:
    """Forward and backward of micro-batches."""

    def __init__(self, forward: Callable[[Tensor], Tensor], log: list[str] | None = None) -> None:
        self._forward, self._log = forward, [] if log is None else log
        self.inputs: dict[int, Tensor] = {}
        self.saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._outputs: dict[int, Tensor] = {}
        self.before: Callable[[Instruction], object] = lambda step: None

    def run(
        self,
        steps: Program,
        offload: ActivationOffload,
        *,
        train: bool = True,
        discard: bool = False,
    ) -> None:
        handlers = {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward}
        run: Any = SimpleNamespace(train=train, batch=MicroBatches((), (), discard_grads=discard))
        offload.begin(run, steps)
        for step in steps:
            offload.run(handlers[step.kind], step)

    def forward(self, step: Instruction) -> None:
        self._log.append(str(step))
        self.before(step)
        x = self.inputs[step.microbatch] = torch.full((64,), 2.0 + step.microbatch)
        x.requires_grad_()
        hidden = x * 3
        self.saved[step.microbatch] = weakref.ref(hidden.untyped_storage())
        self._outputs[step.microbatch] = self._forward(hidden)

    def backward(self, step: Instruction) -> None:
        self._log.append(str(step))
        self.before(step)
        y = self._outputs.pop(step.microbatch)
        y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 256)


def test_copies_run_beside_the_next_instruction_and_beside_the_one_before_backward() -> None:
    with noted() as log:
        stage = Stage(torch.square, log)
        stage.run(GPIPE, ActivationOffload(CPU, []))
    assert log == [
        "F0@0",
        "allocate", "copy out", "record out",
        "F1@0",
        # The memory of F0 is free after the copy.
        "wait for out",
        "allocate", "copy out", "record out",
        "copy back", "record back",
        "F2@0",
        "wait for out",
        "allocate", "copy out", "record out",
        "copy back", "record back",
        "wait for back",
        "B0@0",
        "wait for out",
        "copy back", "record back",
        "wait for back",
        "B1@0",
        "wait for back",
        "B2@0",
    ]  # fmt: skip
    for m, x in stage.inputs.items():
        assert torch.equal(x.grad, torch.full((64,), 18.0 * (2 + m)))


def test_host_memory_is_pinned_in_the_first_step_only() -> None:
    with noted() as log:
        offload = ActivationOffload(CPU, [])
        for _ in range(3):
            Stage(torch.square, log).run(GPIPE, offload)
        assert log.count("allocate") == 3
        # Larger activations replace it.
        Stage(lambda x: torch.square(torch.cat([x, x])), log).run(GPIPE, offload)
    assert log.count("allocate") == 6
    assert log.count("the host waits for back") == 3


def test_after_a_run_of_one_micro_batch_memory_is_pinned_before_the_first_instruction() -> None:
    """Pinning waits for the device; a posted receive may wait for a message of this rank."""
    with noted() as log:
        offload = ActivationOffload(CPU, [])
        Stage(torch.square, log).run(program("F0@0 B0@0"), offload, discard=True)
        assert log == ["F0@0", "B0@0"]
        Stage(torch.square, log).run(GPIPE, offload)
        assert log[2:6] == ["allocate", "allocate", "allocate", "F0@0"]
        # Fewer are in flight at one time.
        Stage(torch.square, log).run(program("F0@0 F1@0 B0@0 F2@0 B1@0 B2@0"), offload)
    assert log.count("allocate") == 3


def test_memory_is_pinned_for_micro_batches_that_are_in_flight_at_one_time() -> None:
    with noted() as log:
        offload = ActivationOffload(CPU, [])
        Stage(torch.square).run(program("F0@0 B0@0"), offload, discard=True)
        steps = "F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 F4@0 B2@0 B3@0 B4@0"
        Stage(torch.square, log).run(program(steps), offload)
    assert log[:4] == ["allocate", "allocate", "allocate", "F0@0"]
    assert log.count("copy back") == 5
    assert log.count("allocate") == 3


def test_the_device_holds_the_activations_until_the_copy_is_complete() -> None:
    stage, alive = Stage(torch.square), dict[str, list[int]]()

    def look(step: Instruction) -> None:
        alive[str(step)] = [m for m, storage in stage.saved.items() if storage() is not None]

    stage.before = look
    stage.run(GPIPE, ActivationOffload(CPU, []))
    assert alive["F1@0"] == [0]
    assert alive["F2@0"] == [1]
    assert alive["B0@0"] == [2]
    assert alive["B1@0"] == []


def test_an_evaluation_moves_nothing() -> None:
    with noted() as log:
        Stage(torch.square, log).run(GPIPE, ActivationOffload(CPU, []), train=False)
    assert log == list(map(str, GPIPE))


def test_storage_that_several_tensors_share_is_copied_once_and_shared_again() -> None:
    found: list[Tensor] = []

    class _Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x[:32], x.view(8, 8).t(), x.detach()[40:])
            return x.sum()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            found[:] = ctx.saved_tensors
            return dy.expand(64)

    with noted() as log:
        stage = Stage(_Both.apply, log)
        stage.run(GPIPE, ActivationOffload(CPU, []))
    assert log.count("copy out") == log.count("copy back") == 3
    assert len({tensor.untyped_storage()._cdata for tensor in found}) == 1
    assert [(t.shape, t.stride(), t.storage_offset()) for t in found] == [
        ((32,), (1,), 0),
        ((8, 8), (1, 8), 0),
        ((24,), (1,), 40),
    ]


def test_parameters_data_and_what_micro_batches_share_stay_on_the_device() -> None:
    weight, table = nn.Parameter(torch.ones(64)), torch.full((64,), 2.0)
    module = nn.Module()
    module.weight = weight
    with noted() as log:
        # Saves the weight, a view of it, and the table; of the hidden values only what the
        # gradient of the weight needs.
        offload = ActivationOffload(CPU, [module])
        stage = Stage(lambda x: x * weight * table + weight.view(8, 8).t().reshape(64), log)
        stage.run(GPIPE, offload)
        first = log.count("copy out")
        stage.run(GPIPE, offload)
    # Two values of each micro-batch; the table only until a second micro-batch has saved it.
    assert (first, log.count("copy out") - first) == (3 + 1, 3)
    small = Stage(lambda x: (x[:8] * 1).square())
    with noted() as log:
        small.run(GPIPE, ActivationOffload(CPU, []))
    assert "copy out" not in log


@pytest.mark.parametrize(
    ("changed_by", "is_refused"),
    [("F0@0", True), ("F1@0", True), ("F2@0", False), (None, False)],
)
def test_a_change_in_place_is_refused_unless_the_copy_is_older(
    changed_by: str | None, is_refused: bool
) -> None:
    """After the copy the change does no harm: backward uses the values of the forward."""
    kept: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        kept.append(hidden.detach())
        y = hidden.square()
        if changed_by == "F0@0" and len(kept) == 1:
            kept[0].zero_()
        return y

    stage = Stage(forward)

    def change(step: Instruction) -> None:
        if str(step) == changed_by and str(step) != "F0@0":
            kept[0].zero_()

    stage.before = change
    offload = ActivationOffload(CPU, [])
    if is_refused:
        with pytest.raises(RuntimeError, match="modified by an inplace operation: it is at vers"):
            stage.run(GPIPE, offload)
        return
    stage.run(GPIPE, offload)
    assert torch.equal(stage.inputs[0].grad, torch.full((64,), 36.0))


def test_a_change_in_place_of_a_tensor_that_stays_is_refused() -> None:
    table = torch.full((8,), 2.0)
    stage = Stage(lambda x: x[:8] * table)
    stage.before = lambda step: table.add_(1) if str(step) == "B0@0" else None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stage.run(GPIPE, ActivationOffload(CPU, []))


def test_a_backward_within_a_forward_uses_the_tensors_before_they_move() -> None:
    def forward(hidden: Tensor) -> Tensor:
        inner = hidden.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inner.square().sum(), inner)
        return hidden * slope

    stage = Stage(forward)
    stage.run(GPIPE, ActivationOffload(CPU, []))
    assert torch.equal(stage.inputs[0].grad, torch.full((64,), 36.0))


def test_a_run_that_failed_leaves_nothing_behind() -> None:
    offload, stage = ActivationOffload(CPU, []), Stage(torch.square)

    def fail(step: Instruction) -> None:
        if str(step) == "B0@0":
            raise PipelineError("of the test")

    stage.before = fail
    with pytest.raises(PipelineError):
        stage.run(GPIPE, offload)
    again = Stage(torch.square)
    with noted() as log:
        again.run(GPIPE, offload)
    assert log == []
    assert torch.equal(again.inputs[0].grad, torch.full((64,), 36.0))


ON = {"activation_checkpointing": {"cpu_checkpointing": True}}


@pytest.mark.parametrize("epochs", [None, 1])
def test_a_run_has_the_same_bits_with_data_from_an_iterator_and_with_given_data(
    epochs: int | None,
) -> None:
    runs = []
    for keys in ({}, ON):
        changes = {"training": {"epochs": epochs}} if epochs else {}
        config = settings(pipeline={"schedule": "gpipe"}, **keys, **changes)
        with offload_on_cpus(), noted() as log:
            engine = build(config)
            losses = [
                engine.train_batch(None if epochs else data(engine, step)) for step in range(2)
            ]
            copies = len(log)
            losses.append(engine.eval_batch(data(engine, 9)))
            assert len(log) == copies
            runs.append((losses, engine.parameter_state()))
            engine.close()
            assert ("copy out" in log) == bool(keys)
    (losses, parameters), (others, expected) = runs
    assert losses == others
    for name, value in expected.items():
        assert torch.equal(parameters[name], value), name


def test_on_a_cpu_the_key_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    engine = small_models.engine_of(small_models.plain(), **ON)
    assert "cpu_checkpointing has no effect on a CPU" in caplog.text
    engine.close()
