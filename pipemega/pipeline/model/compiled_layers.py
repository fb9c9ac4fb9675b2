"""Layers that torch.compile compiles: once for each class and shape, at its first forward.

    layer.forward = _CompiledMethod(layer, kind)      kind: one compiled function for equal layers

Only the method of the instance is replaced, so no name of a module or parameter changes. A layer
runs uncompiled without gradients (evaluation, generation), with hooks in it that were added after
it was built, while its operations are recorded, and if the compiler has failed.

Tensor ranks compile the same graphs in the same order. A graph that one of them cannot compile runs
uncompiled on all of them, so that they round equally and run the same collectives.

The deferred weight gradient of a linear within a compiled layer.

    forward     y = x Wᵀ + b
    backward    dx = dy W, and (x, dy) to the queue: one operator of the graph

The graph of a compiled layer is the same for all layers of its class, so the linear is not a
constant of it but an input: a tensor with the number of the linear.
"""

import itertools
import json
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor
import torch.utils._triton
from torch import Tensor, library, nn
from torch.nn import functional as F

from pipemega import random
from pipemega.config.sections.pipeline_sections import CompileSection
from pipemega.distributed.mesh import Axis, Mesh, gather_objects
from pipemega.errors import ConfigError
from pipemega.parameters import shard_of
from pipemega.pipeline import split_backward
from pipemega.pipeline.model.module import Stage
from pipemega.pipeline.weight_queue import WeightGradQueue
from pipemega.tensor_parallel.collectives import allow_tracing
from pipemega.tensor_parallel.layers import LinearProducts, gradient_of
from pipemega.tensor_parallel.overlapped_products import rows_of


class _Target:
    """The weight of one linear, and the queue that takes its gradients."""

    def __init__(
        self, queue: WeightGradQueue, module: nn.Module, products: LinearProducts | None
    ) -> None:
        # The module and not its weight, which may be replaced by a tied one.
        self.queue, self._module, self.products = queue, weakref.ref(module), products

    def add(self, x: Tensor, dy: Tensor) -> None:
        module = self._module()
        weight = None if module is None else module._parameters["weight"]
        assert weight is not None
        # Not summed: in a whole backward each gradient is added as it comes.
        if self.products is None and self.queue.fuses(weight, dy):
            gradient: Callable[[], Tensor | None] = partial(self.queue.add_product, weight, dy, x)
        else:
            gradient = partial(gradient_of(self.products), x, dy)
        self.queue.add(weight, gradient, is_summed=False)


_numbers, _engines = itertools.count(), itertools.count(1)
_targets: "weakref.WeakValueDictionary[int, _Target]" = weakref.WeakValueDictionary()


def trace_deferred_gradients(modules: Iterable[nn.Module]) -> None:
    """Let layers that defer weight gradients be compiled; see `enable_split_backward`.

    Linears are a part of the graph. Between other layers with deferred gradients (embeddings,
    convolutions) the graph is cut.
    """
    for module in modules:
        for name in ("product", "forward", "lookup"):
            replaced = vars(module).get(name)
            if isinstance(replaced, partial) and "queue" in replaced.keywords:
                _trace(module, name, replaced)


def _trace(module: nn.Module, name: str, replaced: Any) -> None:
    queue = replaced.keywords["queue"]
    if replaced.func not in (split_backward.linear, split_backward.linear_forward):
        vars(module)["_untraced"] = replaced
        # The same function for all modules, because a graph is compiled for one.
        vars(module)[name] = (
            MethodType(_untraced_forward, module)
            if name == "forward"
            else torch.compiler.disable(replaced)  # type: ignore[no-untyped-call]
        )
        return
    products = replaced.keywords.get("products")
    number, target = next(_numbers), _Target(queue, module, products)
    _targets[number] = target
    vars(module).update(_deferred_target=target, _deferred_number=torch.tensor(number))
    vars(module)[name] = (
        MethodType(_linear_forward, module)
        if name == "forward"
        else partial(_linear, **replaced.keywords, number=vars(module)["_deferred_number"])
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced_forward(module: Any, *args: Any) -> Any:
    return module._untraced(*args)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    queue: WeightGradQueue | None,
    number: Tensor,
    products: LinearProducts | None = None,
) -> Tensor:
    """`split_backward.linear`, also within a graph, which finds the queue by the number."""
    if not torch.compiler.is_compiling():
        assert queue is not None
        return split_backward.linear(x, weight, bias, queue=queue, products=products)
    if not weight.requires_grad:
        return (products or F.linear)(x, weight, bias)
    if not x.requires_grad:
        # The compiler would remove the operator, because nothing needs dx.
        untraced: Tensor = _untraced_linear(x, weight, bias, number)
        return untraced
    rows = rows_of(x)
    y: Tensor = _DeferredLinear.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, number, products
    )
    return y.view(*x.shape[:-1], y.shape[-1])


