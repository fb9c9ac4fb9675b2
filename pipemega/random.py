"""RNG state: reproducible dropout in each layer, equal or different on the tensor ranks.

Dropout must not depend on the rank of a layer, on the schedule or on recomputation. Therefore
the default generators are seeded before each layer's forward from four numbers that are equal on
every mesh. Where tensor ranks have different activations, `sharded_rng` gives them different
random numbers.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy
import torch

_CPU = torch.device("cpu")


class HasRank(Protocol):
    """An object with a rank, such as `mesh.Axis`."""

    @property
    def rank(self) -> int: ...


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed, a hash of the parts; equal on every machine and in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_layer(
    seed: int, step: int, microbatch: int, layer: int, device: torch.device = _CPU
) -> None:
    """Seed torch's default generators for one layer on one micro-batch.

    Args:
        seed: the seed of the run; `seed` or `microbatch` must differ between data ranks.
        layer: position in the whole model, not in the stage.
        device: device of the layer; its generator is seeded as well as the CPU generator.
    """
    seed_torch(derive_seed(seed, step, microbatch, layer), device)


@contextmanager
def preserve_rng(device: torch.device = _CPU) -> Iterator[None]:
    """Restore torch's generators on exit, also after an exception."""
    before = _torch_states(device)
    try:
        yield
    finally:
        _set_torch_states(before, device)


@contextmanager
def preserve_all_rng() -> Iterator[None]:
    """Restore the default CPU generators of torch, numpy and `random` on exit."""
    states = torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])


@contextmanager
def sharded_rng(axis: HasRank, device: torch.device = _CPU) -> Iterator[None]:
    """Seed torch's generators differently on each rank of `axis`, for sharded activations.

    The seed is derived from one number of the current generator, so a recomputation gets the same
    seed. On exit the generators of all ranks have equal states again. This also applies to an axis
    of one rank, so that later random numbers are equal on every mesh.
    """
    # From the CPU generator on every device: reading a number from the GPU would synchronize.
    number = int(torch.randint(1 << 62, ()).item())
    with preserve_rng(device):
        seed_torch(derive_seed(number, axis.rank), device)
        yield


def rng_state(device: torch.device = _CPU) -> dict[str, Any]:
    """Return the states of all generators of this process for a checkpoint.

    Returns:
        {"torch": uint8 tensor, "numpy": {...}, "python": {...}}, and "cuda" on a CUDA device.
    """
    algorithm, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    version, words, python_gauss = random.getstate()
    return _torch_states(device) | {
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
    """Restore the states of all generators from `rng_state`.

    A state without "cuda" (saved on a CPU) does not change the GPU generator.
    """
    _set_torch_states(state, device)
    saved = state["numpy"]
    keys = saved["keys"].numpy().astype(numpy.uint32)
    numpy.random.set_state(
        (saved["algorithm"], keys, saved["position"], saved["has_gauss"], saved["gauss"])
    )
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))


def seed_rng(seed: int, device: torch.device = _CPU) -> None:
    """Seed all generators of `rng_state` from one number of up to 63 bits."""
    seed_torch(seed, device)
    numpy.random.seed(derive_seed(seed, "numpy") % 2**32)
    random.seed(seed)


def seed_torch(seed: int, device: torch.device = _CPU) -> None:
    """Seed torch's generators of the CPU and of `device`.

    Unlike `torch.manual_seed`, which also seeds all other devices: on a machine without GPUs it
    stores each of these calls, with a stack trace.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        _cuda_generator(device).manual_seed(seed)


def _torch_states(device: torch.device) -> dict[str, Any]:
    states = {"torch": torch.default_generator.get_state()}
    if device.type == "cuda":
        states["cuda"] = _cuda_generator(device).get_state()
    return states


def _set_torch_states(states: dict[str, Any], device: torch.device) -> None:
    torch.default_generator.set_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        _cuda_generator(device).set_state(states["cuda"])


def _cuda_generator(device: torch.device) -> torch.Generator:
    # The list is empty until CUDA is initialized.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
