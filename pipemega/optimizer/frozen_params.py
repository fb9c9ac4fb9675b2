"""Parameters that the caller freezes and unfreezes between the steps of a run.

parameter.requires_grad_(False)     from the next train_batch on: no gradient, no update, no
                                    weight decay; momentum and step count stay as they are
"""

from collections.abc import Iterable

from torch import nn

from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.errors import ConfigError


class FrozenParams:
    """The trainable parameters of this rank that are frozen now.

    Args:
        parameters: (logical name, parameter), copies of tied parameters too.

    Attributes:
        names: logical names of the frozen ones, since the last `update`.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._parameters = [(name, p) for name, p in parameters if p.numel()]
        self._known = self._flags
        self._trainable = {name for name, p in self._parameters if p.requires_grad}
        self.names: frozenset[str] = frozenset()

    @property
    def _flags(self) -> list[bool]:
        return [p.requires_grad for _, p in self._parameters]

    @property
    def have_changed(self) -> bool:
        """Whether the caller has frozen or unfrozen parameters since the last `update`."""
        return self._flags != self._known

    def update(self, mesh: Mesh) -> None:
        """Let the next step leave out what is frozen now; collective over the world.

        Raises:
            ConfigError: a parameter was frozen at `initialize`, or is frozen on some ranks only;
                on every rank.
        """
        for rank, untrained in enumerate(gather_objects(self._unfrozen_since(), mesh.world)):
            if untrained:
                raise ConfigError(
                    f"{untrained} requires a gradient on rank {rank} and did not in initialize(), "
                    "so the optimizer does not have it: call initialize() while it requires a "
                    "gradient, and freeze it after that",
                    on_every_rank=True,
                )
        first: dict[str, tuple[int, bool]] = {}
        flags = [(name, p.requires_grad) for name, p in self._parameters]
        for rank, others in enumerate(gather_objects(flags, mesh.world)):
            for name, flag in others:
                before, was = first.setdefault(name, (rank, flag))
                if flag is not was:
                    raise ConfigError(
                        f"{name}: requires_grad is {was} on rank {before} and {flag} on rank "
                        f"{rank}: set the same value on all ranks and for all stages that hold it",
                        on_every_rank=True,
                    )
        self._known = self._flags
        self.names = frozenset(
            name for name, p in self._parameters if name in self._trainable and not p.requires_grad
        )

    def _unfrozen_since(self) -> str:
        names = (name for name, p in self._parameters if p.requires_grad)
        return next((name for name in names if name not in self._trainable), "")
