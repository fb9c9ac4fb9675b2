"""The manifest's checksums find damage, also those of earlier formats."""

import hashlib
import zlib

import pytest

from pipemega.checkpoint import layout, manifest
from pipemega.checkpoint.manifest import (
    ChecksumWriter,
    FileEntry,
    dump_state,
    file_damage,
    parse_state,
)
from pipemega.storage.filesystem import LocalStorage


@pytest.mark.parametrize("crc32", [zlib.crc32, manifest.crc32], ids=["zlib", "installed"])
def test_a_flipped_bit_in_any_piece_of_a_large_file_is_found(tmp_path, monkeypatch, crc32):
    """Where isal is installed, its checksums are those of zlib."""
    monkeypatch.setattr(manifest, "crc32", crc32)
    monkeypatch.setattr(manifest, "_PIECE", 1 << 10)
    monkeypatch.setattr(manifest, "_LARGE_WRITE", 1 << 12)
    storage, data = LocalStorage(tmp_path), bytearray(range(256)) * 100
    writer = ChecksumWriter(storage, "a")
    with writer.create("file") as stream:
        for start, stop in ((0, 100), (100, 5000), (5000, 5001), (5001, len(data))):
            stream.write(data[start:stop])
    entry = writer.files["file"]
    assert entry.checksum == "crc32:" + "".join(
        f"{zlib.crc32(data[start : start + 1024]):08x}" for start in range(0, len(data), 1024)
    )
    read: list[int] = []
    assert file_damage(storage, "a/file", entry, checksum=True, progress=read.append) is None
    assert sum(read) == len(data)
    for place in (0, 1023, 1024, 12_345, len(data) - 1):
        data[place] ^= 1
        (tmp_path / "a" / "file").write_bytes(data)
        damage = file_damage(storage, "a/file", entry, checksum=True)
        assert damage is not None
        assert "its CRC-32 differs from the saved one" in damage
        data[place] ^= 1


def test_the_sha_256_of_a_checkpoint_of_format_2_is_still_compared(tmp_path):
    storage = LocalStorage(tmp_path)
    folder = layout.begin_save(storage, "a")
    writer = ChecksumWriter(storage, folder)
    writer.write("tensors/file", b"text")
    layout.commit_save(storage, "a", folder, {}, writer.files)
    file, state = tmp_path / "a" / "tensors" / "file", tmp_path / "a" / "state.json"
    files = {"tensors/file": FileEntry(4, hashlib.sha256(b"text").hexdigest())}
    earlier = {**parse_state(state.read_bytes()), "format": 2, "files": files}
    state.write_bytes(dump_state(earlier))
    (entry,) = layout.find_checkpoint(storage, "a").files.values()
    assert file_damage(storage, "a/tensors/file", entry, checksum=True) is None
    file.write_text("next")
    damage = file_damage(storage, "a/tensors/file", entry, checksum=True)
    assert damage is not None
    assert "its SHA-256 differs from the saved one" in damage
