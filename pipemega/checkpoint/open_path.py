"""Open a checkpoint by its path in one process, without the model that saved it."""

from pipemega.checkpoint import layout
from pipemega.checkpoint.manifest import STATE_FILE
from pipemega.checkpoint.save_load import CheckpointReader
from pipemega.errors import CheckpointError
from pipemega.storage.filesystem import Storage, storage_at


def open_path(path: str, tag: str | None = None) -> CheckpointReader:
    """Return a reader of one checkpoint; sizes of files are compared, checksums are not.

    Args:
        path: a folder of checkpoints, or one checkpoint; or a URL that fsspec opens.
        tag: the checkpoint in the folder; None: the newest undamaged one.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged.
    """
    storage, tag = locate(path, tag)
    tag = tag or layout.newest(storage)
    if tag is None:
        raise CheckpointError(f"{storage.full_path()}: no checkpoint was saved here")
    return CheckpointReader.of(storage, layout.find_checkpoint(storage, tag))


def locate(path: str, tag: str | None = None) -> tuple[Storage, str | None]:
    """Return the folder of checkpoints, and the tag if `path` is one checkpoint.

    Raises:
        CheckpointError: the path does not exist.
    """
    path = path.rstrip("/") or "/"
    parent, _, name = path.rpartition("/")
    if tag is None and storage_at(path).size(STATE_FILE) is not None:
        return storage_at(parent or "."), name
    storage = storage_at(path)
    if not storage.exists():
        raise CheckpointError(f"no checkpoint folder {storage.full_path()!r}: is the path right?")
    return storage, tag
