"""Where inf or nan came from: the step is run once more, with a look at everything on its way.

A step that ended so has changed no parameter, its batch is still there, and every random number
follows from the step and the place of the micro-batch: so its second run gives the same numbers.
Each rank notes the first thing of its own that was not finite though all that it was made from was,
and the first of all ranks is the answer.

    forward     by micro-batch, then from the first layer up; at the end the loss
    backward    by micro-batch, then from the loss down; at each layer the gradient of its input
    gradients   of parameters, after each backward, by micro-batch
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemega.errors import LossScaleError, NonFiniteError
from pipemega.gradients import GradientBuffer
from pipemega.mesh import Mesh
from pipemega.optimizer.decision import StepReport
from pipemega.pipeline.buffers import BufferCopies
from pipemega.pipeline.executor import Executor, MicroBatches
from pipemega.pipeline.instructions import Kind, Plan
from pipemega.pipeline.messages import tensors_of
from pipemega.pipeline.module import Draws, Stage
from pipemega.pipeline.recorder import Recorder
from pipemega.random import preserve_rng

# A run that does not recover is not worth a second run of each of its steps.
_MOST_IN_A_ROW = 3

_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class _Phase(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    GRADIENT = 2


@dataclass(frozen=True, order=True)
class _Finding:
    """Something that was the first not to be finite; they sort by the order of computing."""

    phase: _Phase
    microbatch: int
    depth: int  # layers from where the phase begins
    is_victim: bool  # the layer's own state was finite: another tensor rank's may not have been
    data_rank: int
    tensor_rank: int
    text: str


class Examiner:
    """Looks into the last step that was run; collective.

    Args:
        mesh: of the run.
        executor: of this rank.
        gradients: that backward adds to, and that are zero between two steps; None where nothing
            is trained, and so nothing is ever looked at.
        num_layers: of the unsplit model.
        scaled: inf and nan in gradients alone are the loss scale's business, and expected.
    """

    def __init__(
        self,
        mesh: Mesh,
        executor: Executor,
        gradients: GradientBuffer | None,
        num_layers: int,
        scaled: bool = False,
    ) -> None:
        self._mesh, self._executor, self._gradients = mesh, executor, gradients
        self._num_layers, self._scaled = num_layers, scaled
        self._plan: Plan | None = None
        self._batch = MicroBatches((), ())
        self._origins: list[str] = []
        self._in_a_row = 0

    def remember(self, plan: Plan, batch: MicroBatches) -> None:
        """The step that will be asked about."""
        self._plan, self._batch = plan, batch

    def is_case(self, report: StepReport) -> bool:
        """Whether a step had inf or nan that are not the loss scale's business."""
        return report.overflow and not (self._scaled and math.isfinite(report.loss))

    def look_at(self, report: StepReport | None) -> None:
        """Looks into the step that was remembered, if its report is worth it."""
        if report is None or not self.is_case(report):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        again = self._in_a_row > _MOST_IN_A_ROW
        self._origins.append("not looked into, as those before" if again else self.find())

    def take(self) -> list[str]:
        """What `look_at` has found since the last call: one text for each case."""
        taken, self._origins = self._origins, []
        return taken

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Puts the origin in front of an error that all ranks raise about inf and nan."""
        try:
            yield
        except (NonFiniteError, LossScaleError) as error:
            if not error.on_every_rank or self._plan is None:
                raise
            origin = self.find()
            if isinstance(error, LossScaleError):
                raise LossScaleError(f"{error}; {origin}", on_every_rank=True) from None
            raise NonFiniteError(
                error.what, origin=origin, advice=error.advice, on_every_rank=True
            ) from None

    def find(self) -> str:
        """Runs the step again; where inf or nan was first, in words, the same on every rank."""
        plan, executor, gradients = self._plan, self._executor, self._gradients
        assert plan is not None, "no step was run"
        assert gradients is not None
        look = _Look(self._mesh, executor, plan, gradients, self._num_layers)
        buffers = BufferCopies(executor.stages.values())
        try:
            for stage in executor.stages.values():
                stage.watch = look
            with preserve_rng(self._mesh.device):
                executor.run(plan, replace(self._batch, gradients_stay=True), look)
        finally:
            for stage in executor.stages.values():
                stage.watch = None
            buffers.restore()
            gradients.zero()
        found: list[Any] = [look.first]
        if self._mesh.world.size > 1:
            found = [None] * self._mesh.world.size
            dist.all_gather_object(found, look.first, group=self._mesh.world.group)
        findings = [finding for finding in found if finding is not None]
        if not findings:
            return (
                "run again with a look at every layer, each rank found everything finite: so what "
                "was not depends on more than parameters and batch (a layer with a memory of its "
                "own, a fault of the machine), or it is the sum over ranks that overflowed"
            )
        return f"first {min(findings).text}"


class _Look(Recorder):
    """What one rank sees of the second run: a watch of its stages, told of each instruction."""

    def __init__(
        self,
        mesh: Mesh,
        executor: Executor,
        plan: Plan,
        gradients: GradientBuffer,
        num_layers: int,
    ) -> None:
        self.first: _Finding | None = None
        self._mesh, self._executor, self._gradients = mesh, executor, gradients
        self._program = plan.programs[executor.rank]
        self._last_stage, self._num_layers = plan.num_stages - 1, num_layers
        self._at = 0
        self._input_finite = True
        self._bad: set[str] = set()  # gradients of parameters that have been told of

    # A watch of the layers

    def enter(self, position: int, x: Any, draws: Draws | None) -> None:
        self._input_finite = _is_finite(x)
        if draws is None or not torch.is_grad_enabled():
            return
        microbatch = draws.microbatch // self._mesh.data.size
        for tensor in tensors_of(x):
            if tensor.requires_grad:
                self._hook(tensor, microbatch, position)

    def leave(self, position: int, y: Any, draws: Draws | None) -> None:
        if draws is None:
            return
        microbatch = draws.microbatch // self._mesh.data.size
        if position == self._num_layers - 1 and torch.is_grad_enabled():
            for tensor in tensors_of(y):
                if tensor.requires_grad:
                    self._hook(tensor, microbatch, position + 1)
        if _is_finite(y) or not (self._input_finite or position == 0):
            return
        state = ""
        if self._input_finite:
            state = _state_of(self._stage_of(position).layers[str(position)])
            what = f"output has {_count(y)}, its input was finite{state}"
        else:
            what = "its input, the data itself, is not finite"
        text = f"{self._layer(position)}: {what}"
        self._note(_Phase.FORWARD, microbatch, position, text, is_victim=not state)

    def _hook(self, tensor: Tensor, microbatch: int, position: int) -> None:
        tensor.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: self._see_gradient(microbatch, position, gradient)
        )

    def _see_gradient(self, microbatch: int, position: int, gradient: Tensor) -> None:
        """Of what goes into layer `position`; of what goes into the loss behind the last."""
        if _is_finite(gradient):
            return
        where, state = "the loss function", ""
        if position < self._num_layers:
            where = self._layer(position)
            state = _state_of(self._stage_of(position).layers[str(position)])
        what = f"gradient of its input has {_count(gradient)}, that of its output was finite{state}"
        depth = self._num_layers - position
        self._note(_Phase.BACKWARD, microbatch, depth, f"{where}: {what}", is_victim=not state)

    # Told of instructions

    def begin(self) -> None:
        self._at = 0

    def end(self) -> None:
        step = self._program[self._at]
        if step.kind is Kind.FORWARD and step.stage == self._last_stage:
            loss = self._executor.results.losses.get(step.microbatch)
            if loss is not None and not _is_finite(loss):
                text = f"the loss function: it gives {loss.item():g} for an output that was finite"
                self._note(_Phase.FORWARD, step.microbatch, self._num_layers, text)
        elif step.kind in _BACKWARD and not all(map(_is_finite, self._gradients.flats.values())):
            self._see_parameters(step.stage, step.microbatch)
        self._at += 1

    def _see_parameters(self, stage: int, microbatch: int) -> None:
        """After the backward that made some gradient of a parameter inf or nan."""
        here = {id(p): name for name, p in self._executor.stages[stage].named_parameters()}
        for slot in reversed(self._gradients.slots):
            view = self._gradients.view(slot.parameter)
            if slot.name in self._bad or _is_finite(view):
                continue
            self._bad.add(slot.name)
            if id(slot.parameter) in here:
                text = f"the gradient of {slot.name}: it has {_count(view)} when this is added"
                depth = self._num_layers - int(here[id(slot.parameter)].split(".")[1])
                self._note(_Phase.GRADIENT, microbatch, depth, text)

    def _note(
        self, phase: _Phase, microbatch: int, depth: int, what: str, is_victim: bool = True
    ) -> None:
        mesh = self._mesh
        rank = f" (data rank {mesh.data.rank})" if mesh.data.size > 1 else ""
        half = "forward" if phase is _Phase.FORWARD else "backward"
        shard = f", on tensor rank {mesh.tensor.rank}" if mesh.tensor.size > 1 else ""
        stage = self._program[self._at].stage
        text = f"in the {half} of micro-batch {microbatch}{rank}, stage {stage}, {what}{shard}"
        ranks = mesh.data.rank, mesh.tensor.rank
        found = _Finding(phase, microbatch, depth, is_victim, *ranks, text)
        self.first = found if self.first is None else min(self.first, found)

    def _layer(self, position: int) -> str:
        name = self._stage_of(position).name_of(position)
        return f"layer {position} 'layers.{position}' ({name})"

    def _stage_of(self, position: int) -> Stage:
        stages = self._executor.stages.values()
        return next(stage for stage in stages if stage.start <= position < stage.stop)


def _is_finite(tree: Any) -> bool:
    return all(
        bool(torch.isfinite(tensor.detach()).all())
        for tensor in tensors_of(tree)
        if tensor.is_floating_point()
    )


def _count(tree: Any) -> str:
    """How many elements are not finite: "3 nan and 1 inf of 4096 elements"."""
    floating = [t.detach() for t in tensors_of(tree) if t.is_floating_point()]
    nans = sum(int(torch.isnan(tensor).sum()) for tensor in floating)
    infs = sum(int(torch.isinf(tensor).sum()) for tensor in floating)
    counts = [f"{count} {name}" for count, name in ((nans, "nan"), (infs, "inf")) if count]
    return f"{' and '.join(counts)} of {sum(t.numel() for t in floating)} elements"


def _state_of(layer: nn.Module) -> str:
    """What of the layer itself was not finite before the step."""
    state: dict[str, Tensor] = dict(layer.named_parameters(prefix="parameter"))
    state |= dict(layer.named_buffers(prefix="buffer"))
    for path, tensor in state.items():
        if not _is_finite(tensor):
            kind, name = path.split(".", 1)
            return f", but its {kind} {name!r} has {_count(tensor)} from before the step"
    return ""
