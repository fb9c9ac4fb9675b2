"""`deepspeed.checkpointing`: recomputation of a function, and random numbers of tensor ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from pipemega.errors import ConfigError
from pipemega.monitor import get_logger
from pipemega.random import derive_seed, preserve_rng

_TENSOR_STREAM = "model-parallel-rng"
# Megatron's distance between the seeds of the default and of the tensor-parallel stream.
_TENSOR_SEED_OFFSET = 2718


@dataclass
class _Configuration:
    """What `configure` was given; `mpu` is None before."""

    mpu: Any = None
    done: bool = False


_configuration = _Configuration()


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`; keep only `args`, and recompute the rest in backward."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Do the same as `checkpoint`, which is not reentrant here."""
    return checkpoint(function, *args)


def check_checkpoint_function(function: Any) -> None:
    """Refuse an `activation_checkpoint_func` that is not known to recompute only.

    Raises:
        ConfigError: on every rank.
    """
    known = (checkpoint, non_reentrant_checkpoint, torch_checkpoint.checkpoint, None)
    if function not in known:
        raise ConfigError(
            f"PipelineModule(activation_checkpoint_func={getattr(function, '__name__', function)}) "
            "is not supported: the engine recomputes groups of layers itself. Remove the argument, "
            "or set activation_checkpoint_interval to 0 and call the function in the forward of a "
            "layer",
            on_every_rank=True,
        )


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accept the options of `checkpoint`; those that would save memory in another way are refused.

    Raises:
        ConfigError: checkpoint_in_cpu; partition_activations on several tensor ranks.
    """
    if checkpoint_in_cpu:
        raise ConfigError(
            "deepspeed.checkpointing.configure(checkpoint_in_cpu=True) is not supported: remove "
            "it, and set activation_checkpointing.cpu_checkpointing to true in the config",
            on_every_rank=True,
        )
    if partition_activations:
        size = _tensor_number(mpu_, "world_size", 1)
        if size > 1:
            raise ConfigError(
                "deepspeed.checkpointing.configure(partition_activations=True) on "
                f"{size} tensor ranks is not supported: remove it",
                on_every_rank=True,
            )
        get_logger().info("partition_activations has no effect on one tensor rank")
    _configuration.mpu, _configuration.done = mpu_, True


def _tensor_number(mpu: Any, what: str, default: int) -> int:
    """Return the "rank" or "world_size" of the tensor ranks of an mpu, old or new."""
    for axis in ("tensor_model", "slice", "model"):
        getter = getattr(mpu, f"get_{axis}_parallel_{what}", None)
        if getter is not None:
            return int(getter())
    return default


def is_configured() -> bool:
    return _configuration.done


def reset() -> None:
    """Do nothing: no buffers are kept between steps."""


def set_num_layers(nlayers: int) -> None:
    """Do nothing: the number of layers is only used for contiguous buffers."""


class RngTracker:
    """Named streams of random numbers, as Megatron's CudaRNGStatesTracker.

    A stream continues the current generator: it is seeded with one number of it and the seed of
    the stream. So a recomputation, which restores the generator, repeats the stream too.
    """

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}

    def reset(self) -> None:
        self._seeds = {}

    def get_states(self) -> dict[str, Any]:
        return dict(self._seeds)

    def set_states(self, states: dict[str, Any]) -> None:
        self._seeds = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a stream.

        Raises:
            ConfigError: there is one of this name.
        """
        if name in self._seeds:
            raise ConfigError(f"the stream {name!r} of random numbers exists already")
        self._seeds[name] = seed

    @contextmanager
    def fork(self, name: str = _TENSOR_STREAM) -> Iterator[None]:
        """Use the stream inside of the block.

        Raises:
            ConfigError: no stream has this name.
        """
        if name not in self._seeds:
            raise ConfigError(
                f"there is no stream {name!r} of random numbers: call "
                "deepspeed.checkpointing.model_parallel_cuda_manual_seed(seed) before"
            )
        number = int(torch.randint(1 << 62, ()).item())
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with preserve_rng(device):
            torch.manual_seed(derive_seed(number, self._seeds[name]))
            yield


_tracker = RngTracker()


def get_cuda_rng_tracker() -> RngTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch, and the stream that differs between tensor ranks; after `configure(mpu)`."""
    _tracker.reset()
    torch.manual_seed(seed)
    rank = _tensor_number(_configuration.mpu, "rank", 0)
    _tracker.add(_TENSOR_STREAM, seed + _TENSOR_SEED_OFFSET + rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed again, as `model_parallel_cuda_manual_seed`."""
    model_parallel_cuda_manual_seed(seed)
