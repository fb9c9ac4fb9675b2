"""Checks the checkpoint folder on every node: shared, free space, speed of writing and reading."""

import errno
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipemega.doctor.findings import Finding, listed
from pipemega.planning.units import show_bytes, show_time
from pipemega.storage.filesystem import LocalStorage, Storage, is_remote, storage_at

_MARKER = "rank0"
_CHUNK = 1 << 20
# Network file systems may show a new file to other nodes only after this time.
_VISIBLE_SECONDS = 10.0
# Bytes per second; slower than a single hard disk.
_SLOW = 100e6
_GIVE_SPACE = "free some space, or choose another folder (checkpoint.save)"


def existing_folder(folder: str) -> str:
    """Return `folder`, or its nearest parent that exists, as an absolute path; a URL as it is."""
    if is_remote(folder):
        return folder
    path = Path(folder).expanduser().absolute()
    return str(next(one for one in (path, *path.parents) if one.is_dir()))


def place_marker(folder: str, token: str) -> None:
    """Write a file that the other nodes look for, on rank 0.

    Raises:
        OSError, CheckpointError: the folder cannot be written.
    """
    storage_at(folder).write(f"{token}/{_MARKER}", b"pipemega doctor")


def measure(folder: str, token: str, rank: int, size: int) -> dict[str, Any]:
    """Write and read a file of `size` bytes; return JSON values for `judge`.

    Args:
        folder: exists on rank 0.
        token: folder of the marker file.
        rank: of this process, for the name of its file.
    """
    storage = storage_at(folder)
    result: dict[str, Any] = {"size": size, "shared": _sees_marker(storage, token)}
    if not result["shared"]:
        return result
    name = f"{token}/speed{rank}"
    try:
        result["free"] = storage.free_bytes()
        result["write"] = _write(storage, name, size)
        result["read"] = _read(storage, name)
    except OSError as error:
        result["error"] = _reason(error)
        result["full"] = error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        with suppress(OSError):
            storage.delete(name)
    return result


def remove_marker(folder: str, token: str) -> None:
    """Delete the folder of the marker file, on rank 0."""
    with suppress(OSError):
        storage_at(folder).delete(token)


def _sees_marker(storage: Storage, token: str) -> bool:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            if storage.exists(f"{token}/{_MARKER}"):
                return True
        time.sleep(0.1)
    return False


def _write(storage: Storage, name: str, size: int) -> float:
    """Return the bytes per second until the file is durable."""
    # Random bytes, which no file system compresses.
    chunk = os.urandom(_CHUNK)
    start = time.perf_counter()
    with storage.create(name) as stream:
        for position in range(0, size, _CHUNK):
            stream.write(chunk[: size - position])
    return size / (time.perf_counter() - start)


def _read(storage: Storage, name: str) -> float:
    """Return the bytes per second; a local file is first dropped from the page cache."""
    start, size = time.perf_counter(), 0
    with storage.open(name) as stream:
        if isinstance(storage, LocalStorage):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := stream.read(_CHUNK):
            size += len(block)
    return size / (time.perf_counter() - start)


def judge(
    folder: str,
    marker_error: str,
    results: Mapping[str, Mapping[str, Any]],
    checkpoint_bytes: int | None,
) -> Iterator[Finding]:
    """Yield the findings about the folder.

    Args:
        marker_error: error of `place_marker`; empty if the file was written.
        results: host -> what `measure` returned there.
        checkpoint_bytes: size of one checkpoint, if known.
    """
    if marker_error:
        remedy = "check its permissions and free space, or choose another one (checkpoint.save)"
        yield Finding("failed", "disk", f"{folder}: {marker_error}", remedy)
        return
    hidden = [host for host, result in results.items() if not result["shared"]]
    if hidden:
        yield Finding(
            "failed",
            "disk",
            f"{listed(hidden)} cannot see a file that rank 0 wrote into {folder}",
            "choose a checkpoint folder on a file system that all nodes share",
        )
    for host, result in results.items():
        if "error" in result:
            full = f"; {show_bytes(result['free'])} free" if result.get("free") is not None else ""
            size = show_bytes(result["size"])
            remedy = _GIVE_SPACE if result["full"] else "check the file system of this folder"
            text = f"{host} cannot write and read {size} in {folder}: {result['error']}{full}"
            yield Finding("failed", "disk", text, remedy)
    measured = {host: result for host, result in results.items() if "read" in result}
    if measured:
        yield from _judge_speed(folder, measured, checkpoint_bytes)


def _judge_speed(
    folder: str, results: Mapping[str, Mapping[str, Any]], checkpoint_bytes: int | None
) -> Iterator[Finding]:
    slowest = min(results, key=lambda host: float(results[host]["write"]))
    # All nodes wrote at the same time, so a shared disk has the sum of their speeds.
    together = sum(result["write"] for result in results.values())
    free = min((r["free"] for r in results.values() if r["free"] is not None), default=None)
    text = (
        f"{folder}: writes {show_bytes(results[slowest]['write'])}/s and reads "
        f"{show_bytes(results[slowest]['read'])}/s on the slowest node ({slowest})"
    )
    if free is not None:
        text += f", {show_bytes(free)} free"
    if checkpoint_bytes is not None:
        text += (
            f"; a checkpoint of about {show_bytes(checkpoint_bytes)} takes about "
            f"{show_time(checkpoint_bytes / together)}"
        )
    if free is not None and checkpoint_bytes is not None and free < checkpoint_bytes:
        yield Finding("failed", "disk", text, _GIVE_SPACE)
    elif results[slowest]["write"] < _SLOW:
        yield Finding(
            "warning",
            "disk",
            text,
            "slow: choose a faster folder, or save in the background (checkpoint.async)",
        )
    else:
        yield Finding("ok", "disk", text)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
