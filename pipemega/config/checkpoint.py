"""`checkpoint`: where and when the state is saved.  Floor 1."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model, model_validator

from pipemega.config.keys import (
    Count,
    Name,
    Section,
    Whole,
    honoured,
    ignored,
    own,
    refused,
    section,
)


class ParallelWriteSection(Section):
    """DeepSpeed's `checkpoint.parallel_write`."""

    pipeline_stage: bool = ignored(
        False,
        "DeepSpeed: every pipeline stage writes for itself.",
        "every rank writes its own part in any case",
        agrees=[True],
    )


if TYPE_CHECKING:
    _Async = Section
else:
    # A word of Python's own, which cannot be written in a class.
    _Async = create_model(
        "_Async",
        __base__=Section,
        __module__=__name__,
        **{
            "async": (
                bool,
                own(False, "Write in the background: a step waits only until a copy is made."),
            )
        },
    )


class CheckpointSection(_Async):
    """Where and when the state of a run is saved, and what of it is loaded."""

    save: Name | None = own(
        None, "Folder to save in, or a URL that fsspec knows; null: nothing is saved."
    )
    load: Name | None = own(None, "Folder or URL to go on from; null: a new run.")
    load_tag: Name | None = own(None, "Which checkpoint of `load`; null: the newest that is whole.")
    interval: Whole = own(0, "Steps between checkpoints; 0: only at the end.")
    keep_last: Count | None = own(None, "Newest checkpoints that are kept; null: all.")
    keep_every: Count | None = own(
        None, "Steps whose multiples are kept for good, in spite of `keep_last`; null: none."
    )
    verify: bool = own(
        True, "Before loading, compare the SHA-256 of every file, and not only its size."
    )
    load_module_only: bool = own(
        False, "Load parameters and buffers alone, into a run that begins at step 0."
    )
    load_optimizer_states: bool = own(True, "false: the optimizer begins anew.")
    load_lr_scheduler_states: bool = own(True, "false: the learning rate's schedule begins anew.")
    strict: bool = own(
        True, "false: of a checkpoint of another model what fits is loaded, the rest is listed."
    )
    allow_changes: tuple[Name, ...] = own(
        (),
        "Keys, or sections, of the config that may differ from the checkpoint's though they "
        'change the model or the order of the data, such as `["model.hidden_dropout", "seed"]`.',
    )
    tag_validation: Literal["Warn", "Ignore", "Fail"] = honoured(
        "Warn", "What to do when the ranks save under different tags."
    )
    load_universal: bool = ignored(
        False,
        "DeepSpeed: load a checkpoint of another mesh from its converted form.",
        "every checkpoint loads on every mesh, without being converted",
        agrees=[True],
    )
    use_node_local_storage: bool = refused(
        False,
        "DeepSpeed: each node saves on a disk of its own.",
        "a checkpoint lies in one folder that every rank sees",
    )
    parallel_write: ParallelWriteSection = section(ParallelWriteSection, "DeepSpeed's; see there.")
    writer: Mapping[str, Any] | None = ignored(
        None, "DeepSpeed: the engine that writes the files.", "torch.distributed.checkpoint writes"
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        # DeepSpeed takes the three words in any case.
        word = raw.get("tag_validation") if isinstance(raw, dict) else None
        return raw | {"tag_validation": word.capitalize()} if isinstance(word, str) else raw

    def remarks(self) -> Iterable[str]:
        if self.keep_every is not None and self.keep_last is None:
            yield ("checkpoint.keep_every does nothing without checkpoint.keep_last: all are kept")

    @property
    def in_background(self) -> bool:
        """The key `async`."""
        return bool(getattr(self, "async"))

    @model_validator(mode="after")
    def _a_folder_to_save_in(self) -> "CheckpointSection":
        if self.interval and self.save is None:
            raise ValueError(
                f"checkpoint.interval is {self.interval}, and there is no folder to save in: "
                "give checkpoint.save"
            )
        return self
