"""Counts the bytes of live tensors and the FLOPs, operation by operation.

Works on every device, including the meta device, where tensors have a size but no memory. So the
memory of a stage between forward and backward is counted by running it, not by a formula.

Makes the meta device use the kernels of the real device.

For some functions torch chooses the kernel by device, and the kernels save different tensors for
backward. For meta tensors torch chooses the unfused version, which saves more:

    function           on the meta device              here
    attention          saves scores [seq, seq]         fused: saves queries, keys, values, output
    dropout            saves a mask, dtype of x        CUDA: saves a mask of bytes
    RMSNorm            saves an fp32 copy of x         CUDA: saves x and one number per row

`Tensor.is_cuda` has its value on the real device, so a model that reads it decides as in a run.

A fixed table of rates: FLOPs and bytes of a kernel -> seconds.

Models are cut by these times. They depend on the config alone, not on the machine: the same config
has the same cut in `pipemega plan` on a laptop and in every run. Only ratios of the times of layers
matter, so a faster device of the same kind needs no other table.

Runs operations on the meta device once for each description of their arguments.

Most kernels of the meta device are Python functions, which take 0.1 to 0.5 ms. The layers of a
model repeat a few operations, whose results differ only in their memory.

Kernels of the meta device that import torch._dynamo.

Some kernels of the meta device are Python functions, which torch keeps out of `torch.compile`. For
that it imports torch._dynamo at the first call, which takes 0.6 s of a process at start-up.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType, NoneType
from typing import Any, Final, Literal, NamedTuple

import torch
import torch._compile
import torch._refs
from torch import Tensor, nn
from torch._decomp import global_decomposition_table
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from pipemega.distributed.topology import Topology
from pipemega.optimizer.optimizers import without_dynamo
from pipemega.tensor_parallel.layers import LinearProducts

DeviceType = Literal["cpu", "cuda"]

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class DeviceKernels(TorchFunctionMode):
    """Context in which meta tensors use the kernels of `device`.

    The kernels are chosen as in torch 2.13: https://github.com/pytorch/pytorch,
    aten/src/ATen/native/transformers/{sdp_utils_cpp.cpp,cuda/sdp_utils.cpp}.
    """

    def __init__(self, device: DeviceType) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func == _IS_CUDA:
                return self._device == "cuda"
            if func is F.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
            if func is F.dropout and self._device == "cuda":
                return _dropout(*args, **kwargs)
            if func is F.rms_norm and self._device == "cuda":
                return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        grouped = enable_gqa and key.shape[1] != query.shape[1]
        # Flash attention needs values of the size of the queries.
        is_flash = attn_mask is None and value.shape[-1] == query.shape[-1]
        if is_flash and self._device == "cpu" and dropout_p == 0:
            flash = _aten._scaled_dot_product_flash_attention_for_cpu
            return _first(flash(query, key, value, 0.0, is_causal, scale=scale))
        if is_flash and self._device == "cuda" and query.dtype in _HALVES:
            flash = _aten._scaled_dot_product_flash_attention
            return _first(flash(query, key, value, dropout_p, is_causal, scale=scale))
        if self._device == "cuda" and query.dtype != torch.float64 and not grouped:
            efficient = _aten._scaled_dot_product_efficient_attention
            return _first(
                efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
            )
        # The real device uses the unfused attention here too, which saves the scores.
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _first(results: Sequence[Any]) -> Tensor:
    result: Tensor = results[0]
    return result


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1:
        return F.dropout(x, p, training, inplace)
    return _first(torch.native_dropout(x, p, True))


def _rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is not None and weight.dtype != x.dtype:
        return F.rms_norm(x, list(normalized_shape), weight, eps)
    y: Tensor = _FusedRMSNorm.apply(x, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return y


class _FusedRMSNorm(torch.autograd.Function):
    """Shapes of CUDA's fused RMSNorm, which torch does not offer for meta tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = x.shape[: x.dim() - dims]
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


KernelKind = Literal["products", "attention", "others", "exchanges"]

# Bytes/s between GPUs of a node (NVLink), and of several nodes (400 Gbit/s for each GPU).
NVLINK, NETWORK, GPUS_PER_NODE = 300e9, 40e9, 8


