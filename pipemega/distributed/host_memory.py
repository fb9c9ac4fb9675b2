"""Host memory that is copied to and from a device, and the events that say when a copy is complete.

    device -> host     empty, copy, record     wait for the event before the host reads the memory
    host -> device     empty, copy, record     wait for the event before the host writes it again

On a CUDA device the memory is pinned and the copies are asynchronous: one from or to pageable
memory makes the host wait for the device.  On other devices nothing is pinned, a copy is complete
when `copy` returns, and every event has occurred.  All code for streams is in this module, so the
code that uses it is the same on every device.
"""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from pipemega.distributed.device_waits import synchronize
from pipemega.errors import PipemegaError

# torch's allocator rounds pinned memory up to a power of two, 5 GiB to 8 GiB; larger buffers than
# this are pinned in their exact size.
_LARGEST_ROUNDED = 1 << 20


class CopyEvent(Protocol):
    """A point in the work of a device; occurs when all work before it is complete."""

    def query(self) -> bool:
        """Return whether it has occurred."""

    def synchronize(self) -> None:
        """Make the host wait until it occurs."""

    def wait(self) -> None:
        """Make the current stream wait until it occurs; the host continues."""


class _Occurred:
    """The event of a device without asynchronous copies."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self) -> None:
        """Return at once."""


class HostMemory:
    """Allocates host memory for copies to and from one device, and starts the copies.

    Args:
        device: the device; with "meta" nothing is allocated.
        pin: pin the memory if the device is a CUDA device.
    """

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        is_host = device.type in ("cpu", "meta")
        self._module: Any = None if is_host else torch.get_device_module(device)
        self.pins = pin and device.type == "cuda"
        """Whether `empty` and `pinned` return pinned memory."""
        self.location = torch.device("meta" if device.type == "meta" else "cpu")
        """The device of the host memory."""
        self._side: Any = None

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized host memory, pinned in exactly this size.

        Raises:
            PipemegaError: the memory cannot be pinned.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not self.pins or nbytes <= _LARGEST_ROUNDED:
            return torch.empty(shape, dtype=dtype, device=self.location, pin_memory=self.pins)
        return _exactly_pinned(nbytes).view(dtype).view(shape)

    def empty_views(
        self, shapes: Sequence[tuple[Sequence[int], torch.dtype]], within: Tensor | None = None
    ) -> list[Tensor]:
        """Return one uninitialized tensor per (shape, dtype): views of one buffer from `empty`.

        Each view starts at a multiple of 64 bytes.

        Args:
            within: [bytes] uint8 from `empty`, which is the buffer if it is large enough.
        """
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
        starts = list(accumulate((-(-size // 64) * 64 for size in sizes), initial=0))
        buffer = within
        if buffer is None or len(buffer) < starts[-1]:
            buffer = self.empty(starts[-1], dtype=torch.uint8)
        return [
            buffer[start : start + size].view(dtype).view(torch.Size(shape))
            for start, size, (shape, dtype) in zip(starts, sizes, shapes, strict=False)
        ]

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in pinned memory, without gaps; the same object if it is already.

        Unlike the memory from `empty`, this memory is reused after the tensor is freed, but not
        before the copies from it are complete.  A tensor that requires a gradient is not pinned.
        """
        on_host = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not self.pins or not on_host or tensor.requires_grad:
            return tensor
        # torch copies a view with gaps, such as tokens[:, :-1], to pageable memory first.
        if tensor.is_contiguous() and _is_pinned(tensor):
            return tensor
        return _pinned_copy(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in host memory, not on the device."""
        return tensor.device == self.location

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the current stream; complete when an event recorded afterwards has occurred."""
        target.copy_(source, non_blocking=True)

    def record(self) -> CopyEvent:
        """Return the event that occurs when the work so far of the current stream is complete."""
        if self._module is None:
            return _Occurred()
        # Blocking: the host sleeps instead of occupying a core.
        event = self._module.Event(blocking=True)
        event.record()
        found: CopyEvent = event
        return found

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Run the copies of the block beside the work that the current stream gets afterwards.

        They begin when the work so far of the current stream is complete.
        """
        if self._module is None:
            yield
            return
        if self._side is None:
            self._side = self._module.Stream()
        self._side.wait_stream(self._module.current_stream())
        with self._module.stream(self._side):
            yield


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.is_pinned()


def _pinned_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a host tensor, by torch's allocator.

    The allocator notes each copy to a device, and does not reuse the memory before its end.
    """
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


class HostCopy:
    """A copy of a small device tensor to host memory that may not be complete yet.

    Args:
        memory: host memory for the tensor's device.
        tensor: the tensor to copy; the host must not change it until the copy is complete.
    """

    def __init__(self, memory: HostMemory, tensor: Tensor) -> None:
        self._copy = memory.empty(*tensor.shape, dtype=tensor.dtype)
        memory.copy(self._copy, tensor)
        self._event = memory.record()

    @property
    def is_complete(self) -> bool:
        return self._event.query()

    def wait(self) -> Tensor:
        """Wait until the copy is complete, and return it."""
        synchronize(self._event)
        return self._copy


class _PinnedPages(mmap.mmap):
    """Whole pages of host memory, which are unpinned before they are freed."""

    pinned_at = 0

    def __del__(self) -> None:
        if self.pinned_at:
            # At the end of the process torch may be gone.
            with suppress(AttributeError, TypeError):
                _cudart().cudaHostUnregister(self.pinned_at)


def _exactly_pinned(nbytes: int) -> Tensor:
    """Return [nbytes] uint8 of pinned memory."""
    nbytes_mapped = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = _PinnedPages(-1, nbytes_mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Else a write after a fork would move the page away from the one that the device reads.
    pages.madvise(mmap.MADV_DONTFORK)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    error = int(_cudart().cudaHostRegister(memory.data_ptr(), nbytes_mapped, 0))
    if error:
        raise PipemegaError(
            f"{nbytes / 2**20:.1f} MiB of host memory cannot be pinned (CUDA error {error}): give "
            "the process more memory or a higher limit of locked memory (ulimit -l), or set "
            "zero_optimization.offload_optimizer.pin_memory, checkpoint.async or "
            "activation_checkpointing.cpu_checkpointing to false"
        )
    pages.pinned_at = memory.data_ptr()
    return memory[:nbytes]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
