"""Differences between a checkpoint and this run: config keys and tensors; which ones are refused.

Most changes of the config take effect: learning rates, steps, mesh, schedule, logging. A change of
the model or of the order of the data is refused, unless checkpoint.allow_changes lists its key.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipemega.checkpoint.manifest import CollectiveIO
from pipemega.checkpoint.tensors import TensorIndex, TensorShard
from pipemega.config import Config, load
from pipemega.errors import CheckpointError, ConfigError

# Keys and sections that change the model, or the order of the data.
_MODEL_KEYS = ("model", "lora", "training.loss_reduction")
_DATA_KEYS = ("seed", "data")
# Keys of these sections that change neither.
_HARMLESS_KEYS = (
    "model.recompute",
    "model.recompute_method",
    "model.recompute_num_layers",
    "model.recompute_keep",
    "model.make_vocab_size_divisible_by",
    "model.pad_vocab_size_to",
    "lora.path",
    "data.cache_path",
    "data.num_workers",
    "data.prefetch",
    "data.compare_every",
)
# Keys about loading, saving and display: their changes are not logged.
_SILENT_KEYS = ("checkpoint", "training.progress", "training.resume", "dump_state")

_NOT_SET = object()
_MOST_LISTED = 3

_log = logging.getLogger(__name__)

Shape = tuple[int, ...] | None


@dataclass(frozen=True)
class ConfigChange:
    """A config key with its value in the checkpoint's run (`before`) and in this run (`after`)."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {_value_text(self.before)} -> {_value_text(self.after)}"

    @property
    def changes_model(self) -> bool:
        return is_within(self.key, _MODEL_KEYS) and not is_within(self.key, _HARMLESS_KEYS)

    @property
    def changes_data(self) -> bool:
        return is_within(self.key, _DATA_KEYS) and not is_within(self.key, _HARMLESS_KEYS)


def config_changes(stored: Mapping[str, Any], config: Config) -> list[ConfigChange]:
    """Return the keys that differ, sorted, without those about loading and saving.

    Args:
        stored: `Config.to_dict()` of the run that saved.
    """
    before, after = dict(_flat(_with_defaults(stored))), dict(_flat(config.to_dict()))
    return [
        ConfigChange(key, before.get(key, _NOT_SET), after.get(key, _NOT_SET))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _NOT_SET) != after.get(key, _NOT_SET)
        and not is_within(key, _SILENT_KEYS)
    ]


def check_config_changes(
    changes: Sequence[ConfigChange], allowed: Iterable[str], where: str
) -> str | None:
    """Return the text that lists the changes; None if there are none.

    Args:
        allowed: keys or sections that may change although they change the model or the data.
        where: the path of the checkpoint.

    Raises:
        CheckpointError: changes that are refused; the message lists all of them and the remedy.
    """
    allowed = tuple(allowed)
    refused = [
        change
        for change in changes
        if (change.changes_model or change.changes_data) and not is_within(change.key, allowed)
    ]
    if refused:
        kinds = ["another model"] if any(change.changes_model for change in refused) else []
        if any(change.changes_data for change in refused):
            kinds.append("another order of the data")
        keys = ", ".join(f'"{change.key}"' for change in refused)
        raise CheckpointError(
            f"the config differs from the config saved in {where} and would continue with "
            f"{' and '.join(kinds)}: {'; '.join(map(str, refused))}. Restore these values, or, if "
            f"the change is intended, set checkpoint.allow_changes [{keys}]; to start a new run "
            f"from the weights alone, set checkpoint.load_module_only"
        )
    if not changes:
        return None
    lines = "\n  ".join(map(str, changes))
    return (
        f"the config differs from the config saved in {where}; the new values take effect:\n"
        f"  {lines}"
    )


def _with_defaults(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the defaults of keys that did not exist yet when the checkpoint was written."""
    try:
        return load(stored).to_dict()
    except ConfigError:
        # A key was removed since: compare the config as it is.
        return stored


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def is_within(key: str, sections: Iterable[str]) -> bool:
    """Return whether a key is one of these keys, or in one of these sections."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _value_text(value: Any) -> str:
    return "not set" if value is _NOT_SET else repr(value)


@dataclass(frozen=True)
class TensorDifference:
    """A tensor with different shapes in the run and in the checkpoint; None: missing."""

    name: str
    in_run: Shape
    stored: Shape

    def __str__(self) -> str:
        return (
            f"{self.name} is {_shape_text(self.in_run)} in this run and "
            f"{_shape_text(self.stored)} in the checkpoint"
        )

    @property
    def outcome(self) -> str:
        """The log line for it when it is not an error."""
        if self.in_run is None:
            return f"{self.name} {_shape_text(self.stored)} is only in the checkpoint: not loaded"
        if self.stored is None:
            return f"{self.name} {_shape_text(self.in_run)} is not in the checkpoint: unchanged"
        return f"{self}: unchanged"


def tensor_differences(
    stored: TensorIndex, shards: Mapping[str, TensorShard], is_replica: bool, ranks: CollectiveIO
) -> list[TensorDifference]:
    """Compare the parameters and buffers of all ranks with the stored ones; collective.

    Args:
        shards: this rank's shards of the model's parameters and buffers, by logical name.
        is_replica: another rank has the same shards.
    """
    # Tensors without elements are not stored.
    mine = {name: tuple(shard.size()) for name, shard in shards.items() if shard.size().numel()}
    in_run: dict[str, tuple[int, ...]] = {}
    for of_rank in ranks.all_gather({} if is_replica else mine):
        in_run |= of_rank
    # Optimizer state is not compared: the optimizer creates it, from the stored shapes.
    in_checkpoint = {
        name: shape for name, (shape, _) in stored.items() if not name.startswith("optimizer/")
    }
    return [
        TensorDifference(name, in_run.get(name), in_checkpoint.get(name))
        for name in {**in_run, **in_checkpoint}
        if in_run.get(name) != in_checkpoint.get(name)
    ]


def refuse_differences(where: str, found: list[TensorDifference]) -> None:
    """Raise an error that lists the first differences, if there are any.

    Raises:
        CheckpointError: there are differences; raised on every rank.
    """
    if not found:
        return
    more = f" (and {len(found) - _MOST_LISTED} more)" if len(found) > _MOST_LISTED else ""
    raise CheckpointError(
        f"{where} has another model: {'; '.join(map(str, found[:_MOST_LISTED]))}{more}. Build "
        f"the model as it was when this was saved, or load what fits (checkpoint.strict false)",
        on_every_rank=True,
    )


def log_differences(where: str, found: list[TensorDifference]) -> None:
    """Log every difference and its consequence."""
    if found:
        lines = "\n  ".join(difference.outcome for difference in found)
        _log.warning("%s has another model; loading what fits:\n  %s", where, lines)


def _shape_text(shape: Shape) -> str:
    return "missing" if shape is None else str(list(shape))