@dataclass(frozen=True)
class KernelRates:
    """Rates that kernels of common sizes reach.

    Args:
        products: FLOP/s of matrix products.
        attention: FLOP/s of fused attention; a causal one has half of the FLOPs.
        bandwidth: bytes/s that all other work reads and writes.
        streams: the same for sums, differences, products and copies of large tensors.
        launch: seconds of a kernel without work.
        instruction: seconds of an F, I, W or B beyond its kernels and messages.
        messages: bytes/s at which ranks handle messages.
        exchange: bytes/s that a rank sends to others in an all-to-all.
    """

    products: float
    attention: float
    bandwidth: float
    streams: float
    launch: float
    instruction: float
    messages: float
    exchange: float

    def seconds(self, func: Any, flops: float, size: float) -> float:
        """Return the seconds of kernel `func` with `flops` that moves `size` bytes."""
        rate = self.attention if "attention" in func._schema.name else self.products
        streams = func._overloadpacket in _STREAMS
        return max(flops / rate, size / (self.streams if streams else self.bandwidth)) + self.launch


# Measured on one of two busy cores of an AMD EPYC, by benchmarks/pipeline_cpu; fp32 and fp64 runs
# are taken for CPU runs. The attention of the CPU computes the masked half too. With four stages
# per rank instead of one, a rank works about 1 ms longer for each further instruction, half of it
# with messages of 0.5 MB.
_FULL: Final = KernelRates(
    products=115e9,
    attention=22e9,
    bandwidth=16e9,
    streams=48e9,
    launch=4e-6,
    instruction=3e-4,
    messages=1e9,
    exchange=1e9,
)
# What kernels of an H100 reach in bf16: about half of its FLOP/s, 3/4 of its bandwidth.
_HALF: Final = KernelRates(
    products=500e12,
    attention=300e12,
    bandwidth=2.5e12,
    streams=2.5e12,
    launch=4e-6,
    instruction=5e-5,
    messages=1e11,
    exchange=NVLINK,
)


def rates_for(dtype: str | None, topology: Topology) -> KernelRates:
    """Return the rates of a run that computes in `dtype`: "fp16", "bf16", or others."""
    if dtype not in ("float16", "bfloat16"):
        return _FULL
    is_near = topology.tensor * topology.expert <= GPUS_PER_NODE
    return _HALF if is_near else replace(_HALF, exchange=NETWORK)


