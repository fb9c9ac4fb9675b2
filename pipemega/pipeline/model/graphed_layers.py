"""CUDA graphs of layers: one launch for the forward of a layer, and one for its backward.

    slot 0    F0 ...... B0  F2 ...... B2        fixed memory: inputs, activations, gradients
    slot 1        F1 ...... B1  F3 ...... B3

The memory of a graph is fixed, and a stage holds several micro-batches between F and B (or W). So a
stage has one slot for each of them, with two graphs of each layer. They are captured before the
first message of a step, with the inputs that the run of one micro-batch has noted
(`kernel_warmup`). The weight gradients that I queues are queued again after each replay.

A layer runs as without graphs if its inputs or outputs are not tensors, if it changes its input,
draws random numbers on the host, has hooks, shares a parameter with another layer, runs twice in a
forward or is recomputed; also the last layer of the model, whose output the loss may change, and
micro-batches of another shape. A layer must do the same in every step.

Source: partial-network capture, `torch.cuda.make_graphed_callables`.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.errors import PipelineError
from pipemega.pipeline.execution_state import ExecutionState, Key
from pipemega.pipeline.model.module import BufferCopies, Stage
from pipemega.pipeline.plan.instructions import Instruction, Kind, Program
from pipemega.pipeline.plan.lowering import most_in_flight
from pipemega.pipeline.weight_queue import Job, WeightGradQueue
from pipemega.random import preserve_rng

_WARMUPS = 1  # the kernels are loaded already


def graphs_on(device_type: str) -> bool:
    """Return whether such a device has graphs."""
    return device_type == "cuda"


class _Graph(NamedTuple):
    """The graphs of one layer in one slot.

    Args:
        function: replays the forward, and in backward the backward.
        jobs: the weight gradients that the backward has queued.
    """

    function: Callable[..., Any]
    jobs: list[Job]


_Slot = dict["_Layer", _Graph]


class LayerGraphs:
    """The graphs of the layers of one rank.

    Args:
        stages: the local stages.
        num_layers: of the whole model.
        queue: takes the weight gradients of the layers; may be None.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        num_layers: int,
        queue: WeightGradQueue | None,
        mesh: Mesh,
        log: logging.Logger,
    ) -> None:
        self._stages, self._queue, self._mesh, self._log = stages, queue, mesh, log
        self._layers = {
            number: [
                _Layer(self, layer, f"{stage.name_of(position)} (layers.{position})")
                for position, layer in enumerate(stage.layers.values(), stage.start)
                if position < num_layers - 1
            ]
            for number, stage in stages.items()
        }
        # Stage -> slots; a slot has the graphs of the layers.
        self._slots: dict[int, list[_Slot]] = {}
        self._free: dict[int, list[_Slot]] = {}
        self._held: dict[Key, _Slot] = {}
        self._run: ExecutionState  # set by `begin`
        self.notes = False
        """Whether this run notes the inputs of the layers."""
        self.slot: _Slot | None = None
        """The slot of the forward that runs."""

    def begin(self, run: ExecutionState, program: Program) -> None:
        """Prepare a run of `program`; capture the graphs before the first step.

        Raises:
            PipelineError: a layer cannot be captured.
        """
        self._run, self._held = run, {}
        self.notes = run.train and run.batch.discard_grads and not self._slots
        layers = [layer for layers in self._layers.values() for layer in layers]
        if run.train and not run.batch.discard_grads:
            moved = self._slots and any(layer.has_moved() for layer in layers)
            if moved or (not self._slots and any(layer.calls for layer in layers)):
                self._capture(program)
        for layer in layers:
            layer.has_hooks = layer.find_hooks()
        self._free = {number: [*slots] for number, slots in self._slots.items()}

    def around(
        self, handlers: Mapping[Kind, Callable[[Instruction], None]]
    ) -> dict[Kind, Callable[[Instruction], None]]:
        """Return handlers of instructions that take and free slots."""
        return {
            kind: handler if kind.is_message else partial(self._handle, handler)
            for kind, handler in handlers.items()
        }

    def _handle(self, handler: Callable[[Instruction], None], step: Instruction) -> None:
        run, key = self._run, (step.stage, step.microbatch)
        if step.kind is Kind.FORWARD:
            free = self._free.get(step.stage)
            if run.train and free and run.batch.share(step.microbatch) == 1:
                self.slot = self._held[key] = free.pop()
            try:
                handler(step)
            finally:
                self.slot = None
            return
        handler(step)
        if key not in self._held:
            return
        if step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            # They may be on their way when the next micro-batch takes the slot.
            run.gradients[key] = [gradient.clone() for gradient in run.gradients[key]]
        if step.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self._free[step.stage].append(self._held.pop(key))

    def _capture(self, program: Program) -> None:
        started, counts = time.perf_counter(), most_in_flight(program)
        self._slots = {}
        uses = Counter(
            id(p) for ls in self._layers.values() for each in ls for p in each.module.parameters()
        )
        buffers = BufferCopies(self._stages.values())
        for number, layers in self._layers.items():
            for layer in layers:
                layer.check(uses)
            here = [layer.reason for layer in layers]
            # Tensor ranks communicate within a graph.
            for layer, *found in zip(layers, *gather_objects(here, self._mesh.tensor), strict=True):
                layer.reason = next((reason for reason in found if reason is not None), None)
            captured = [layer for layer in layers if layer.reason is None]
            with preserve_rng(self._mesh.device):
                self._slots[number] = [
                    self._new_slot(number, captured) for _ in range(counts.get(number, 0))
                ]
        buffers.restore()
        seconds = time.perf_counter() - started
        for number, layers in self._layers.items():
            count, slots = len(self._stages[number].layers), len(self._slots[number])
            # Of several layers with one reason the first.
            left = {layer.reason: layer.name for layer in reversed(layers) if layer.reason}
            self._log.info(
                f"stage {number}: captured {sum(not layer.reason for layer in layers)} of {count} "
                f"layers as CUDA graphs, for {slots} micro-batches in flight, in {seconds:.1f} s"
                + "".join(f"; {name} runs without: {reason}" for reason, name in left.items())
            )

    def _new_slot(self, number: int, layers: "list[_Layer]") -> "_Slot":
        """Capture the forwards of these layers, and their backwards in reverse order."""
        if not layers:
            return {}
        queue, jobs = self._queue, list[Job]()
        with nullcontext(jobs) if queue is None else queue.record() as jobs:
            modules = tuple(_Captured(layer, jobs) for layer in layers)
            inputs = tuple(pytree.tree_map(_static, layer.sample) for layer in layers)
            try:
                with torch.enable_grad(), _capture_of_this_thread():
                    torch.cuda.make_graphed_callables(modules, inputs, _WARMUPS, True)
            except Exception as error:
                raise PipelineError(
                    f"the layers of stage {number} cannot be captured as CUDA graphs "
                    f"({type(error).__name__}: {error}): set compile.cuda_graphs to false"
                ) from error
            jobs = list(jobs)
        return {
            layer: _Graph(module.forward, [job for job in jobs if id(job.weight) in layer.weights])
            for layer, module in zip(layers, modules, strict=True)
        }

    def replay(self, graph: _Graph, args: tuple[Any, ...]) -> Any:
        """Return the output of a layer; its backward queues the weight gradients."""
        result = graph.function(*args)
        if graph.jobs and self._queue is not None:
            node = next(t.grad_fn for t in pytree.tree_leaves(result) if t.requires_grad)
            node.register_hook(partial(self._queue.add_again, graph.jobs))
        return result


