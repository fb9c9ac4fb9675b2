"""Learning rate, its schedule and weight decay: of the config, or of the checkpoint.

    override_opt_param_scheduler        true, null: those of the config
                                        false: a checkpoint with other values is refused
    use_checkpoint_opt_param_scheduler  those of the checkpoint

The position in the schedule is that of the checkpoint in all cases.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipemega.checkpoint.differences import ConfigChange, is_within
from pipemega.config import Config, load
from pipemega.config.scheduler import RunLength, SchedulerSection
from pipemega.errors import CheckpointError

_PARAMS = ("lr", "weight_decay")
_KEYS = ("scheduler", "optimizer.groups", *(f"optimizer.params.{name}" for name in _PARAMS))
# The defaults of lengths of the schedule.
_LENGTHS = ("training.train_steps", "training.train_samples", "training.epochs")


def refuse_other_values(changes: Sequence[ConfigChange], config: Config, where: str) -> None:
    """Refuse a checkpoint with other values, if the config does not say which ones apply.

    Args:
        changes: of the config, since the checkpoint was saved.
        where: the path of the checkpoint.

    Raises:
        CheckpointError: lists them.
    """
    settings = config.checkpoint
    if settings.override_opt_param_scheduler is not False:
        return
    if settings.use_checkpoint_opt_param_scheduler:
        return  # `with_values_of` has replaced them
    keys = (*_KEYS, *(_LENGTHS if _needs_length(config.scheduler) else ()))
    found = [str(change) for change in changes if is_within(change.key, keys)]
    if found:
        raise CheckpointError(
            f"the learning rate, its schedule or the weight decay differ from those of {where}: "
            f"{'; '.join(found)}. Restore them; or set "
            "checkpoint.override_opt_param_scheduler to true to use the new values, or "
            "checkpoint.use_checkpoint_opt_param_scheduler to true to use those of the checkpoint"
        )


def _needs_length(section: SchedulerSection | None) -> bool:
    """Return whether the length of the run changes the schedule."""
    if section is None:
        return False
    one, other = (section.arguments(RunLength(n, n, n)) for n in (1, 2))
    return one != other


def with_values_of(config: Config, stored: Mapping[str, Any], data_size: int) -> Config:
    """Return `config` with the values of a checkpoint.

    Args:
        stored: the config of the run that saved it.
        data_size: number of its data ranks.

    Raises:
        ConfigError: the stored config is not valid any more.
    """
    saved = load(stored)
    section = saved.scheduler
    if section is not None and section.params is not None:
        total = saved.batch_sizes(data_size).run_length(saved.training).in_unit(section.by)
        # The new run may have another length.
        fixed = section.params.with_length(total, section.by)
        section = section.model_copy(update={"params": fixed})
    update: dict[str, Any] = {"scheduler": section}
    if config.optimizer is not None and saved.optimizer is not None:
        old, new = saved.optimizer.params, config.optimizer.params
        same = {n: getattr(old, n) for n in _PARAMS if hasattr(old, n) and hasattr(new, n)}
        params_of_run = new.model_copy(update=same)
        update["optimizer"] = config.optimizer.model_copy(update={"params": params_of_run})
    return config.model_copy(update=update)
