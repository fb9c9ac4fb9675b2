"""One pipeline rank at work: runs a plan, instruction by instruction, and knows none by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from pipemega.errors import PipelineError
from pipemega.failure import is_loss
from pipemega.monitor import MultiTimer
from pipemega.pipeline.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.messages import TensorMeta, tensors_of
from pipemega.pipeline.module import Draws, Loss, Stage
from pipemega.pipeline.order import last_gradients
from pipemega.pipeline.recorder import OFF, Recorder
from pipemega.pipeline.split_backward import Arrivals, WeightGradients
from pipemega.pipeline.standstill import Place
from pipemega.pipeline.transport import Channel, Receive, Transport

Key = tuple[int, int]  # (stage, micro-batch)


@dataclass(frozen=True)
class MicroBatches:
    """What one data rank feeds into one run of a plan.

    Args:
        inputs: of each micro-batch; read on the rank of the first stage only.
        labels: of each micro-batch; read on the rank of the last stage only.
        draws: of each micro-batch, for dropout; None in evaluation.
        loss_factor: what the gradient of each micro-batch's loss is seeded with; carries the
            loss scale and the mean over micro-batches.
        keep_outputs: hand back the outputs of the last layer.
        gradients_stay: nobody is told that a gradient is final: they will be thrown away.
    """

    inputs: Sequence[Any]
    labels: Sequence[Any]
    draws: Sequence[Draws] | None = None
    loss_factor: float = 1.0
    keep_outputs: bool = False
    gradients_stay: bool = False


@dataclass
class Results:
    """What a run leaves on the rank of the last stage; empty on the others.

    `losses[m]` and `weights[m]` are scalars, still on the device; a mean has weight 1.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward.

    Of the output only the graph is kept: its numbers are at the next stage.
    """

    inputs: list[Tensor]  # the inputs that want a gradient
    edges: list[GradientEdge]
    metas: list[TensorMeta]


class Executor:
    """Runs the program of one pipeline rank.

    Args:
        rank: the pipeline rank.
        stages: the local stages, by number.
        num_stages: of the whole model.
        transport: to the neighbouring stages; None where all stages are here.
        loss_fn: of the model; None lets only outputs be computed.
        cast_inputs: applied to what enters the first stage.
        timers: take the seconds of forward, backward and communication.
        weights: holds the weight halves of backward, for plans that cut it in two.
        arrivals: is told when a stage gets its last gradients; None where nobody asks.
    """

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        num_stages: int,
        transport: Transport | None,
        loss_fn: Loss | None,
        cast_inputs: Callable[[Any], Any] = lambda tree: tree,
        timers: MultiTimer | None = None,
        weights: WeightGradients | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._rank, self._stages, self._last = rank, stages, num_stages - 1
        self._transport, self._loss_fn, self._cast_inputs = transport, loss_fn, cast_inputs
        self._timers = timers or MultiTimer(enabled=False)
        self._weights, self._arrivals = weights, arrivals
        self._run_kind: Mapping[Kind, Callable[[Instruction], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECV_GRADIENT: self._receive_gradient,
        }
        self._plan: Plan | None = None
        self._clear()

    def _clear(self) -> None:
        self._flying: dict[Key, _InFlight] = {}
        self._arriving: dict[Key, Receive] = {}  # activations that will enter a stage
        self._returning: dict[Key, Receive] = {}  # gradients that will enter a stage
        self._handed_on: dict[Key, Any] = {}  # activations for a stage on this rank, or to send
        self._handed_back: dict[Key, list[Tensor]] = {}  # gradients likewise
        self._results = Results()
        self._batch = MicroBatches((), ())
        self._train = True
        self._recorder = OFF
        self._done = 0  # instructions of the program
        self._last_of_stage: frozenset[Instruction] = frozenset()

    def run(self, plan: Plan, batch: MicroBatches, recorder: Recorder = OFF) -> Results:
        """Runs this rank's program of the lowered `plan` once; gradients add up in the parameters.

        Args:
            recorder: times each instruction.

        Raises:
            PipelineError: says which instruction failed, at which stage and layer; of a wait in
                vain, for what and for whom, with the plan's table.
        """
        self.begin(plan, batch, recorder)
        self.work(plan.programs[self._rank])
        return self.end()

    def begin(self, plan: Plan, batch: MicroBatches, recorder: Recorder = OFF) -> None:
        """Gets ready for `work`, which may take the program in pieces."""
        self._clear()
        self._plan, self._batch, self._recorder = plan, batch, recorder
        self._train = not plan.forward_only
        if self._transport is not None:
            self._transport.exchange_all(plan.forward_only)
        for stage in self._stages.values():
            stage.train(self._train)
        if self._arrivals is not None and self._train and not batch.gradients_stay:
            self._last_of_stage = last_gradients(plan.programs[self._rank])
            self._arrivals.begin()
        recorder.begin()

    def work(self, steps: Program) -> None:
        """Runs the next piece of the program."""
        recorder = self._recorder
        # What was done since the last piece is no work of the first instruction.
        recorder.ready()
        with torch.set_grad_enabled(self._train), self._explaining():
            for step in steps:
                self._run_kind[step.kind](step)
                recorder.end()
                self._done += 1

    def end(self) -> Results:
        """Waits until all that was sent has arrived; what the run leaves."""
        with self._explaining():
            if self._transport is not None:
                self._transport.flush()
        assert not self._flying, f"never run backward: {list(self._flying)}"
        results, self._results = self._results, Results()
        return results

    def throw_away(self, unread: Program) -> None:
        """Forgets the forwards that were run, and takes what the others have sent for them.

        Args:
            unread: the receives that are not posted yet of what was sent to this rank.
        """
        for step in unread:
            self._receive_activation(step)
        if self._transport is not None:
            for receive in self._arriving.values():
                self._transport.wait(receive)
            self._transport.flush()
        self._clear()

    @property
    def results(self) -> Results:
        """Of the forwards that have run so far."""
        return self._results

    @property
    def rank(self) -> int:
        """The pipeline rank."""
        return self._rank

    @property
    def stages(self) -> Mapping[int, Stage]:
        """The local stages, by number."""
        return self._stages

    @property
    def plan(self) -> Plan:
        """What was run last."""
        assert self._plan is not None, "nothing was run yet"
        return self._plan

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Says of an error at which instruction it came, and of a wait in vain where all stood."""
        try:
            yield
        except Exception as error:
            plan, at = self.plan, self._done
            ranks = (0,) if self._transport is None else self._transport.ranks
            place = Place(plan, ranks, self._rank, at)
            program = plan.programs[self._rank]
            where = _in_words(program[at]) if at < len(program) else "end of the step"
            name = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
            table = f"\n{place.table}" if is_loss(error) else ""
            raise PipelineError(f"{where}: {name}{error}{table}", place=place) from error

    # Forward

    def _forward(self, step: Instruction) -> None:
        key = (step.stage, step.microbatch)
        x = self._input_of(step)
        draws = self._batch.draws[step.microbatch] if self._batch.draws is not None else None
        with self._timers("forward"):
            output = self._stages[step.stage](x, draws)
            if step.stage == self._last:
                output = self._finish_forward(step, output)
            else:
                self._handed_on[key] = output
        if self._train:
            self._flying[key] = _in_flight(x, output)

    def _input_of(self, step: Instruction) -> Any:
        key = (step.stage, step.microbatch)
        if step.stage == 0:
            return self._cast_inputs(self._batch.inputs[step.microbatch])
        if key in self._arriving:
            assert self._transport is not None
            with self._timers("communication"):
                message = self._transport.wait(self._arriving.pop(key))
            self._recorder.ready()
            return message
        return _cut(self._handed_on.pop((step.stage - 1, step.microbatch)))

    def _finish_forward(self, step: Instruction, output: Any) -> Any:
        """The loss of the micro-batch, which takes the place of the output."""
        m = step.microbatch
        if self._batch.keep_outputs:
            self._results.outputs[m] = pytree.tree_map_only(Tensor, Tensor.detach, output)
        if self._loss_fn is None:
            if self._train:
                raise PipelineError("training needs a loss_fn; give one to PipelineModule")
            return output
        if m >= len(self._batch.labels):
            return output
        try:
            loss = self._loss_fn(output, self._batch.labels[m])
        except PipelineError:
            raise
        except Exception as error:
            raise PipelineError(f"loss_fn failed: {type(error).__name__}: {error}") from error
        total, weight = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
        for name, value in (("loss", total), ("weight", weight)):
            if value is not None and (not isinstance(value, Tensor) or value.numel() != 1):
                found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise PipelineError(
                    f"loss_fn must return a scalar, or a pair of scalars (sum, weight); its {name} "
                    f"is {found}: reduce it, with .mean() for one"
                )
        if self._train and not total.requires_grad:
            raise PipelineError(
                "the loss has no gradient: it was computed under no_grad, detached or rounded, or "
                "no parameter of the model can be trained"
            )
        self._results.losses[m] = total.detach().reshape(())
        self._results.weights[m] = (
            torch.ones((), device=total.device) if weight is None else weight.detach().reshape(())
        )
        return total

    def _send_activation(self, step: Instruction) -> None:
        assert self._transport is not None
        message = self._handed_on.pop((step.stage, step.microbatch))
        self._transport.send(Channel("activation", step.stage), step.microbatch, message)

    def _receive_activation(self, step: Instruction) -> None:
        assert self._transport is not None
        channel = Channel("activation", step.stage - 1)
        self._arriving[step.stage, step.microbatch] = self._transport.receive(
            channel, step.microbatch
        )

    # Backward

    def _backward(self, step: Instruction) -> None:
        key = (step.stage, step.microbatch)
        gradients = self._gradients_of(step)
        flying = self._flying.pop(key)
        if flying.edges:
            with self._timers("backward"), self._ending(step):
                torch.autograd.backward(flying.edges, gradients)
        if step.stage > 0:
            self._handed_back[key] = [
                torch.zeros_like(x) if x.grad is None else x.grad for x in flying.inputs
            ]

    def _backward_input(self, step: Instruction) -> None:
        assert self._weights is not None, "a plan with halves needs a queue for the second ones"
        with self._weights.putting_off((step.stage, step.microbatch)):
            self._backward(step)

    def _backward_weight(self, step: Instruction) -> None:
        assert self._weights is not None, "a plan with halves needs a queue for the second ones"
        key, arrived = (step.stage, step.microbatch), None
        if self._arrivals is not None and step in self._last_of_stage:
            arrived = self._arrivals.arrived
        with self._timers("backward"), self._ending(step):
            self._weights.run(key, arrived)

    def _ending(self, step: Instruction) -> AbstractContextManager[None]:
        """Around a backward: tells of it if it is the last that its stage gets gradients from."""
        if self._arrivals is None or step not in self._last_of_stage:
            return nullcontext()
        waiting = None
        if step.kind is Kind.BACKWARD_WEIGHT and self._weights is not None:
            waiting = self._weights.weights_of((step.stage, step.microbatch))
        return self._arrivals.last_of(self._stages[step.stage].parameters(), waiting)

    def _gradients_of(self, step: Instruction) -> list[Tensor]:
        key = (step.stage, step.microbatch)
        flying = self._flying[key]
        if step.stage == self._last:
            device = self._results.losses[step.microbatch].device
            factor = self._batch.loss_factor
            return [torch.full(m.shape, factor, dtype=m.dtype, device=device) for m in flying.metas]
        if key in self._returning:
            assert self._transport is not None
            with self._timers("communication"):
                gradients = self._transport.wait(self._returning.pop(key))
            self._recorder.ready()
            # The answer proves that the output was used over there.
            self._transport.release(Channel("activation", step.stage), step.microbatch)
            return list(gradients)
        return self._handed_back.pop((step.stage + 1, step.microbatch))

    def _send_gradient(self, step: Instruction) -> None:
        assert self._transport is not None
        gradients = self._handed_back.pop((step.stage, step.microbatch))
        self._transport.send(Channel("gradient", step.stage - 1), step.microbatch, gradients)

    def _receive_gradient(self, step: Instruction) -> None:
        assert self._transport is not None
        key = (step.stage, step.microbatch)

        def shapes() -> list[TensorMeta] | None:
            return self._flying[key].metas if key in self._flying else None

        self._returning[key] = self._transport.receive(
            Channel("gradient", step.stage), step.microbatch, shapes
        )


def _in_words(step: Instruction) -> str:
    words = {
        Kind.BACKWARD_INPUT: "input half of the backward",
        Kind.BACKWARD_WEIGHT: "weight half of the backward",
    }
    what = words.get(step.kind, step.kind.name.lower().replace("_", " "))
    return f"{what} of micro-batch {step.microbatch} at stage {step.stage} ({step})"


def _in_flight(x: Any, output: Any) -> _InFlight:
    wanted = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    return _InFlight(
        inputs=[tensor for tensor in tensors_of(x) if tensor.requires_grad],
        edges=[get_gradient_edge(tensor) for tensor in wanted],
        metas=[TensorMeta(tuple(t.shape), t.dtype, False) for t in wanted],
    )


def _cut(message: Any) -> Any:
    """The same message without its graph, for a stage on the same rank."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), message
    )
