"""Find where inf or nan came from: run the step again and check every layer's input and output.

A step that ended in inf or nan has changed no parameter, its batch is still available, and all
random numbers follow from the step and the micro-batch: so a second run gives the same numbers.
Each rank records its first non-finite tensor that was computed from finite ones; the earliest
of all ranks is the origin. The order:

    forward     by micro-batch, then from the first layer to the loss
    backward    by micro-batch, then from the loss to the first layer; gradients of layer inputs
    gradients   of parameters, after each backward, by micro-batch
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.errors import LossScaleError, NonFiniteError
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.optimizer.step_outcome import StepReport
from pipemega.pipeline.execution_state import MicroBatches
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.kernel_warmup import run_discarded
from pipemega.pipeline.messages import tensors_of
from pipemega.pipeline.model.module import RngKey, Stage
from pipemega.pipeline.model.vocabulary_shard import VocabularyShard
from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.recorder import Recorder

# After this many such steps in a row the next ones are not run twice: the run may never recover.
_MOST_IN_A_ROW = 3

# Steps that change gradients of parameters of a stage, or of a shard of the vocabulary.
_OF_STAGE = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_OF_SHARD = (Kind.OUTPUT_WEIGHT, Kind.EMBED_WEIGHT)


class _Phase(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    GRADIENT = 2


@dataclass(frozen=True, order=True)
class _Finding:
    """A non-finite tensor computed from finite ones; findings sort in the order of computation."""

    phase: _Phase
    microbatch: int
    depth: int  # layers from the beginning of the phase
    # The state of the layer was finite on this rank; on another tensor rank it may not have been.
    state_is_finite: bool
    data_rank: int
    tensor_rank: int
    text: str


class NonFiniteLocator:
    """Finds the origin of inf or nan in the last step; collective.

    Args:
        mesh: the device mesh of the run.
        executor: the executor of this rank.
        gradients: the buffer of the parameter gradients, zero between two steps; None if nothing
            is trained, and so nothing is searched.
        num_layers: number of layers of the unsharded model.
        scaled: fp16 loss scaling is on, so inf and nan in gradients alone are expected.
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
        self._in_a_row = 0

    def record_step(self, plan: Plan, batch: MicroBatches) -> None:
        """Keep what is needed to run the step again."""
        self._plan, self._batch = plan, batch

    def check(self, report: StepReport) -> str:
        """Return the origin if the recorded step had unexpected inf or nan, otherwise ""."""
        # A loss scale that is too large explains inf and nan in gradients, but not in the loss.
        explained = self._scaled and math.isfinite(report.loss)
        if self._plan is None:
            return ""  # the caller has run forward and backward
        if not report.overflow or explained:
            self._in_a_row = 0
            return ""
        self._in_a_row += 1
        if self._in_a_row > _MOST_IN_A_ROW:
            return f"origin not searched after {_MOST_IN_A_ROW} such steps in a row"
        return self.find()

    @contextmanager
    def add_origin_to_errors(self) -> Iterator[None]:
        """Add the origin to an error about inf and nan that all ranks raise in the block."""
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
        """Run the step again and return the text of the earliest finding, equal on all ranks."""
        plan, executor, gradients = self._plan, self._executor, self._gradients
        assert plan is not None, "no step was run"
        assert gradients is not None
        probe = _Probe(self._mesh, executor, plan, gradients, self._num_layers)
        try:
            for stage in executor.stages.values():
                stage.observer = probe
            run_discarded(executor, plan, self._batch, self._mesh.device, gradients.zero, probe)
        finally:
            for stage in executor.stages.values():
                stage.observer = None
        gathered = gather_objects(probe.first, self._mesh.world)
        findings = [finding for finding in gathered if finding is not None]
        if not findings:
            return (
                "in a second run of the step all layers were finite on every rank: the cause is "
                "state outside of parameters and batch (a stateful layer, a hardware fault), or "
                "the sum over ranks overflowed"
            )
        return f"first {min(findings).text}"


