"""Activation checkpointing: free intermediate activations and recompute them in backward.

Source: Chen et al. 2016, arXiv:1604.06174.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pipemega.config import Config
from pipemega.errors import PipelineError
from pipemega.pipeline.messages import tensors_of, versions_of
from pipemega.tensor_parallel.collectives import keeping

T = TypeVar("T")

# First part of the names of the operators whose results `recompute` can keep. Not bmm: in attention
# without a fused kernel its result has the size of the scores. Of the collectives, sums.
_OPERATORS: Final = {
    "linear": (
        "aten.mm.", "aten.addmm.", "aten._grouped_mm.", "aten._scaled_mm.", "pipemega.collective.",
    ),
    "attention": ("aten._scaled_dot_product_", "flex_attention"),
}  # fmt: skip


@dataclass(frozen=True)
class ActivationCheckpoints:
    """The layers of a model that are recomputed, and how they share activation checkpoints.

    Layers 2 to 7 may be recomputed; the stages are layers 0 to 4 and 5 to 9:

        size 2               0  1  (2  3)(4)    |   (5  6)(7)  8  9
        size 1, most 2       0  1  (2)(3) 4     |   (5)(6) 7   8  9

    Args:
        start, stop: positions of the first layer that may be recomputed, and after the last.
        size: number of consecutive layers for which only the input of the first is stored.
        most: largest number of checkpoints per stage; None: no limit.
    """

    start: int
    stop: int
    size: int = 1
    most: int | None = None

    def segments(self, start: int, stop: int) -> list[tuple[int, int, bool]]:
        """Return (start, stop, whether it is recomputed) of the runs of layers of a stage."""
        first, last = max(start, self.start), min(stop, self.stop)
        if self.most is not None:
            last = min(last, first + self.size * self.most)
        if first >= last:
            return [(start, stop, False)]
        groups = [
            (group, min(group + self.size, last), True) for group in range(first, last, self.size)
        ]
        runs = [(start, first, False), *groups, (last, stop, False)]
        return [run for run in runs if run[0] < run[1]]


class _Memo:
    """What a region has computed by `remembered`, in the order of the calls."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.next = 0


# The memo of the region that runs or is recomputed; None outside of regions.
_memo: ContextVar[_Memo | None] = ContextVar("memo", default=None)


def remembered(compute: Callable[[], T]) -> T:
    """Return `compute()`, without gradients; in a recomputation what it returned in the forward.

    For decisions that a recomputation must not take again, because rounding could change them, or
    because all ranks would have to communicate: such as the experts of a token.
    """
    memo = _memo.get()
    if memo is None or memo.next == len(memo.values):
        with torch.no_grad():
            value = compute()
        if memo is None:
            return value
        memo.values.append(value)
    memo.next += 1
    found: T = memo.values[memo.next - 1]
    return found


def recompute(
    function: Callable[..., Any],
    *args: Any,
    restore_rng: bool = True,
    keep: Collection[str] = (),
) -> Any:
    """Return `function(*args)`; keep only `args` and recompute the rest in backward.

    The recomputation stops once it has the tensors that backward needs. If gradients are
    disabled, this only calls the function.

    Args:
        restore_rng: recompute with the RNG state of the first run; False if the function sets
            the seed or uses no random numbers.
        keep: kinds of operators whose results are also kept: "attention", "linear". The product of
            a linear whose input features are sharded is repeated; its sum over the ranks is kept.

    Raises:
        PipelineError: in backward, if `args` were changed in place since the call.
        RuntimeError: in backward, if a result that is kept was changed in place.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=restore_rng)
    versions: list[int] = []
    memo = _Memo()
    options: dict[str, Any] = {}
    if keep:
        prefixes = tuple(prefix for kind in keep for prefix in _OPERATORS[kind])
        policy = partial(_policy, prefixes)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    def checked(*args: Any) -> Any:
        now = versions_of(tensors_of(args))
        if versions and now != versions:
            raise PipelineError(
                "the input of a checkpointed region was changed in place, so backward cannot "
                "recompute the region: change a clone() of it, or use inplace=False"
            )
        token = keeping.set("off" if not keep else "backward" if versions else "forward")
        outer = _memo.set(memo)
        versions[:], memo.next = now, 0
        try:
            return function(*args)
        finally:
            keeping.reset(token)
            _memo.reset(outer)

    return checkpoint(
        checked, *args, use_reentrant=False, preserve_rng_state=restore_rng, **options
    )


def _policy(prefixes: tuple[str, ...], _: Any, operator: Any, *args: Any, **__: Any) -> Any:
    """Return whether the result of an operator is kept, for torch."""
    name = str(operator)
    is_kept = name.startswith(prefixes) and keeping.get() != "off"
    if is_kept and name.startswith("pipemega."):
        is_kept = args[1] != "all-gather"
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def outside_recomputation() -> Iterator[None]:
    """Run operations that a recomputation may repeat although the forward had their result.

    Otherwise torch would look for their first run in the forward, and raise an error.
    """
    if keeping.get() != "backward":
        yield
        return
    with _disable_current_modes():
        yield


def checkpoint_interval(config: Config, num_layers: int) -> int:
    """Return the layers between two activation checkpoints, from the config key that is set."""
    number = config.activation_checkpointing.number_checkpoints
    if number is not None:
        return -(-num_layers // number)
    return config.pipeline.activation_checkpoint_interval