class _Layer:
    """Replaces the method `forward` of a layer.

    Args:
        name: for messages.

    Attributes:
        calls: number of calls in the run that notes inputs.
        reason: why the layer runs without graphs; None: it has them.
        sample: arguments, as that run had them.
        weights: ids of the parameters.
        has_hooks: hooks were added, which a graph would not call.
    """

    def __init__(self, graphs: LayerGraphs, module: nn.Module, name: str) -> None:
        self._graphs, self.module, self.name = graphs, module, name
        self.plain = module.forward
        self.calls, self.has_hooks = 0, False
        self.reason: str | None = None
        self.sample: tuple[Any, ...] = ()
        self.weights = {id(parameter) for parameter in module.parameters()}
        self._addresses: list[int] = []
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphs = self._graphs
        if graphs.notes:
            return self._note(args, kwargs)
        if graphs.slot is None or self.has_hooks or kwargs or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        graph = graphs.slot.get(self)
        if graph is None or _metas(args) != _metas(self.sample):
            return self.plain(*args)
        return graphs.replay(graph, args)

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the layer; note its arguments, and why it cannot have graphs."""
        state, given = torch.default_generator.get_state(), pytree.tree_leaves((args, kwargs))
        self.sample = pytree.tree_map_only(Tensor, _static, args)
        versions = [t._version for t in given if isinstance(t, Tensor)]
        result = self.plain(*args, **kwargs)
        leaves = pytree.tree_leaves(result)
        self.calls += 1
        if kwargs or not all(isinstance(leaf, Tensor) for leaf in (*given, *leaves)):
            self.reason = "its inputs and outputs are not only tensors"
        elif not any(leaf.requires_grad for leaf in leaves):
            self.reason = "its output needs no gradient, or it is recomputed"
        elif versions != [t._version for t in given]:
            self.reason = "it changes its input"
        elif not torch.equal(state, torch.default_generator.get_state()):
            self.reason = "it draws random numbers on the host"
        return result

    def check(self, uses: Mapping[int, int]) -> None:
        """Set `reason` from the whole run; `uses`: how many layers have a parameter."""
        if self.calls != 1:
            self.reason = f"it ran {self.calls} times in a forward"
        elif self.find_hooks():
            self.reason = "it has hooks"
        elif any(uses[number] > 1 for number in self.weights):
            self.reason = "it shares a parameter with another layer"
        self._addresses = self._current_addresses()

    def find_hooks(self) -> bool:
        """Return whether a module within the layer has hooks; those of the layer itself run."""
        return any(
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            for module in self.module.modules()
            if module is not self.module
        )

    def has_moved(self) -> bool:
        """Return whether a parameter has other memory than in the graphs."""
        return self.reason is None and self._addresses != self._current_addresses()

    def _current_addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.module.parameters()]


class _Captured(nn.Module):
    """Calls a layer while torch captures it.

    Args:
        jobs: what the queue records; the jobs of the warm-ups are dropped.
    """

    def __init__(self, layer: _Layer, jobs: list[Job]) -> None:
        super().__init__()
        # A child, so that torch finds the parameters.
        self.layer, self._plain, self._jobs = layer.module, layer.plain, jobs
        self._calls = 0

    def forward(self, *args: Any) -> Any:
        self._calls += 1
        if self._calls > _WARMUPS:
            self._jobs.clear()
        return self._plain(*args)


@contextmanager
def _capture_of_this_thread() -> Iterator[None]:
    """Let other threads, such as loaders that pin memory, use the device during a capture."""
    whole = torch.cuda.graph
    torch.cuda.graph = partial(whole, capture_error_mode="thread_local")  # type: ignore
    try:
        yield
    finally:
        torch.cuda.graph = whole  # type: ignore[misc]


def _static(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _metas(args: tuple[Any, ...]) -> list[Any]:
    return [
        (t.shape, t.stride(), t.dtype, t.requires_grad) if isinstance(t, Tensor) else t
        for t in pytree.tree_leaves(args)
    ]
