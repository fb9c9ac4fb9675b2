"""In what a checkpoint and the model of this run differ."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from pipemega.checkpoint.agreement import Agreement
from pipemega.checkpoint.pieces import Piece
from pipemega.checkpoint.storage import TensorIndex
from pipemega.errors import CheckpointError

_SHOWN = 3

_log = logging.getLogger(__name__)

Shape = tuple[int, ...] | None


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in the run (`here`) and in the checkpoint (`there`)."""

    name: str
    here: Shape
    there: Shape

    def __str__(self) -> str:
        return f"{self.name} is {_shape(self.here)} here and {_shape(self.there)} there"

    @property
    def outcome(self) -> str:
        """What becomes of it when it is not an error."""
        if self.here is None:
            return f"{self.name} {_shape(self.there)} is in the checkpoint only: not loaded"
        if self.there is None:
            return f"{self.name} {_shape(self.here)} is not in the checkpoint: stays as it is"
        return f"{self}: stays as it is"


def differences(
    stored: TensorIndex, pieces: Mapping[str, Piece], is_replica: bool, agree: Agreement
) -> list[Difference]:
    """Between the parameters and buffers here, on all ranks, and those that are stored; collective.

    Args:
        pieces: of the model of this rank.
        is_replica: another rank has the same ones.
    """
    # What has no element is not stored.
    mine = {name: tuple(piece.size()) for name, piece in pieces.items() if piece.size().numel()}
    here: dict[str, tuple[int, ...]] = {}
    for part in agree.gather({} if is_replica else mine):
        here |= part
    # What an optimizer keeps is taken as it is stored: it decides for itself.
    there = {
        name: shape for name, (shape, _) in stored.items() if not name.startswith("optimizer/")
    }
    return [
        Difference(name, here.get(name), there.get(name))
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]


def refuse(where: str | PurePath, found: list[Difference]) -> None:
    """Raises if there are differences, with the first of them.

    Raises:
        CheckpointError: on every rank alike.
    """
    if not found:
        return
    more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
    raise CheckpointError(
        f"{where} is of another model: {'; '.join(map(str, found[:_SHOWN]))}{more}. Build the "
        f"model as it was when this was saved, or take what fits of it (checkpoint.strict false)",
        on_every_rank=True,
    )


def report(where: str | PurePath, found: list[Difference]) -> None:
    """Logs every difference, and what becomes of it."""
    if found:
        lines = "\n  ".join(difference.outcome for difference in found)
        _log.warning("%s is of another model; what fits of it is loaded:\n  %s", where, lines)


def _shape(shape: Shape) -> str:
    return "missing" if shape is None else str(list(shape))
