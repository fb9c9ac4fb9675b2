"""Executes the program of one pipeline rank, instruction by instruction.

The executor does not depend on the schedule. An activation or gradient is passed to another stage
in one of two ways: directly if both stages are on this rank, else by the send and receive
instructions of the lowered plan. `PipelineEnds` gives the input of the first stage and uses the
output of the last.

Backward from the outputs of a stage, without the checks of `torch.autograd.backward` in Python.

They compare each gradient with its output through `torch.fx.experimental.symbolic_shapes`, which
imports sympy: 0.3 s in the first backward of every process. The engine checks the shapes too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import graph

from pipemega.distributed.comm_errors import is_connection_loss
from pipemega.distributed.device_waits import located_by
from pipemega.errors import PipelineError
from pipemega.monitor import MultiTimer
from pipemega.pipeline.execution_state import (
    ComputeWrapper,
    ExecutionState,
    Handler,
    InFlight,
    MicroBatches,
    Results,
)
from pipemega.pipeline.execution_state import RankStages as RankStages
from pipemega.pipeline.messages import (
    InputGradient,
    InputGuard,
    TensorMeta,
    ViewGuard,
    check_unchanged,
    collect_gradients,
    map_tensors,
    sharing_memory,
    tensors_of,
    versions_of,
)
from pipemega.pipeline.microbatch_loss import microbatch_loss, set_auxiliary_factor
from pipemega.pipeline.model.batch_norm import uncounted
from pipemega.pipeline.model.module import keep_buffers
from pipemega.pipeline.model.vocabulary_shard import VocabularyShard
from pipemega.pipeline.plan.channels import Channel
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.plan.lowering import last_gradients
from pipemega.pipeline.plan.validate import PlanPosition
from pipemega.pipeline.recorder import NULL_RECORDER, Recorder
from pipemega.pipeline.transport import Receive, Transport
from pipemega.pipeline.weight_queue import GradReadyListener, WeightGradQueue
from pipemega.tensor_parallel.deferred_logits import defer_logits, takes_deferred_logits


def run_backward(outputs: Sequence[Any], gradients: Sequence[Tensor]) -> None:
    """Accumulate the gradients of the leaves, from one gradient for each output.

    Args:
        outputs: tensors or `GradientEdge`s.

    Raises:
        RuntimeError: a gradient has another shape than its output.
    """
    # torch's own entry, which passes the context variables on to the engine's threads.
    run = getattr(graph, "_engine_run_backward", None)
    if run is None:
        torch.autograd.backward(outputs, gradients)
        return
    run(
        tuple(outputs),
        tuple(gradients),
        False,  # retain_graph
        False,  # create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class PipelineEnds:
    """The first stage gets the inputs of the micro-batches; backward starts from their losses.

    Gradients are passed as between stages: the first stage leaves the gradients of its input, and
    the last stage takes the gradients of its output, as if a stage followed
    (`ExecutionState.gradients`).

    Args:
        model: the local stages, with the loss.

    Attributes:
        reads: whether this rank needs the inputs, and the labels, of the micro-batches.
        modules: layers of the model that are on this rank and in none of its stages.
        handlers: run the instructions that only a derived class has.
    """

    modules: Sequence[VocabularyShard] = ()
    handlers: Mapping[Kind, Callable[[Instruction], None]] = {}

    def __init__(self, model: RankStages) -> None:
        self._model, self._last = model, model.num_stages - 1
        self.reads = 0 in model.stages, self._last in model.stages
        self._guard = InputGuard()
        self._run: ExecutionState  # set by `begin`

    def begin(self, run: ExecutionState) -> None:
        """Prepare a run; collective over the pipeline."""
        self._run = run

    def first_input(self, m: int) -> tuple[Any, list[InputGradient]]:
        """Return the input of the first stage, and the gradients that its backward computes."""
        return self._model.cast_inputs(self._run.batch.inputs[m]), []

    def output_context(self, m: int) -> AbstractContextManager[None]:
        """Return the context in which the head defers its logits if only the loss needs them."""
        batch, stage = self._run.batch, self._model.stages[self._last]
        if batch.uses_outputs or m >= len(batch.labels):
            return nullcontext()
        is_read = stage.observer is not None and stage.observer.reads_outputs
        loss_fn = self._model.loss_fn
        if is_read or not takes_deferred_logits(loss_fn):
            return nullcontext()
        return defer_logits(loss_fn, stage.last_layer, batch.loss_factor, batch.counted_labels(m))

    def last_output(self, m: int, output: Any) -> Any:
        """Record the results of the last stage; return what its backward starts from.

        That is the loss, or the output if there is none. As between stages, the gradient of it must
        be in the state of the run before this backward begins.
        """
        run, loss_fn = self._run, self._model.loss_fn
        batch, share, result = run.batch, run.batch.share(m), output
        is_used = share > 0 and batch.uses_outputs
        detached = map_tensors(Tensor.detach, output) if is_used else None
        if is_used and batch.keep_outputs:
            run.results.outputs[m] = detached
        has_labels = m < len(batch.labels)
        labels = batch.labels[m] if has_labels else None
        if has_labels and loss_fn is not None:

            def run_loss(copied: Any) -> tuple[Tensor, Tensor]:
                outputs, labels = copied if is_used else (output, copied)
                return microbatch_loss(loss_fn, outputs, labels, share, run.train)

            # The loss must not change labels, and outputs that are used again.
            key = ("loss", run.train, is_used)
            given = (output, labels) if is_used else labels
            result, weight = self._guard.bind(key)(run_loss, given)
            run.results.losses.add(m, result, weight)
        if has_labels and is_used and batch.on_output is not None:
            batch.on_output(detached, labels)
        if run.train:
            run.gradients[self._last + 1, m] = [
                torch.full_like(tensor, batch.loss_factor)
                for tensor in tensors_of(result)
                if tensor.requires_grad
            ]
        return result

    def layer_result(self, step: Instruction) -> tuple[int, Tensor | None, Tensor | None] | None:
        """Return (position, input, result) of the layer of `modules` that `step` has just run.

        None if it has run none.
        """
        return None


T = TypeVar("T")

# Equal channels are one object: a tuple is created once, not for every message.
_channel = lru_cache(maxsize=None)(Channel)


class Executor:
    """Runs plans on one pipeline rank.

    Args:
        model: the local stages, with the loss.
        transport: sends to and receives from other pipeline ranks; None if this rank holds all
            stages.
        timers: measure forward, backward and communication.
        weight_queue: holds the deferred weight gradients; None if no plan splits backward.
        grad_listener: is notified when the last backward of a stage runs; may be None.
        before_training: called before each run with backwards; may be None.
        ends: give the input of the first stage, and use the output of the last; None: data and
            loss of the micro-batches.
        wrapper: runs the compute instructions: moves activations, or replays layers; may be None.
    """

    def __init__(
        self,
        model: RankStages,
        transport: Transport | None,
        timers: MultiTimer | None = None,
        weight_queue: WeightGradQueue | None = None,
        grad_listener: GradReadyListener | None = None,
        before_training: Callable[[], None] | None = None,
        ends: PipelineEnds | None = None,
        wrapper: ComputeWrapper | None = None,
    ) -> None:
        self._model, self._transport, self._wrapper = model, transport, wrapper
        self._before_training = before_training
        self.rank, self.stages = model.rank, model.stages
        self._timers = timers or MultiTimer(enabled=False)
        self._weight_queue, self._grad_listener = weight_queue, grad_listener
        self.ends = ends or PipelineEnds(model)
        self._handlers: Mapping[Kind, Handler] = {
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_GRADIENT: self._receive_gradient,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            **self.ends.handlers,
        }
        if wrapper is not None:
            self._handlers = {
                kind: handler if kind.is_message else partial(wrapper.run, handler)
                for kind, handler in self._handlers.items()
            }
        self._run: ExecutionState  # set by `begin`

    @property
    def needs_first_run(self) -> bool:
        """Whether a run of one micro-batch must come before the first step."""
        return self._wrapper is not None and self._wrapper.needs_first_run

    @property
    def plan(self) -> Plan:
        """The plan of the latest run."""
        return self._run.plan

    @property
    def results(self) -> Results:
        """The results of the forwards that have run so far."""
        return self._run.results

    def forget_shapes(self, *, declared: bool = False) -> None:
        """Let the next messages have other shapes than the ones before; on every rank.

        Args:
            declared: also other shapes than the model declares.
        """
        if self._transport is not None:
            self._transport.forget_headers(declared=declared)

    def run(self, plan: Plan, batch: MicroBatches, recorder: Recorder = NULL_RECORDER) -> Results:
        """Run this rank's program of the lowered `plan` once; gradients add up in the parameters.

        Args:
            recorder: records the times of each instruction.

        Raises:
            PipelineError: names the instruction that failed, its stage and layer; for a failed
                or timed-out message also the peer, with the table of the plan.
        """
        self.begin(plan, batch, recorder)
        self.work(plan.programs[self.rank])
        return self.end()

    def begin(self, plan: Plan, batch: MicroBatches, recorder: Recorder = NULL_RECORDER) -> None:
        """Prepare a run; `work` may then execute the program in several parts."""
        self._run = run = ExecutionState(plan, batch, recorder)
        set_auxiliary_factor(batch.loss_factor, batch.weight_per_sample)
        if self._transport is not None:
            self._transport.exchange_all(plan.forward_only or batch.has_other_shapes)
        if self._before_training is not None and run.train:
            self._before_training()
        for stage in self.stages.values():
            stage.train(run.train)
        if self._grad_listener is not None and run.train and not batch.discard_grads:
            run.final_backwards = last_gradients(plan.programs[self.rank])
            self._grad_listener.begin()
        if self._wrapper is not None:
            self._wrapper.begin(run, plan.programs[self.rank])
        self.ends.begin(run)
        recorder.begin()

    def work(self, steps: Program) -> None:
        """Execute the next part of the program."""
        run, handlers = self._run, self._handlers
        end = run.recorder.end
        # The time since the previous part does not belong to the first instruction.
        run.recorder.ready()
        with torch.set_grad_enabled(run.train), self._locate_errors():
            for step in steps:
                handlers[step.kind](step)
                end()
                run.completed += 1

    def end(self) -> Results:
        """Wait until all messages of this rank were delivered; return the results."""
        run = self._run
        with self._locate_errors():
            if self._transport is not None:
                self._transport.flush()
        assert not run.in_flight, f"never run backward: {list(run.in_flight)}"
        results, run.results = run.results, Results()
        return results

    def discard(self, unread: Program) -> None:
        """Drop the forwards that have run, and complete all receives that peers have sent to.

        Args:
            unread: the receives that are not posted yet, of messages that were sent to this rank.
        """
        for step in unread:
            self._receive_activation(step)
        if self._transport is not None:
            for receive in self._run.activation_receives.values():
                self._transport.wait(receive)
            self._transport.flush(check=False)
        self._run = ExecutionState(self.plan, MicroBatches((), ()), NULL_RECORDER)

    @contextmanager
    def _locate_errors(self) -> Iterator[None]:
        """Add to an error the instruction that failed; to a lost connection also the plan."""
        try:
            # The device may wait in an instruction that the host has left long ago.
            with located_by(self._locator):
                yield
        except Exception as error:
            if isinstance(error, PipelineError) and error.place is not None:
                raise
            raise self._located(error, self.plan, self._run.completed) from error

    def _locator(self) -> Callable[[Exception], PipelineError]:
        plan, at = self.plan, self._run.completed
        return lambda error: self._located(error, plan, at)

    def _located(self, error: Exception, plan: Plan, at: int) -> PipelineError:
        """Return `error` with instruction `at` of this rank's program, where it happened."""
        ranks = (0,) if self._transport is None else self._transport.ranks
        place = PlanPosition(plan, ranks, self.rank, at)
        program = plan.programs[self.rank]
        where = _description(program[at]) if at < len(program) else "end of the step"
        name = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
        table = f"\n{place.table}" if is_connection_loss(error) else ""
        located = PipelineError(f"{where}: {name}{error}{table}", place=place)
        located.__cause__ = error
        return located

    # Forward

    def _receive_activation(self, step: Instruction) -> None:
        assert self._transport is not None
        receive = self._transport.receive(_channel("activation", step.stage - 1), step.microbatch)
        self._run.activation_receives[step.stage, step.microbatch] = receive

    def _forward(self, step: Instruction) -> None:
        run, key = self._run, (step.stage, step.microbatch)
        x, inputs, views = self._stage_input(step)
        guard = ViewGuard(x, views) if views else None
        is_last = step.stage == self._model.num_stages - 1
        run_stage = self._run_last_stage if is_last else self._run_stage
        output = self._timed("forward", run_stage, step, x)
        if guard is not None:
            guard.check()
        tensors = tensors_of(output)
        if not is_last:
            run.activations[key] = output, versions_of(tensors)
        if run.train:
            run.in_flight[key] = InFlight.of(inputs, tensors)

    def _timed(self, name: str, function: Callable[..., T], *args: Any) -> T:
        """Call the function; measure it if the timers are enabled."""
        if not self._timers.enabled:
            return function(*args)
        with self._timers(name):
            return function(*args)

    def _run_stage(self, step: Instruction, x: Any) -> Any:
        stage, batch, m = self.stages[step.stage], self._run.batch, step.microbatch
        rng_key = None if batch.rng_keys is None else batch.rng_keys[m]
        if batch.shares is None or batch.shares[m] > 0:
            return stage(x, rng_key)
        # A micro-batch without samples must not change running statistics.
        with keep_buffers(stage), uncounted():
            return stage(x, rng_key)

    def _run_last_stage(self, step: Instruction, x: Any) -> Any:
        with self.ends.output_context(step.microbatch):
            return self.ends.last_output(step.microbatch, self._run_stage(step, x))

    def _stage_input(self, step: Instruction) -> tuple[Any, list[InputGradient], list[int]]:
        """Return the input, the gradients to compute, and the indices of the views in the input."""
        run, key = self._run, (step.stage, step.microbatch)
        if step.stage == 0:
            return *self.ends.first_input(step.microbatch), []
        if (receive := run.activation_receives.pop(key, None)) is not None:
            message = self._wait(receive)
            assert receive.header is not None
            views = receive.header.views
        else:
            message = self._take_output(step.stage - 1, step.microbatch)
            views = sharing_memory(tensors_of(message))
        return *collect_gradients(message), views

    def _take_output(self, stage: int, microbatch: int) -> Any:
        """Return the output of a local stage, for the next stage."""
        output, versions = self._run.activations.pop((stage, microbatch))
        name = f"the activation of micro-batch {microbatch} of stage {stage}"
        check_unchanged(output, versions, name)
        return output

    def _send_activation(self, step: Instruction) -> None:
        assert self._transport is not None
        message = self._take_output(step.stage, step.microbatch)
        self._transport.send(_channel("activation", step.stage), step.microbatch, message)

    def _wait(self, receive: Receive) -> Any:
        assert self._transport is not None
        message = self._timed("communication", self._transport.wait, receive)
        self._run.recorder.ready()
        return message

    # Backward

    def _receive_gradient(self, step: Instruction) -> None:
        assert self._transport is not None
        key, in_flight = (step.stage, step.microbatch), self._run.in_flight

        def shapes() -> list[TensorMeta] | None:
            return in_flight[key].metas if key in in_flight else None

        channel = _channel("gradient", step.stage)
        self._run.gradient_receives[key] = self._transport.receive(channel, step.microbatch, shapes)

    def _backward(self, step: Instruction) -> None:
        run, key = self._run, (step.stage, step.microbatch)
        gradients = self._output_gradients(step)
        state = run.in_flight.pop(key)
        if state.edges:
            counts = run.batch.share(step.microbatch) > 0
            with nullcontext() if counts else uncounted():
                self._run_backward(step, run_backward, state.edges, gradients)
        run.gradients[key] = [gradient.take() for gradient in state.inputs]

    def _output_gradients(self, step: Instruction) -> list[Tensor]:
        run, key = self._run, (step.stage, step.microbatch)
        if key in run.gradient_receives:
            assert self._transport is not None
            gradients = self._wait(run.gradient_receives.pop(key))
            # The gradient proves that the peer has used the activation.
            self._transport.release(_channel("activation", step.stage), step.microbatch)
            return list(gradients)
        return run.gradients.pop((step.stage + 1, step.microbatch))

    def _send_gradient(self, step: Instruction) -> None:
        assert self._transport is not None
        gradients = self._run.gradients.pop((step.stage, step.microbatch))
        self._transport.send(_channel("gradient", step.stage - 1), step.microbatch, gradients)

    def _backward_input(self, step: Instruction) -> None:
        assert self._weight_queue is not None, "a plan with I and W needs a WeightGradQueue"
        with self._weight_queue.defer((step.stage, step.microbatch)):
            self._backward(step)

    def _backward_weight(self, step: Instruction) -> None:
        assert self._weight_queue is not None, "a plan with I and W needs a WeightGradQueue"
        mark_ready = None
        if self._grad_listener is not None and step in self._run.final_backwards:
            mark_ready = self._grad_listener.mark_ready
        key = (step.stage, step.microbatch)
        self._run_backward(step, self._weight_queue.run, key, mark_ready)

    def _run_backward(self, step: Instruction, backward: Callable[..., None], *args: Any) -> None:
        """Call `backward`; notify the listener if `step` completes the gradients of its stage."""
        if self._grad_listener is None or step not in self._run.final_backwards:
            self._timed("backward", backward, *args)
            return
        pending = None
        if step.kind is Kind.BACKWARD_WEIGHT and self._weight_queue is not None:
            pending = self._weight_queue.pending_weights((step.stage, step.microbatch))
        parameters = self.stages[step.stage].parameters()
        with self._grad_listener.final_backward(parameters, pending):
            self._timed("backward", backward, *args)


def _description(step: Instruction) -> str:
    names = {
        Kind.BACKWARD_INPUT: "input-gradient backward",
        Kind.BACKWARD_WEIGHT: "weight-gradient backward",
    }
    name = names.get(step.kind, step.kind.name.lower().replace("_", " "))
    place = f"{'pipeline rank' if step.kind.has_shard else 'stage'} {step.stage}"
    return f"{name} of micro-batch {step.microbatch} at {place} ({step})"