class _Probe(Recorder):
    """Checks tensors of one rank in the second run: observes its layers and its instructions."""

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
        self._reported: set[str] = set()  # parameters with a non-finite gradient

    # LayerObserver

    reads_outputs = True

    def enter(self, position: int, x: Any, rng_key: RngKey | None) -> None:
        self._input_finite = _is_finite(x)
        if rng_key is not None:
            self._check_gradients_of(x, rng_key, position)

    def leave(self, position: int, y: Any, rng_key: RngKey | None) -> None:
        if rng_key is None:
            return
        if position == self._num_layers - 1:
            self._check_gradients_of(y, rng_key, position + 1)
        # With vocabulary parallelism, the input of the first layer is the result of E.
        is_data = position == 0 and not self._executor.ends.modules
        if _is_finite(y) or not (self._input_finite or is_data):
            return
        state = ""
        if self._input_finite:
            state = _non_finite_state(self._layer(position))
            what = f"output has {_count(y)}, its input was finite{state}"
        else:
            what = "its input, which is the data, is not finite"
        text = f"{self._layer_name(position)}: {what}"
        microbatch = self._microbatch(rng_key)
        self._note(_Phase.FORWARD, microbatch, position, text, state_is_finite=not state)

    def failed(self, position: int) -> None:
        pass

    def _microbatch(self, rng_key: RngKey) -> int:
        return rng_key.microbatch // self._mesh.data.size

    def _check_gradients_of(self, tree: Any, rng_key: RngKey, position: int) -> None:
        """Check the gradients of the input of layer `position` when backward computes them."""
        if not torch.is_grad_enabled():
            return
        check = partial(self._check_gradient, self._microbatch(rng_key), position)
        for tensor in tensors_of(tree):
            if tensor.requires_grad:
                tensor.register_hook(check)  # type: ignore[no-untyped-call]

    def _check_gradient(self, microbatch: int, position: int, gradient: Tensor) -> None:
        """Check the gradient of the input of layer `position`, or of the loss after the last."""
        if _is_finite(gradient):
            return
        where, state = "the loss function", ""
        if position < self._num_layers:
            where, state = self._layer_name(position), _non_finite_state(self._layer(position))
        what = f"gradient of its input has {_count(gradient)}, that of its output was finite{state}"
        depth = self._num_layers - position
        text = f"{where}: {what}"
        self._note(_Phase.BACKWARD, microbatch, depth, text, state_is_finite=not state)

    # Recorder

    def begin(self) -> None:
        self._at = 0

    def end(self) -> None:
        step, ends = self._program[self._at], self._executor.ends
        if step.kind in (Kind.FORWARD, Kind.LOSS) and step.stage == self._last_stage:
            loss = self._executor.results.losses.of(step.microbatch)
            if loss is not None and not _is_finite(loss):
                text = f"the loss function: returns {loss.item():g}, its input was finite"
                self._note(_Phase.FORWARD, step.microbatch, self._num_layers, text)
        elif (found := ends.layer_result(step)) is not None:
            self._check_pass(*found, step.microbatch)
        elif step.kind in _OF_STAGE and not self._gradients_are_finite():
            self._check_parameters(self._executor.stages[step.stage], step.microbatch)
        elif step.kind in _OF_SHARD and not self._gradients_are_finite():
            for module in ends.modules:
                self._check_parameters(module, step.microbatch)
        self._at += 1

    def _check_pass(self, position: int, x: Tensor | None, y: Tensor | None, m: int) -> None:
        """Check the result of the rows of embedding or head on this rank."""
        if _is_finite(y) or not _is_finite(x):
            return
        state = _non_finite_state(self._layer(position))
        text = f"{self._layer_name(position)}: output has {_count(y)}, its input was finite{state}"
        self._note(_Phase.FORWARD, m, position, text, state_is_finite=not state)

    def _gradients_are_finite(self) -> bool:
        return all(map(_is_finite, self._gradients.flats.values()))

    def _check_parameters(self, stage: nn.Module, microbatch: int) -> None:
        """Find the parameters whose gradient became inf or nan in the backward that just ended."""
        names = {id(p): name for name, p in stage.named_parameters()}
        for slot in reversed(self._gradients.slots):
            view = self._gradients.view(slot.parameter)
            if slot.name in self._reported or _is_finite(view):
                continue
            self._reported.add(slot.name)
            if id(slot.parameter) in names:
                text = f"the gradient of {slot.name}: has {_count(view)} after this micro-batch"
                depth = self._num_layers - int(names[id(slot.parameter)].split(".")[1])
                self._note(_Phase.GRADIENT, microbatch, depth, text)

    def _note(
        self, phase: _Phase, microbatch: int, depth: int, what: str, state_is_finite: bool = True
    ) -> None:
        mesh = self._mesh
        rank = f" (data rank {mesh.data.rank})" if mesh.data.size > 1 else ""
        pass_name = "forward" if phase is _Phase.FORWARD else "backward"
        shard = f", on tensor rank {mesh.tensor.rank}" if mesh.tensor.size > 1 else ""
        step = self._program[self._at]
        place = f"{'pipeline rank' if step.kind.has_shard else 'stage'} {step.stage}"
        text = f"in the {pass_name} of micro-batch {microbatch}{rank}, {place}, {what}{shard}"
        ranks = mesh.data.rank, mesh.tensor.rank
        finding = _Finding(phase, microbatch, depth, state_is_finite, *ranks, text)
        self.first = finding if self.first is None else min(self.first, finding)

    def _layer(self, position: int) -> nn.Module:
        return self._module_of(position).layers[str(position)]

    def _layer_name(self, position: int) -> str:
        name = self._module_of(position).name_of(position)
        return f"layer {position} 'layers.{position}' ({name})"

    def _module_of(self, position: int) -> Stage | VocabularyShard:
        # With vocabulary parallelism, a stage has other layers in the places of embedding and head.
        executor = self._executor
        modules: list[Stage | VocabularyShard] = [*executor.ends.modules, *executor.stages.values()]
        return next(each for each in modules if str(position) in each.layers)


def _is_finite(tree: Any) -> bool:
    return all(
        bool(torch.isfinite(tensor.detach()).all())
        for tensor in tensors_of(tree)
        if tensor.is_floating_point()
    )


def _count(tree: Any) -> str:
    """Return how many elements are not finite, as in "3 nan and 1 inf of 4096 elements"."""
    floating = [t.detach() for t in tensors_of(tree) if t.is_floating_point()]
    nans = sum(int(torch.isnan(tensor).sum()) for tensor in floating)
    infs = sum(int(torch.isinf(tensor).sum()) for tensor in floating)
    counts = [f"{count} {name}" for count, name in ((nans, "nan"), (infs, "inf")) if count]
    return f"{' and '.join(counts)} of {sum(t.numel() for t in floating)} elements"


def _non_finite_state(layer: nn.Module) -> str:
    """Return the first parameter or buffer that was not finite before the step; "" if none."""
    state: dict[str, Tensor] = dict(layer.named_parameters(prefix="parameter"))
    state |= dict(layer.named_buffers(prefix="buffer"))
    for path, tensor in state.items():
        if not _is_finite(tensor):
            kind, name = path.split(".", 1)
            return f", but its {kind} {name!r} has {_count(tensor)} before the step"
    return ""
