"""`checkpoint`: where and when the state is saved.  Floor 1."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

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


class CheckpointSection(Section):
    """Where and when the state of a run is saved."""

    save: Name | None = own(None, "Folder to save in; null: nothing is saved.")
    load: Name | None = own(None, "Folder to go on from; null: a new run.")
    load_tag: Name | None = own(None, "Which checkpoint of `load`; null: the newest.")
    interval: Whole = own(0, "Steps between checkpoints; 0: only at the end.")
    keep_last: Count | None = own(None, "Newest checkpoints that are kept; null: all.")
    tag_validation: Literal["Warn", "Ignore", "Fail"] = honoured(
        "Warn", "What to do when the ranks save under different tags."
    )
    load_universal: bool = refused(
        False,
        "DeepSpeed: load a checkpoint of another mesh from its converted form.",
        "loading on another mesh is not here yet; leave it false",
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

    @model_validator(mode="after")
    def _a_folder_to_save_in(self) -> "CheckpointSection":
        if self.interval and self.save is None:
            raise ValueError(
                f"checkpoint.interval is {self.interval}, and there is no folder to save in: "
                "give checkpoint.save"
            )
        return self
