"""Moves what a stage saves for backward to host memory, and back before its backward.

    instruction    F0          X                     ..    Y             B0
    to the host                copy of what F0                           uses it
                               has saved
    to the device                                          copy back

The two copies run on streams of their own, beside the next instruction after F and beside the last
one before B (or I). X ends with a wait of the device for the first copy; then the memory of F0 is
free. B0 begins with a wait for the second. Nothing is moved if B follows within two instructions.
Host memory is pinned before the first message of a step: this may wait for the device, and so for
receives that are posted.

Parameters, buffers, the data of the step and tensors that several micro-batches share stay on the
device: a copy of them would free no memory. With recomputation, what a segment stores is moved.

Source: `activation_checkpointing.cpu_checkpointing` of DeepSpeed, with copies that overlap.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.host_memory import CopyEvent, HostMemory
from pipemega.pipeline.execution_state import ComputeWrapper, ExecutionState, Handler, Key
from pipemega.pipeline.messages import tensors_of
from pipemega.pipeline.plan.instructions import Instruction, Kind, Program
from pipemega.pipeline.plan.lowering import OffloadPoints, offload_points

# 33 µs at the 32 GB/s of PCIe 4 x16; of smaller copies the start is a large part, and they free
# little memory.
SMALLEST_BYTES: int = 1 << 20
_ALIGNMENT = 64
_SHARED: Final = -1


def offloads_from(device_type: str) -> bool:
    """Return whether activations on such a device can be moved to host memory."""
    return device_type != "cpu"


def is_movable(tensor: Tensor, fixed: Collection[int]) -> bool:
    """Return whether a saved tensor is moved; `fixed`: the storages that stay on the device."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() >= SMALLEST_BYTES and storage._cdata not in fixed


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the storages of tensors, for `is_movable`."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


@dataclass(eq=False)
class _Memory:
    """The bytes of one storage, on the device (None: only on the host) and on the host."""

    device: Tensor | None
    host: Tensor | None = None