# The exchange of tokens between the ranks of experts.
_EXCHANGE: Final = torch.ops.pipemega.exchange
# They allocate memory or change its description, and run no kernel.
_NO_KERNEL = frozenset(
    (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
) | {_aten._unsafe_view, _aten.detach}


# Simple arithmetic: the speed of the memory limits them on every device.
_STREAMS = frozenset(
    (_aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.mul, _aten.mul_, _aten.copy_, _aten.clone)
) | {_aten.zero_, _aten.zeros_like, _aten.new_zeros, _aten.zeros, _aten.fill_}


def runs_kernel(func: Any) -> bool:
    """Return whether an operation that a TorchDispatchMode sees runs a kernel."""
    return not func.is_view and func._overloadpacket not in _NO_KERNEL


# They read some rows of their first tensor, or add to some rows of it: as many bytes as their other
# tensors have, or their result.
_SPARSE = frozenset((_aten.embedding, _aten.index_select, _aten.gather, _aten.index))
_SPARSE_IN_PLACE = frozenset((_aten.index_add_, _aten.index_put_, _aten.scatter_add_))


def bytes_moved(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an operation reads and writes: its arguments and results."""
    if func._overloadpacket in _SPARSE:
        return _bytes(args[1:], kwargs) + 2 * _bytes(result)
    if func._overloadpacket in _SPARSE_IN_PLACE:
        return 3 * _bytes(args[1:], kwargs)
    return _bytes(args, kwargs, result)


def _bytes(*trees: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor))


# Of all models and micro-batch sizes that a process counts.
_MAX_RESULTS = 20_000

_PLAIN = (
    NoneType, bool, int, float, complex, str,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class _Result(NamedTuple):
    """A tensor on the meta device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def build(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _UnknownError(Exception):
    """The arguments do not determine the result, or it shares memory."""


_known: dict[Any, Any] = {}


def run_operation(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `func(*args, **kwargs)`, for an operation that a TorchDispatchMode sees.

    If its tensors are on the meta device, and the result has memory of its own, it is built from
    the shapes, strides and dtypes of an earlier result.
    """
    if func.is_view or func._schema.is_mutable:
        return func(*args, **kwargs)
    try:
        # Otherwise a TorchFunctionMode sees each attribute of a tensor that is read.
        with torch._C.DisableTorchFunction():
            named = tuple(kwargs.items())
            key = (func, torch.get_default_dtype(), _key_of(args), _key_of(named))
        found = _known.get(key)
    except _UnknownError:
        return func(*args, **kwargs)
    if found is not None:
        return _build(found)
    result = func(*args, **kwargs)
    try:
        kept = _describe(result, _storages(args) | _storages(tuple(kwargs.values())))
    except _UnknownError:
        return result
    if len(_known) >= _MAX_RESULTS:
        _known.clear()
    _known[key] = kept
    return result


def _key_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_meta or type(value) not in (Tensor, nn.Parameter):
            raise _UnknownError
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise _UnknownError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return type(value), *map(_key_of, value)
    if not isinstance(value, _PLAIN):
        # Such as the record of torch's profiler, which has an effect.
        raise _UnknownError
    # The type: 1, 1.0 and True are equal.
    return type(value), value


def _storages(value: Any) -> set[int]:
    if isinstance(value, Tensor):
        return {value.untyped_storage()._cdata}
    if isinstance(value, list | tuple):
        return set[int]().union(*map(_storages, value))
    return set()


def _describe(result: Any, shared: set[int]) -> Any:
    """Return `result` with a `_Result` in place of each tensor.

    Args:
        shared: storages that no tensor of `result` may have; its own storages are added.
    """
    if isinstance(result, list | tuple):
        if type(result) not in (list, tuple):
            raise _UnknownError
        return type(result)(_describe(each, shared) for each in result)
    _key_of(result)
    if not isinstance(result, Tensor):
        return result
    storage = result.untyped_storage()
    kept = _Result(tuple(result.shape), result.stride(), result.dtype)
    if storage._cdata in shared or storage.nbytes() != kept.build().untyped_storage().nbytes():
        raise _UnknownError
    shared.add(storage._cdata)
    return kept


def _build(kept: Any) -> Any:
    if isinstance(kept, _Result):
        return kept.build()
    if isinstance(kept, list | tuple):
        return type(kept)(map(_build, kept))
    return kept


@cache
def protected_functions() -> tuple[Any, ...]:
    """Return the functions that `torch._disable_dynamo` decorates, for `without_dynamo`.

    Closures of the kernels have them.
    """
    tables: list[dict[Any, Any]] = [*global_decomposition_table.values(), vars(torch._refs)]
    todo = [f for table in tables for f in table.values() if isinstance(f, FunctionType)]
    seen, found = set(map(id, todo)), list[Any]()
    while todo:
        function = todo.pop()
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        inner = [f for f in cells if isinstance(f, FunctionType)]
        if function.__code__.co_filename == torch._compile.__file__:
            found += inner
        todo += (f for f in inner if id(f) not in seen)
        seen.update(map(id, inner))
    return tuple(found)


# torch has no FLOP formula for the CPU attention kernel; it does the same work as the CUDA kernel.
_FORMULAS: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


class Fp8Counter(LinearProducts):
    """Stands for torchao's products on the meta device, without torchao.

    A product in fp8 has twice the rate of one in bf16. A cast reads its tensor twice, for the scale
    and for the values; both copies in fp8 exist until the product ends.

    Args:
        recipe: `fp8.recipe`.
    """

    def __init__(self, recipe: str) -> None:
        self._keeps_gradient = recipe == "rowwise_with_gw_hp"

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        with _in_fp8(x, weight):
            return super().output(x, weight)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        with _in_fp8(dy, weight):
            return super().input_gradient(dy, weight)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        with nullcontext() if self._keeps_gradient else _in_fp8(x, dy):
            return super().weight_gradient(x, dy)


_fp8_part: ContextVar[Literal["cast", "product"] | None] = ContextVar("_fp8_part", default=None)


@contextmanager
def _in_fp8(*operands: Tensor) -> Iterator[None]:
    token = _fp8_part.set("cast")
    try:
        copies = [(tensor.amax(), tensor.to(torch.float8_e4m3fn)) for tensor in operands]
        _fp8_part.set("product")
        yield
        del copies
    finally:
        _fp8_part.reset(token)


class TensorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts FLOPs and the bytes of all storages that operations allocate.

    A storage counts once, even if several tensors share it, and until it is freed. Temporary memory
    inside a kernel is not counted. Only FLOPs of matrix products count, by torch's formulas; a
    causal attention counts half, as in `monitor.flops`.

    Args:
        ignoring: existing tensors, whose storages do not count.
        rates: convert FLOPs and bytes to `seconds`; None: seconds are not counted.
    """

    def __init__(self, ignoring: Iterable[Tensor] = (), rates: KernelRates | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes of all live storages."""
        self.peak = 0
        """Maximum of `now` since the last `reset_peak`."""
        self.flops = 0.0
        self.kernels = 0
        """Number of operations that run a kernel: all but views."""
        self.exchanged = self.exchanges = 0
        """Bytes that a rank sends to others in exchanges of even parts, and their number."""
        self.seconds = 0.0
        """Time of all kernels and exchanges by `rates`."""
        self.kinds: dict[KernelKind, float] = defaultdict(float)
        """The time without fp8 by kind of kernel."""
        self.seconds_without_fp8 = 0.0
        """The same if products in fp8 were in bf16."""
        self._rates = rates
        self._seen: dict[int, Any] = {}
        for tensor in ignoring:
            self._track(tensor.untyped_storage(), counted=False)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps `__torch_dispatch__` in `torch._dynamo.disable`, and imports it.
        return False

    def reset_peak(self) -> None:
        """Set the peak to the current bytes."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = run_operation(func, args, kwargs)
        # Otherwise a TorchFunctionMode sees each attribute of a tensor that is read.
        with torch._C.DisableTorchFunction():
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._track(storage, counted=True)
        self.kernels += not func.is_view
        flops = operation_flops(func, args, kwargs, result)
        self.flops += flops
        if func._overloadpacket is _EXCHANGE:
            self._count_exchange(*args)
        elif self._rates is not None and runs_kernel(func):
            size, part = bytes_moved(func, args, kwargs, result), _fp8_part.get()
            without_fp8 = seconds = self._rates.seconds(func, flops, size)
            if part == "cast":
                without_fp8 = 0.0
            elif part == "product":
                seconds = self._rates.seconds(func, flops / 2, size)
            self.seconds += seconds
            self.seconds_without_fp8 += without_fp8
            kind: KernelKind = "products" if flops else "others"
            self.kinds["attention" if "attention" in func._schema.name else kind] += without_fp8

    def _count_exchange(self, rows: Tensor, received: Sequence[int]) -> None:
        exchanged = rows.nbytes * (len(received) - 1) // len(received)
        self.exchanged += exchanged
        self.exchanges += 1
        if self._rates is not None:
            seconds = exchanged / self._rates.exchange
            self.seconds += seconds
            self.seconds_without_fp8 += seconds
            self.kinds["exchanges"] += seconds

    def _track(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key, size = storage._cdata, storage.nbytes() if counted else 0

        def forget(_: Any) -> None:
            self._seen.pop(key, None)
            self.now -= size

        # torch keeps the Python object of a storage alive as long as the storage.
        self._seen[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


@contextmanager
def unmetered() -> Iterator[None]:
    """Context whose operations no enclosing TensorMeter counts, and that imports no torch._dynamo.

    For models on the meta device that a run builds to count them: they need no memory, and belong
    to no step.
    """
    with _disable_current_modes(), without_dynamo(protected_functions()):
        yield


def operation_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Return the FLOPs of an operation that a TorchDispatchMode sees; see `TensorMeter`."""
    packet = func._overloadpacket
    formula = _FORMULAS.get(packet) or flop_registry.get(packet) or _of_functional(packet)
    if formula is None:
        return 0.0
    if packet.__name__.startswith("_scaled_dot_product"):
        args = _with_all_heads(func, args)
    flops: float = formula(*args, **kwargs, out_val=result)
    return flops / 2 if _is_causal(func, args, kwargs) else flops


def _with_all_heads(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the shapes of keys and values as if each query had its own.

    The formulas of torch 2.12 and older refuse grouped queries; the products are the same.
    """
    names = [argument.name for argument in func._schema.arguments]
    heads = args[names.index("query")].shape[1]
    return tuple(
        torch.Size((arg.shape[0], heads, *arg.shape[2:])) if name in ("key", "value") else arg
        for name, arg in zip(names, args, strict=False)
    )


def _of_functional(packet: Any) -> Any:
    """Return the formula of `addmm` for `addmm_`: torch has none for operations in place."""
    name: str = packet.__name__
    functional = getattr(_aten, name[:-1], None) if name.endswith("_") else None
    return flop_registry.get(functional)


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    if "is_causal" not in names:
        return False
    index = names.index("is_causal")
    return bool(args[index] if index < len(args) else kwargs.get("is_causal", False))
