"""Compare the size of checkpoints with the free space of the folder; log a warning, never fail."""

import logging
from collections.abc import Mapping
from contextlib import suppress

from pipemega.checkpoint import layout, tensors
from pipemega.checkpoint.shards import OutgoingShard
from pipemega.distributed.mesh import Mesh
from pipemega.optimizer import OptimizerStep
from pipemega.pipeline.local_model import LocalModel
from pipemega.storage.filesystem import Storage

_log = logging.getLogger(__name__)


def outgoing_bytes(shards: Mapping[str, OutgoingShard]) -> int:
    """Return the bytes that this rank writes into `tensors/`."""
    parts = [part for shard in shards.values() for part in shard.chunks.values()]
    return sum(part.numel() * part.element_size() for part in parts)


def estimated_bytes(
    state_bytes: int, mesh: Mesh, model: LocalModel, step: OptimizerStep | None
) -> int:
    """Return the bytes that this rank will write into `tensors/` after the first step.

    Args:
        state_bytes: of the optimizer, for each parameter.
    """
    shards = tensors.logical_tensors(model, step, mesh)
    outgoing = {name: shard.outgoing for name, shard in shards.items()}
    size = outgoing_bytes(outgoing)
    if step is None or any(name.startswith("optimizer/") for name in shards):
        return size
    # Before the first step an optimizer has no state.
    keys = [f"parameters/{n}" for n, p in model.parameters.items() if p.requires_grad]
    trained = outgoing_bytes({key: outgoing[key] for key in keys})
    return size + trained * state_bytes // 4


def warn_if_short(storage: Storage, size: int, what: str, count: int = 1) -> None:
    """Log a warning if `count` more checkpoints of `size` bytes do not fit.

    Args:
        what: as in "checkpoint global_step100".
    """
    free = None
    with suppress(OSError):
        free = storage.free_bytes()
    if free is None or free >= size * count:
        return
    needed = f"about {_text(size)}"
    if count > 1:
        needed = f"{count} x {needed}, in all {_text(size * count)}"
    _log.warning(
        "%s will need %s, and %s has %s free: free some space, or keep fewer checkpoints "
        "(checkpoint.keep_last, checkpoint.interval)",
        what,
        needed,
        storage.full_path(),
        _text(free),
    )


def warn_at_start(storage: Storage, size: int, saves: int, keep_last: int | None) -> None:
    """Log a warning if the checkpoints that a run is going to save do not fit.

    Args:
        size: bytes of a checkpoint.
        saves: the number of checkpoints of the whole run.
        keep_last: the number of newest ones that are kept. An old checkpoint is deleted after a new
            one is complete.
    """
    with suppress(OSError):
        most = saves if keep_last is None else min(saves, keep_last + 1)
        # A resumed run has some already.
        more = most - len(layout.complete_tags(storage))
        warn_if_short(storage, size, "this run", max(1, more))


def _text(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
