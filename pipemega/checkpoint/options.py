"""What of a checkpoint is loaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadOptions:
    """What of a checkpoint is loaded; what is not, stays as the run has it.

    Args:
        module_only: parameters and buffers, and nothing else: the run begins at step 0.
        optimizer_states: what the optimizer keeps for each parameter.
        lr_scheduler_states: how far the learning rate's schedule has come.
        strict: refuse a checkpoint of another model; otherwise what fits is loaded, and what
            does not is listed.
        verify: compare the SHA-256 of every file before anything is loaded, not only its size.
        allow_changes: keys of the config, or sections, that may differ from those of the
            checkpoint though they change the model or the order of the data.
    """

    module_only: bool = False
    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    strict: bool = True
    verify: bool = True
    allow_changes: tuple[str, ...] = ()

    @property
    def loads_optimizer(self) -> bool:
        return self.optimizer_states and not self.module_only

    @property
    def loads_schedule(self) -> bool:
        return self.lr_scheduler_states and not self.module_only
