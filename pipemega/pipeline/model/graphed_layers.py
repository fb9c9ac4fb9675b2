"""CUDA graphs of layers: one launch for the forward of a layer, and one for its backward.

    slot 0    F0 ...... B0  F2 ...... B2        fixed memory: inputs, activations, gradients
    slot 1        F1 ...... B1  F3 ...... B3

The memory of a graph is fixed, and a stage holds several micro-batches between F and B (or W). So a
stage has one slot for each of them, with two graphs of each layer. They are captured before the
first message of a step, with the inputs that the run of one micro-batch has noted
(`kernel_warmup`). The weight gradients that I queues are queued again after each replay.

A layer runs as without graphs if its inputs or outputs are not tensors or share memory, if it
changes its input, reads values or draws random numbers on the host, has hooks, runs a backward in
its forward, shares a parameter with another layer, runs twice in a forward or is recomputed; also
the last layer of the model, whose output the loss may change, and micro-batches of another shape. A
layer must do the same in every step.

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
from torch.utils._python_dispatch import TorchDispatchMode

from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.errors import PipelineError
from pipemega.parameters import has_user_hook
from pipemega.pipeline.execution_state import ComputeWrapper, ExecutionState, Handler, Key
from pipemega.pipeline.messages import sharing_memory
from pipemega.pipeline.model.module import BufferCopies, Stage
from pipemega.pipeline.plan.instructions import Instruction, Kind, Program
from pipemega.pipeline.plan.lowering import most_in_flight
from pipemega.pipeline.weight_queue import Job, WeightGradQueue
from pipemega.random import preserve_rng

_WARMUPS = 1  # the kernels are loaded already
_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default)


def graphs_on(device_type: str) -> bool:
    """Return whether such a device has graphs."""
    return device_type == "cuda"


class _Graph(NamedTuple):
    """The graphs of one layer in one slot.

    Args:
        function: replays the forward, and in backward the backward.
        jobs: the weight gradients that the backward has queued.
        needs_grad: which outputs require a gradient; torch's function has one for all.
    """

    function: Callable[..., Any]
    jobs: list[Job]
    needs_grad: list[bool]


_Slot = dict["_Layer", _Graph]


class LayerGraphs(ComputeWrapper):
    """The graphs of the layers of one rank.

    Args:
        stages: the local stages.
        num_layers: of the whole model.
        queue: takes the weight gradients of the layers; may be None.
    """

    needs_first_run = True

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
            has_changed = self._slots and any(layer.has_changed() for layer in layers)
            if has_changed or (not self._slots and any(layer.calls for layer in layers)):
                self._capture(program)
        for layer in layers:
            layer.has_hooks = layer.find_hooks()
        self._free = {number: [*slots] for number, slots in self._slots.items()}

    def run(self, handler: Handler, step: Instruction) -> None:
        """Run a compute instruction; F takes a slot, and the end of backward frees it."""
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
            copied = partial(_copied, self._mesh.device)
            inputs = tuple(pytree.tree_map(copied, layer.sample) for layer in layers)
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
            layer: _Graph(
                module.forward,
                [job for job in jobs if id(job.weight) in layer.weights],
                module.needs_grad,
            )
            for layer, module in zip(layers, modules, strict=True)
        }

    def replay(self, graph: _Graph, args: tuple[Any, ...]) -> Any:
        """Return the output of a layer; its backward queues the weight gradients."""
        leaves, spec = pytree.tree_flatten(graph.function(*args))
        if graph.jobs and self._queue is not None:
            node = next(leaf.grad_fn for leaf in leaves if leaf.requires_grad)
            node.register_hook(partial(self._queue.add_again, graph.jobs))
        pairs = zip(leaves, graph.needs_grad, strict=True)
        return pytree.tree_unflatten([t if need else t.detach() for t, need in pairs], spec)


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
        self._metas: list[Any] = []
        self.weights = {id(parameter) for parameter in module.parameters()}
        self._captured: list[tuple[int, bool]] = []
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphs = self._graphs
        if graphs.notes:
            return self._note(args, kwargs)
        if graphs.slot is None or self.has_hooks or kwargs or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        graph = graphs.slot.get(self)
        if graph is None or _metas(args) != self._metas:
            return self.plain(*args)
        return graphs.replay(graph, args)

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the layer; note its arguments, and why it cannot have graphs."""
        state, given = torch.default_generator.get_state(), pytree.tree_leaves((args, kwargs))
        # In host memory: on the device the samples of all layers would stay.
        self.sample = pytree.tree_map_only(Tensor, partial(_copied, torch.device("cpu")), args)
        self._metas = _metas(self.sample)
        versions = [t._version for t in given if isinstance(t, Tensor)]
        backwards: list[Tensor] = []
        handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                backwards.append
            )
            for parameter in self.module.parameters()
            if parameter.requires_grad
        ]
        with _HostReads() as reads:  # type: ignore[no-untyped-call]
            result = self.plain(*args, **kwargs)
        for handle in handles:
            handle.remove()
        leaves = pytree.tree_leaves(result)
        # Without masks and positions that pass through.
        passed = {id(tensor) for tensor in given}
        new = [t for t in leaves if id(t) not in passed or getattr(t, "requires_grad", False)]
        self.calls += 1
        if kwargs or not all(isinstance(leaf, Tensor) for leaf in (*given, *leaves)):
            self.reason = "its inputs and outputs are not only tensors"
        elif not any(leaf.requires_grad for leaf in leaves):
            self.reason = "its output needs no gradient, or it is recomputed"
        elif versions != [t._version for t in given]:
            self.reason = "it changes its input"
        elif sharing_memory([*given, *new]):
            self.reason = "its inputs and outputs share memory"
        elif not torch.equal(state, torch.default_generator.get_state()):
            self.reason = "it draws random numbers on the host"
        elif reads.found or any(getattr(m, "reads_host", False) for m in self.module.modules()):
            self.reason = "it reads a value on the host"
        elif backwards:
            self.reason = "it runs a backward in its forward"
        return result

    def check(self, uses: Mapping[int, int]) -> None:
        """Set `reason` from the whole run; `uses`: how many layers have a parameter."""
        if self.calls != 1:
            self.reason = f"it ran {self.calls} times in a forward"
        elif self.find_hooks():
            self.reason = "it has hooks"
        elif any(uses[number] > 1 for number in self.weights):
            self.reason = "it shares a parameter with another layer"
        self._captured = self._state()

    def find_hooks(self) -> bool:
        """Return whether a module or a parameter of the layer has hooks."""
        return any(map(has_user_hook, self.module.parameters())) or any(
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            for module in self.module.modules()
        )

    def has_changed(self) -> bool:
        """Return whether a parameter has other memory than in the graphs, or was (un)frozen."""
        return self.reason is None and self._captured != self._state()

    def _state(self) -> list[tuple[int, bool]]:
        return [(p.data_ptr(), p.requires_grad) for p in self.module.parameters()]