@dataclass(eq=False)
class _Saved:
    """A saved tensor; `tensor` is the tensor itself as long as it is on the device.

    torch does not compare the version of a tensor that hooks have saved.
    """

    tensor: Tensor | None
    version: int
    found: int = 0
    memory: _Memory | None = None
    place: tuple[Any, ...] = ()

    def restore(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was changed in place, as torch's own check raises.
        """
        found = self.found if self.tensor is None else self.tensor._version
        if found != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: it is at version {found}; expected version {self.version} "
                "instead (activation_checkpointing.cpu_checkpointing moves it to host memory)"
            )
        if self.tensor is not None:
            return self.tensor
        assert self.memory is not None
        assert self.memory.device is not None, "moved, and not copied back"
        dtype, *where = self.place
        tensor = _view(self.memory.device, dtype, *where)
        # A recomputation compares the versions of its inputs.
        torch._C._autograd._unsafe_set_version_counter((tensor,), (self.version,))
        return tensor


def _view(memory: Tensor, dtype: torch.dtype, *where: Any) -> Tensor:
    """Return a tensor in the storage of `memory`, at an offset, with a shape and strides."""
    view = torch.empty(0, dtype=dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), *where)


@dataclass(eq=False)
class _Moved:
    """What the forward of one micro-batch has saved: the tensors that move, and their storages.

    Args:
        buffer: the host memory of all of them; None: nothing moves.
        copied: occurs when the latest copy is complete.
    """

    microbatch: int
    copied: CopyEvent | None = None
    buffer: Tensor | None = None
    saved: list[_Saved] = field(default_factory=list)
    memory: dict[int, _Memory] = field(default_factory=dict)

    @property
    def on_device(self) -> list[tuple[_Memory, Tensor]]:
        """The storages on the device."""
        return [(m, m.device) for m in self.memory.values() if m.device is not None]

    @property
    def sizes(self) -> list[int]:
        """The bytes of each of them in the host memory."""
        return [-(-whole.nbytes // _ALIGNMENT) * _ALIGNMENT for _, whole in self.on_device]


class ActivationOffload(ComputeWrapper):
    """Moves the saved activations of one rank.

    Args:
        device: the device of the rank.
        modules: their parameters and buffers stay on the device.
    """

    def __init__(self, device: torch.device, modules: Collection[nn.Module]) -> None:
        self._device, self._modules = device, modules
        # Two, because each has one stream: PCIe transfers both ways at the same time.
        self._out, self._back = HostMemory(device), HostMemory(device)
        self._points = OffloadPoints(frozenset(), {})
        self._moved: dict[Key, _Moved] = {}
        self._leaving: _Moved | None = None
        self._free: list[tuple[Tensor, CopyEvent | None]] = []
        # Stage -> the bytes that it moves, as the run before a step has found (`kernel_warmup`).
        self._sizes: dict[int, int] = {}
        self._measures = False
        self._reserved: Program = ()
        self._fixed: set[int] = set()
        # Storage -> the micro-batch that has saved it, or _SHARED.
        self._savers: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()

    def begin(self, run: ExecutionState, program: Program) -> None:
        """Prepare a run of `program`; an evaluation moves nothing."""
        batch, train = run.batch, run.train
        self._release()
        for moved in self._moved.values():  # of a run that was given up
            self._finish(moved)
        self._moved.clear()
        self._points = offload_points(program if train else ())
        self._measures = train and batch.discard_grads
        if train:
            data = tensors_of((list(batch.inputs), list(batch.labels)))
            tensors = [t for m in self._modules for t in (*m.parameters(), *m.buffers())]
            self._fixed = storages_of([*tensors, *data])
            if self._sizes and program is not self._reserved:
                self._reserve(program)

    def _reserve(self, program: Program) -> None:
        """Allocate the host memory that `program` will ask for."""
        held: dict[Key, Tensor] = {}
        for step in program:
            key = (step.stage, step.microbatch)
            if step in self._points.moved and (nbytes := self._sizes.get(step.stage, 0)):
                held[key] = self._host_buffer(nbytes)
            elif step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and key in held:
                self._free.append((held.pop(key), None))
        self._reserved = program

    def run(self, handler: Handler, step: Instruction) -> None:
        """Run a compute instruction, and move activations."""
        key = (step.stage, step.microbatch)
        if (next_key := self._points.fetched.get(step)) is not None:
            self._fetch(self._moved[next_key])
        if step in self._points.moved:
            moved = self._moved[key] = _Moved(step.microbatch)
            with saved_tensors_hooks(partial(self._pack, moved), _Saved.restore):
                handler(step)
            self._release()
            self._copy(moved)
            return
        if self._measures and step.kind is Kind.FORWARD:
            stays = _Moved(step.microbatch)
            with saved_tensors_hooks(partial(self._pack, stays), _Saved.restore):
                handler(step)
            if (nbytes := sum(stays.sizes)) > self._sizes.get(step.stage, 0):
                self._sizes[step.stage], self._reserved = nbytes, ()
            return
        if step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and key in self._moved:
            self._finish(self._moved.pop(key))
        handler(step)
        self._release()

    def _pack(self, moved: _Moved, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, tensor._version)
        if tensor.device.type != self._device.type or not is_movable(tensor, self._fixed):
            return saved
        storage = tensor.untyped_storage()
        if self._savers.setdefault(storage, moved.microbatch) != moved.microbatch:
            self._savers[storage] = _SHARED
            return saved
        if storage._cdata not in moved.memory:
            whole = _view(tensor, torch.uint8, 0, (storage.nbytes(),), (1,))
            moved.memory[storage._cdata] = _Memory(whole)
        saved.memory = moved.memory[storage._cdata]
        saved.place = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        moved.saved.append(saved)
        return saved

    def _copy(self, moved: _Moved) -> None:
        """Start the copies to the host."""
        if not moved.saved:
            return
        pairs, sizes = moved.on_device, moved.sizes
        moved.buffer = self._host_buffer(sum(sizes))
        parts = moved.buffer[: sum(sizes)].split_with_sizes(sizes)
        with self._out.side_stream():
            for (memory, whole), part in zip(pairs, parts, strict=True):
                memory.host = part[: whole.nbytes]
                self._out.copy(memory.host, whole)
            moved.copied = self._out.record()
        self._leaving = moved

    def _release(self) -> None:
        """Free the tensors that are being copied to the host.

        The device waits for the copy, because other tensors may get this memory. A change in place
        until now may be in the copy.
        """
        moved, self._leaving = self._leaving, None
        if moved is None or moved.copied is None:
            return
        moved.copied.wait()
        for saved in moved.saved:
            assert saved.tensor is not None
            saved.found, saved.tensor = saved.tensor._version, None
        moved.saved.clear()
        for memory in moved.memory.values():
            memory.device = None

    def _fetch(self, moved: _Moved) -> None:
        """Start the copies back to the device."""
        if moved.buffer is None:
            return
        pairs = [(m, m.host) for m in moved.memory.values() if m.host is not None]
        # On the stream of the computation, which uses and frees this memory.
        for memory, host in pairs:
            memory.device = torch.empty(host.nbytes, dtype=torch.uint8, device=self._device)
        with self._back.side_stream():
            for memory, host in pairs:
                assert memory.device is not None
                self._back.copy(memory.device, host)
            moved.copied = self._back.record()

    def _finish(self, moved: _Moved) -> None:
        """Let the computation, not the host, wait for the latest copy.

        The host memory may be used again; the graph alone holds the device memory, and frees it
        node by node.
        """
        if moved.buffer is not None and moved.copied is not None:
            moved.copied.wait()
            self._free.append((moved.buffer, moved.copied))
        moved.memory.clear()

    def _host_buffer(self, nbytes: int) -> Tensor:
        """Return host memory that is not in use; memory that was pinned before, if possible."""
        # The largest last: one that is too small is replaced, so there are never more than
        # micro-batches in flight.
        self._free.sort(key=lambda pair: pair[0].nbytes)
        for at, (buffer, _) in enumerate(self._free):
            if buffer.nbytes >= nbytes:
                del self._free[at]
                return buffer
        if self._free and (copied := self._free.pop()[1]) is not None:
            synchronize(copied)
        return self._out.empty(nbytes, dtype=torch.uint8)
