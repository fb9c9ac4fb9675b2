"""Options of loading: which parts of a checkpoint are loaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadOptions:
    """Which parts of a checkpoint are loaded; the other parts of the run stay unchanged.

    Args:
        module_only: load parameters and buffers only: the run starts at step 0.
        optimizer_states: load the optimizer state of each parameter.
        lr_scheduler_states: load the position of the learning-rate schedule.
        strict: refuse a checkpoint of another model; if False, load what fits and log the rest.
        verify: before loading, compare the checksum of every file, and not only its size.
        allow_changes: config keys, or sections, that may differ from the checkpoint's even
            though they change the model or the order of the data.
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