class _HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that finds out whether an operation gives a value to the host."""

    found = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports the compiler.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func in _READS
        return func(*args, **(kwargs or {}))


class _Captured(nn.Module):
    """Calls a layer while torch captures it.

    Args:
        jobs: what the queue records; the jobs of the warm-ups are dropped.
    """

    def __init__(self, layer: _Layer, jobs: list[Job]) -> None:
        super().__init__()
        # A child, so that torch finds the parameters.
        self.layer, self._plain, self._jobs = layer.module, layer.plain, jobs
        self._calls, self.needs_grad = 0, list[bool]()

    def forward(self, *args: Any) -> Any:
        self._calls += 1
        if self._calls > _WARMUPS:
            self._jobs.clear()
        result = self._plain(*args)
        self.needs_grad = [leaf.requires_grad for leaf in pytree.tree_leaves(result)]
        return result


@contextmanager
def _capture_of_this_thread() -> Iterator[None]:
    """Let other threads, such as loaders that pin memory, use the device during a capture."""
    whole = torch.cuda.graph
    torch.cuda.graph = partial(whole, capture_error_mode="thread_local")  # type: ignore
    try:
        yield
    finally:
        torch.cuda.graph = whole  # type: ignore[misc]


def _copied(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def _metas(args: tuple[Any, ...]) -> list[Any]:
    return [
        (t.shape, t.stride(), t.dtype, t.requires_grad) if isinstance(t, Tensor) else t
        for t in pytree.tree_leaves(args)
    ]
