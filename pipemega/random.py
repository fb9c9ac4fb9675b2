"""Random streams: reproducible in each layer, equal or different along the tensor axis.  Floor 3.

Dropout must not depend on which rank holds a layer, on the schedule, or on a recomputation.  So
the default generators are seeded anew before each layer's forward, by four numbers that every
mesh agrees on; where tensor ranks hold different activations, `sharded_rng` gives each its own.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy
import torch

_CPU = torch.device("cpu")


class Ranked(Protocol):
    """Anything with a position among ranks; a `mesh.Axis`."""

    @property
    def rank(self) -> int: ...


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts; the same on every machine and in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_layer(
    seed: int, step: int, microbatch: int, layer: int, device: torch.device = _CPU
) -> None:
    """Seeds torch's default generators for one layer on one micro-batch.

    Args:
        seed: of the run; give each data rank's micro-batches their own, by `seed` or `microbatch`.
        layer: the position in the unsplit model, not in the stage.
        device: where the layer computes; its generator is seeded along with the CPU's.
    """
    _seed_streams(derive_seed(seed, step, microbatch, layer), device)


@contextmanager
def preserve_rng(device: torch.device = _CPU) -> Iterator[None]:
    """Gives the caller's random streams back as they were, also when the body raises."""
    before = _streams(device)
    try:
        yield
    finally:
        _set_streams(before, device)


@contextmanager
def sharded_rng(axis: Ranked, device: torch.device = _CPU) -> Iterator[None]:
    """A random stream of this rank's own, for activations that are cut along `axis`.

    It follows from one number drawn from the current stream, so that a recomputation gets the
    same.  After it the streams of all ranks agree again, however much each has drawn inside; one
    rank alone forks too, so that what comes after is the same on every mesh.
    """
    # From the CPU's stream on every device: a number read from the GPU would wait for it.
    drawn = int(torch.randint(1 << 62, ()).item())
    with preserve_rng(device):
        _seed_streams(derive_seed(drawn, axis.rank), device)
        yield


def rng_state(device: torch.device = _CPU) -> dict[str, Any]:
    """All random streams of this process, as tensors and plain numbers: for a checkpoint.

    Returns:
        {"torch": uint8 tensor, "numpy": {...}, "python": {...}}, with "cuda" on such a device.
    """
    algorithm, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    version, words, python_gauss = random.getstate()
    return _streams(device) | {
        "numpy": {
            "algorithm": str(algorithm),
            "keys": torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "python": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.int64),
            "gauss": python_gauss,
        },
    }


def set_rng_state(state: dict[str, Any], device: torch.device = _CPU) -> None:
    """Continues every stream where `rng_state` saw it.

    A state without "cuda" (saved on a CPU) leaves the GPU's stream as it is.
    """
    _set_streams(state, device)
    theirs = state["numpy"]
    keys = theirs["keys"].numpy().astype(numpy.uint32)
    numpy.random.set_state(
        (theirs["algorithm"], keys, theirs["position"], theirs["has_gauss"], theirs["gauss"])
    )
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))


def seed_streams(seed: int, device: torch.device = _CPU) -> None:
    """Begins every stream of `rng_state` anew, from one number of up to 63 bits."""
    _seed_streams(seed, device)
    numpy.random.seed(derive_seed(seed, "numpy") % 2**32)
    random.seed(seed)


def _seed_streams(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        _cuda_generator(device).manual_seed(seed)


def _streams(device: torch.device) -> dict[str, Any]:
    streams = {"torch": torch.default_generator.get_state()}
    if device.type == "cuda":
        streams["cuda"] = _cuda_generator(device).get_state()
    return streams


def _set_streams(streams: dict[str, Any], device: torch.device) -> None:
    torch.default_generator.set_state(streams["torch"])
    if device.type == "cuda" and "cuda" in streams:
        _cuda_generator(device).set_state(streams["cuda"])


def _cuda_generator(device: torch.device) -> torch.Generator:
    # The list is empty until CUDA has started.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