def _linear_forward(module: Any, x: Tensor) -> Tensor:
    queue = None if torch.compiler.is_compiling() else module._deferred_target.queue
    return _linear(x, module.weight, module.bias, queue=queue, number=module._deferred_number)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced_linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
    target = _targets[int(number)]
    return split_backward.linear(x, weight, bias, queue=target.queue, products=target.products)


class _DeferredLinear(torch.autograd.Function):
    """x [n, in] -> [n, out]"""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        number: Tensor,
        products: LinearProducts | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, number)
        ctx.has_bias = bias is not None
        return (products or F.linear)(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor | None, None, None]:
        x, weight, number = ctx.saved_tensors
        db = dy.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return _input_gradient(dy, x, weight, number), None, db, None, None


@library.custom_op("pipemega::input_gradient", mutates_args=())
def _input_gradient(dy: Tensor, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    """Return dx = dy W [n, in], and add (x, dy) to the queue of linear `number`."""
    target = _targets[int(number)]
    target.add(x, dy)
    return dy.mm(weight) if target.products is None else target.products.input_gradient(dy, weight)


@_input_gradient.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    return dy.new_empty(dy.shape[0], weight.shape[1])


def compile_layers(
    stages: Mapping[int, Stage], section: CompileSection, mesh: Mesh, log: logging.Logger
) -> Callable[[], None] | None:
    """Compile the layers of the local stages, when they first run with gradients.  Collective.

    A layer names the method that is compiled in `compiled_method`, None for no method; without this
    attribute it is `forward`. `uncompiled_reason` says why there is none. The methods that a module
    names in `uncompiled_methods` are called between two graphs.

    Returns:
        what the tensor ranks call before each step: layers with hooks on one of them then run
        uncompiled on all. None: there are no other tensor ranks, or nothing is compiled.

    Raises:
        ConfigError: the backend does not exist; the same on every rank.
    """
    _check_backend(section.backend)
    missing = gather_objects(_missing_compiler(section.backend, mesh.device), mesh.world)
    reason = next((text for text in missing if text is not None), None)
    if reason is not None:
        # On all ranks: tensor ranks must round equally.
        if mesh.rank == 0:
            key = f"compile.enabled is {json.dumps(section.enabled)}"
            # The default is not a request: the line is information, not a warning.
            level = logging.WARNING if section.enabled is True else logging.INFO
            log.log(level, f"{key}, but {reason}: all layers run uncompiled")
        return None
    allow_tracing(mesh.tensor)
    _set_up_compiler()
    kinds = _Kinds(section, mesh, log)
    for stage in stages.values():
        trace_deferred_gradients(stage.modules())
        for module in stage.modules():
            for method in getattr(module, "uncompiled_methods", ()):
                plain = getattr(type(module), method)
                vars(module)[method] = MethodType(_uncompiled(plain), module)
        for position, layer in enumerate(stage.layers.values(), stage.start):
            kinds.compile(layer, f"{stage.name_of(position)} (layers.{position})")
    return kinds.agree_on_hooks if mesh.tensor.size > 1 else None


@cache
def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called between two graphs; the same for all layers of a class."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def _check_backend(backend: str) -> None:
    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(
            f"compile.backend {backend!r} is no backend of torch.compile; the backends of this "
            f"installation are {', '.join(known)}",
            on_every_rank=True,
        )


def _missing_compiler(backend: str, device: torch.device) -> str | None:
    """Return what inductor needs and this machine does not have."""
    if backend != "inductor":
        return None
    # Parts of torch that are deprecated warn at their import.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("torch._inductor.compile_fx")
        cpp_builder = import_module("torch._inductor.cpp_builder")
    try:
        cpp_builder.get_cpp_compiler()
    except torch._inductor.exc.InvalidCxxCompiler:
        return "there is no C++ compiler: install g++, or set CXX to the path of one"
    if device.type == "cuda" and not torch.utils._triton.has_triton():
        return "triton does not run here: install it, with a C compiler, for this GPU"
    return None


def _set_up_compiler() -> None:
    # An error of the compiler is found in the forward, where the layer can run uncompiled. With
    # torch 2.8 and older, an error of a backward graph is raised in the first backward.
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        torch._functorch.config.force_non_lazy_backward_lowering = True
    # Backward may run twice (`retain_graph`), and the weight-gradient queue keeps tensors.
    torch._functorch.config.donated_buffer = False
    # The compiler does both with every stage, and the user can change neither.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", ".*Function'> should not be instantiated")
    # Its own modules may warn while they run.
    warnings.filterwarnings("ignore", module=r"torch\._(dynamo|inductor|functorch)")


def _options(section: CompileSection) -> dict[str, Any] | None:
    if section.backend != "inductor":
        return None
    return {
        **torch._inductor.list_mode_options(section.mode_without_graphs),
        # The weight-gradient queue keeps tensors of a graph after its end.
        "allow_buffer_reuse": False,
        "inplace_buffers": False,
        # The masks of dropout are the same as in uncompiled layers, and on every mesh.
        "fallback_random": True,
    }


@dataclass
class _Kind:
    """Equal layers.

    Args:
        name: name of the first of these layers.
        size: how many this rank has.
        has_run: the compiled method has been called.
        failed: it could not be traced.
        has_warned: a log line says that it, or a graph of it, runs uncompiled.
    """

    name: str
    size: int = 0
    has_run: bool = False
    failed: bool = False
    has_warned: bool = False
    function: Callable[..., Any] = field(init=False)


class _Kinds:
    """The distinct layers of this rank."""

    def __init__(self, section: CompileSection, mesh: Mesh, log: logging.Logger) -> None:
        self._device, self._tensor = mesh.device, mesh.tensor
        self._log, self._section = log, section
        self._kinds: dict[Any, _Kind] = {}
        self._methods: list[_CompiledMethod] = []
        # Layers that differ in an integer, such as their number, share a graph, as they do for
        # floats. Otherwise each has its own, and after eight of them layers run uncompiled. Not for
        # the whole process: the user may compile other modules.
        # A method that a layer calls between two graphs has one limit in all engines.
        self._share_graphs = torch._dynamo.config.patch(
            allow_unspec_int_on_nn_module=True,
            recompile_limit=torch._dynamo.config.recompile_limit * next(_engines),
        )
        self._left_out: set[type[nn.Module]] = set()

    def compile(self, layer: nn.Module, name: str) -> None:
        """Replace the method of this layer, which is called `name` in messages."""
        method = getattr(layer, "compiled_method", "forward")
        reason = getattr(layer, "uncompiled_reason", None)
        if reason is not None and type(layer) not in self._left_out:
            self._left_out.add(type(layer))
            self._log.warning(f"{name} and equal layers run uncompiled: {reason}")
        # A linear or an embedding whose weight gradient is deferred has nothing else to compile.
        if method is None or method in vars(layer):
            return
        key = (type(layer), _parameters(layer))
        if key not in self._kinds:
            kind = self._kinds[key] = _Kind(name)
            kind.function = torch.compile(
                _copied(getattr(type(layer), method)),
                backend=_Backend(self._section, self._tensor, partial(self._warn, kind)),
                dynamic=self._section.dynamic,
            )
        kind = self._kinds[key]
        kind.size += 1
        vars(layer)[method] = compiled = _CompiledMethod(layer, method, kind, self)
        self._methods.append(compiled)

    def agree_on_hooks(self) -> None:
        """Let layers with hooks on one tensor rank run uncompiled on all of them.  Collective.

        A rank that compiles a layer alone would wait for the others for ever.
        """
        here = [method.has_new_hooks() for method in self._methods]
        everywhere = gather_objects(here, self._tensor)
        for method, *found in zip(self._methods, *everywhere, strict=True):
            method.has_hooks_elsewhere = any(found)

    def run(self, kind: _Kind, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the compiled function, or `plain` if it cannot be compiled."""
        layer, states = plain.__self__, None  # type: ignore[attr-defined]
        if not kind.has_run:
            kind.has_run, states = True, random.rng_state(self._device)
            self._log.info(f"compiling {kind.name}; the first step waits for it")
        graphs, started = _graph_count(), time.perf_counter()
        try:
            with self._share_graphs:
                result = kind.function(layer, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            if states is not None:
                random.set_rng_state(states, self._device)
            # If this fails too, it is an error of the layer.
            result = plain(*args, **kwargs)
            kind.failed = True
            self._warn(kind, _reason(error))
            return result
        if _graph_count() > graphs and not kind.has_warned:
            seconds = time.perf_counter() - started
            self._log.info(f"compiled {kind.name} in {seconds:.1f} s, for {kind.size} equal layers")
        return result

    def _warn(self, kind: _Kind, reason: str) -> None:
        """Log once that layers of this kind run uncompiled."""
        if not kind.has_warned:
            kind.has_warned = True
            self._log.warning(
                f"{kind.name} could not be compiled, so the {kind.size} layers of its kind on this "
                f"rank run uncompiled: {reason}"
            )


class _Backend:
    """The compiler of graphs, which agrees with the compilers of the other tensor ranks.

    Args:
        tensor: ranks that compile the same graphs in the same order.
        failed: called with the reason if a graph runs uncompiled.
    """

    def __init__(
        self, section: CompileSection, tensor: Axis, failed: Callable[[str], None]
    ) -> None:
        self._compile: Callable[..., Any] = torch._dynamo.lookup_backend(section.backend)
        options = _options(section)
        if options is not None:
            self._compile = partial(torch._inductor.compile, options=options)
        self._tensor, self._failed = tensor, failed

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        reason, compiled = None, graph.forward
        try:
            compiled = self._compile(graph, inputs)
        # A compiler may fail in any way; nothing of the graph has run yet.
        except Exception as error:
            reason = _reason(error)
        reasons = gather_objects(reason, self._tensor)
        for rank, found in enumerate(reasons):
            if found is not None:
                where = "" if rank == self._tensor.rank else f"on tensor rank {rank}, "
                self._failed(where + found)
                return graph.forward
        return compiled


def _copied(function: Any) -> FunctionType:
    """Return the function with its own code object.

    torch stores the graphs with the code: graphs of one kind do not count towards the limit of
    another.
    """
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _parameters(layer: nn.Module) -> tuple[Any, ...]:
    """Return the properties of a layer's parameters that the compiled code depends on."""
    return tuple(
        (name, p.shape, p.dtype, p.requires_grad, shard_of(p).dim)
        for name, p in layer.named_parameters()
    )


def _graph_count() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _reason(error: Exception) -> str:
    """Return the first line of an error of the compiler, and its class."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0][:300] if lines else 'no message'}"


class _CompiledMethod:
    """Replaces the method `name` of a layer."""

    def __init__(self, layer: nn.Module, name: str, kind: _Kind, kinds: _Kinds) -> None:
        self._plain = getattr(layer, name)
        self._kind, self._kinds = kind, kinds
        modules = [module for module in layer.modules() if module is not layer]
        self._hooks = [
            hooks
            for m in modules
            for hooks in (
                m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks
            )
        ]  # fmt: skip
        self._parameters = list(layer.parameters())
        self._num_hooks = self._count_hooks()
        self.has_hooks_elsewhere = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._kind.failed or not torch.is_grad_enabled() or self._is_observed():
            return self._plain(*args, **kwargs)
        return self._kinds.run(self._kind, self._plain, args, kwargs)

    def _is_observed(self) -> bool:
        recording = torch._C._len_torch_dispatch_stack() > 0
        return recording or self.has_hooks_elsewhere or self.has_new_hooks()

    def has_new_hooks(self) -> bool:
        """Return whether there are other hooks in the layer than when it was built."""
        return self._count_hooks() != self._num_hooks

    def _count_hooks(self) -> int:
        hooks = sum(map(len, self._hooks))
        return hooks + sum(len(p._backward_hooks or ()) for p in self._parameters)
