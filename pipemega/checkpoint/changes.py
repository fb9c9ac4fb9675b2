"""What was changed in the config since a checkpoint was written, and what becomes of it.

Most of it takes effect: rates, steps, mesh, schedule, what is logged. What makes it another model,
or another order of the data, is refused unless the run says that it is meant.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipemega.config import Config, load
from pipemega.errors import CheckpointError, ConfigError

# What it makes another model, or other data.
_OF_THE_MODEL = ("model", "training.loss_reduction")
_OF_THE_DATA = ("seed", "data")
# What is said of the same model, and the same data.
_HARMLESS = (
    "model.recompute",
    "model.make_vocab_size_divisible_by",
    "data.cache_path",
    "data.num_workers",
    "data.prefetch",
)
# How a run is told what to load, where to write and what to show.
_SILENT = ("checkpoint", "training.progress", "training.resume", "dump_state")

_NOT_SET = object()


@dataclass(frozen=True)
class Change:
    """A key of the config, as it was in the checkpoint's run and as it is in this one."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.then)} -> {_text(self.now)}"

    @property
    def is_of_the_model(self) -> bool:
        return _within(self.key, _OF_THE_MODEL) and not _within(self.key, _HARMLESS)

    @property
    def is_of_the_data(self) -> bool:
        return _within(self.key, _OF_THE_DATA) and not _within(self.key, _HARMLESS)


def changes(then: Mapping[str, Any], now: Config) -> list[Change]:
    """The keys that differ, sorted; not those about loading and saving.

    Args:
        then: `Config.to_dict()` of the run that saved.
    """
    before, after = dict(_flat(_with_defaults(then))), dict(_flat(now.to_dict()))
    return [
        Change(key, before.get(key, _NOT_SET), after.get(key, _NOT_SET))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _NOT_SET) != after.get(key, _NOT_SET) and not _within(key, _SILENT)
    ]


def judged(found: Sequence[Change], allowed: Iterable[str], where: str) -> str | None:
    """What to say of these changes; None if there are none.

    Args:
        allowed: keys or sections that may change in spite of what they mean.

    Raises:
        CheckpointError: one is refused; with all of them, and the way out.
    """
    allowed = tuple(allowed)
    refused = [
        change
        for change in found
        if (change.is_of_the_model or change.is_of_the_data) and not _within(change.key, allowed)
    ]
    if refused:
        keys = ", ".join(f'"{change.key}"' for change in refused)
        kinds = [
            kind
            for kind, of in (("another model", "model"), ("another order of the data", "data"))
            if any(getattr(change, f"is_of_the_{of}") for change in refused)
        ]
        listed = "; ".join(map(str, refused))
        raise CheckpointError(
            f"the config is not that of {where}, and would go on with {' and '.join(kinds)}: "
            f"{listed}. Set them as they were, or say that it is meant: "
            f"checkpoint.allow_changes [{keys}]; to begin a new run from the weights alone, set "
            f"checkpoint.load_module_only",
        )
    if not found:
        return None
    lines = "\n  ".join(map(str, found))
    return f"the config is not that of {where}; what is new takes effect:\n  {lines}"


def _with_defaults(then: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the defaults of keys that there were not yet when it was saved."""
    try:
        return load(then).to_dict()
    except ConfigError:
        # A key has gone since: it is shown as it is.
        return then


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _within(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _text(value: Any) -> str:
    return "not set" if value is _NOT_SET else repr(value)
