"""Read and write Megatron's token files, byte for byte: PREFIX.bin and PREFIX.idx.

    .bin    the tokens of all sequences, concatenated, little endian

    .idx    "MMIDIDX" 00 00 | version 1 u64 | dtype code u8 | sequences S u64 | D u64
            lengths    int32 [S]      number of tokens of each sequence
            pointers   int64 [S]      its start in .bin, in bytes
            documents  int64 [D]      bounds in sequences: starts with 0, ends with S
            modes      int8  [S]      only in multimodal files

Source: the format of Megatron-LM's core/datasets/indexed_dataset.py.

Files that are open during a whole run, and may be truncated meanwhile.

Reading a memory map beyond the end of its file kills the process (SIGBUS) without a Python error.
So each reader first checks the length of the file (0.3 us), and tokens are read with pread instead
of a map, so that a failing file system raises an error. Removing or replacing a file is harmless:
an open file keeps its content.
"""

import hashlib
import os
import struct
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipemega.data.tokens.corpus import files_of, prefix_of
from pipemega.errors import DataError
from pipemega.storage.build_once import atomic_path

Array = npt.NDArray[np.generic]


class Mappings:
    """The files of memory-mapped arrays.

    Pickled to another process, the arrays are copies and need no check.

    Args:
        arrays: results of `np.memmap` or `np.load`; arrays in memory are ignored.
    """

    def __init__(self, *arrays: Any) -> None:
        mapped = [array for array in arrays if isinstance(array, np.memmap)]
        self._files = [
            (array.filename, array._mmap.size, array.offset + array.nbytes)  # type: ignore[attr-defined]
            for array in mapped
        ]

    def refuse_shortened(self) -> None:
        """Raise DataError if a file is now shorter than its mapped part."""
        for path, size_of, needed in self._files:
            if size_of() < needed:
                raise _shortened(path, size_of(), needed)

    def __reduce__(self) -> tuple[type["Mappings"], tuple[()]]:
        return Mappings, ()


class TokenFile:
    """A file of numbers with random access from any number of threads.

    Args:
        path: the file; stays open.
        dtype: dtype of its numbers.

    Raises:
        DataError: the file cannot be opened. While reading: it was truncated, or the disk fails.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype = path, dtype
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"cannot open {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._handle)
        self.num_bytes = os.fstat(self._handle).st_size

    def read(self, start: int, stop: int) -> Array:
        """Return the numbers [start, stop), up to the length of the file when it was opened."""
        first = start * self.dtype.itemsize
        last = min(stop * self.dtype.itemsize, self.num_bytes)
        try:
            raw = os.pread(self._handle, max(last - first, 0), first)
            # pread returns at most 2 GiB at once.
            while len(raw) < last - first:
                more = os.pread(self._handle, last - first - len(raw), first + len(raw))
                if not more:
                    size = os.fstat(self._handle).st_size
                    raise _shortened(self.path, size, self.num_bytes)
                raw += more
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from error
        return np.frombuffer(raw, dtype=self.dtype)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Array:
        """Return the numbers of several ranges [start, stop), one after the other."""
        size, handle, count = self.dtype.itemsize, self._handle, 0
        parts = []
        try:
            for start, stop in ranges:
                parts.append(os.pread(handle, (stop - start) * size, start * size))
                count += stop - start
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from error
        # Of one part, this is no copy.
        raw = b"".join(parts)
        if len(raw) != count * size:
            # The file ends here, or it became shorter: `read` tells which.
            return np.concatenate([self.read(*each) for each in ranges])
        return np.frombuffer(raw, dtype=self.dtype)

    def mapped(self) -> Array:
        """Return a memory map of the whole file, for sequential readers; no copy."""
        if not self.num_bytes:
            # An empty file cannot be mapped.
            return np.empty(0, dtype=self.dtype)
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self.num_bytes:
            raise _shortened(self.path, size, self.num_bytes)
        return np.memmap(self.path, dtype=self.dtype, mode="r").view(np.ndarray)

    def __reduce__(self) -> tuple[type["TokenFile"], tuple[Path, np.dtype[Any]]]:
        return TokenFile, (self.path, self.dtype)


def _shortened(path: str | os.PathLike[str] | None, size: int, needed: int) -> DataError:
    return DataError(
        f"{path} became shorter while it was in use: {size} bytes are left of {needed}; write new "
        "data under another name, or remove the old file first"
    )


Tokens = npt.NDArray[np.generic]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_DTYPE_NAMES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
DTYPES = dict(enumerate(_DTYPE_NAMES, start=1))
# Megatron's bound, slightly below the range of uint16.
UINT16_VOCABULARY = 65500
FINGERPRINT_BYTES = 1 << 20


def smallest_dtype(vocab_size: int) -> np.dtype[np.generic]:
    """Return the dtype in which Megatron stores tokens of this vocabulary: uint16 or int32."""
    return np.dtype("uint16" if vocab_size < UINT16_VOCABULARY else "int32")


class IndexedDataset:
    """The sequences of PREFIX.bin and PREFIX.idx, with random access.

    Args:
        prefix: common path of the files, without .bin or .idx (or with one of them).

    Attributes:
        lengths: int32 [S].
        pointers: int64 [S], in bytes.
        document_indices: int64 [D].

    Raises:
        DataError: a file is missing, of another format, truncated, or does not match the other
            one; the message names both files. While reading: a file was truncated, or the disk
            fails.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = prefix_of(prefix)
        self.bin_path, self.idx_path = files_of(self.prefix)
        self._refuse_missing()
        with open(self.idx_path, "rb") as file:
            code, num_sequences, num_bounds = self._read_header(file.read(HEADER.size))
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        self._map_index(num_sequences, num_bounds)
        self._refuse_odd_bounds()
        self._tokens = TokenFile(self.bin_path, self.dtype)
        self._refuse_odd_size(self._tokens.num_bytes)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents; each has one or more sequences."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return self._tokens.num_bytes // int(self.dtype.itemsize)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Return tokens [offset, offset + length) of one sequence; by default up to its end."""
        self._index.refuse_shortened()
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        stop = start + int(self.lengths[sequence])
        start += offset
        return self._tokens.read(start, stop if length is None else min(start + length, stop))

    def joined(self, sequences: Sequence[int], start: int, last_length: int) -> Tokens:
        """Return the tokens of several sequences, one after the other.

        Args:
            start: the first token of the first sequence.
            last_length: the most tokens of the last sequence, from its start.
        """
        self._index.refuse_shortened()
        pointers, lengths, size = self.pointers, self.lengths, self.dtype.itemsize
        ranges = []
        for sequence in sequences:
            begin = pointers.item(sequence) // size
            ranges.append((begin, begin + lengths.item(sequence)))
        begin, end = ranges[-1]
        ranges[-1] = begin, min(begin + last_length, end)
        begin, end = ranges[0]
        ranges[0] = begin + start, end
        return self._tokens.read_ranges(ranges)

    def span(self, first: int, last: int) -> Tokens:
        """Return the tokens of the sequences [first, last) in file order; no copy."""
        if first >= last:
            return np.empty(0, dtype=self.dtype)
        self._index.refuse_shortened()
        start = int(self.pointers[first]) // self.dtype.itemsize
        stop = int(self.pointers[last - 1]) // self.dtype.itemsize + int(self.lengths[last - 1])
        return self._tokens.mapped()[start:stop]

    def document_of(self, sequence: int) -> int:
        """Return the document of a sequence."""
        return int(np.searchsorted(self.document_indices, sequence, side="right")) - 1

    def fingerprint(self) -> str:
        """Return 32 hex digits that identify the content, independent of the path.

        Computed from the sizes and from both ends of both files: reading a large corpus would take
        minutes, and a changed corpus has other sizes or other ends.
        """
        digest = hashlib.sha256()
        for path in (self.idx_path, self.bin_path):
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with open(path, "rb") as file:
                digest.update(file.read(FINGERPRINT_BYTES))
                file.seek(max(0, size - FINGERPRINT_BYTES))
                digest.update(file.read(FINGERPRINT_BYTES))
        return digest.hexdigest()[:32]

    def _refuse_missing(self) -> None:
        missing = [path for path in (self.bin_path, self.idx_path) if not path.is_file()]
        if len(missing) == 2:
            raise DataError(
                f"neither {self.bin_path} nor {self.idx_path} exists; a data path is their common "
                "prefix; 'pipemega data prepare' writes both"
            )
        if missing:
            existing = self.idx_path if missing[0] == self.bin_path else self.bin_path
            raise DataError(
                f"{missing[0]} is missing, but {existing} exists: copy both files, or prepare them "
                "again"
            )

    def _read_header(self, raw: bytes) -> tuple[int, int, int]:
        if not raw.startswith(MAGIC):
            raise DataError(
                f"{self.idx_path} is not a Megatron index of {self.bin_path}: it starts with "
                f"{raw[: len(MAGIC)]!r} instead of {MAGIC!r}"
            )
        if len(raw) < HEADER.size:
            raise DataError(
                f"{self.idx_path} is truncated: it has {len(raw)} bytes, and its header alone has "
                f"{HEADER.size}; prepare it and {self.bin_path} again"
            )
        _, version, code, num_sequences, num_bounds = HEADER.unpack(raw)
        if version != VERSION:
            raise DataError(
                f"{self.idx_path} is a Megatron index of version {version}, but only version "
                f"{VERSION} is supported; prepare it and {self.bin_path} again"
            )
        if code not in DTYPES:
            known = ", ".join(f"{key} {name}" for key, name in DTYPES.items())
            raise DataError(
                f"{self.idx_path} has dtype code {code} for {self.bin_path}; known are {known}; "
                "prepare both again"
            )
        return code, num_sequences, num_bounds

    def _map_index(self, num_sequences: int, num_bounds: int) -> None:
        bare = HEADER.size + 12 * num_sequences + 8 * num_bounds
        size = self.idx_path.stat().st_size
        # Multimodal files have one more byte for each sequence.
        if size not in (bare, bare + num_sequences):
            state = "is truncated" if size < bare else "is too long"
            raise DataError(
                f"{self.idx_path} {state}: {num_sequences} sequences and {num_bounds} document "
                f"bounds take {bare} bytes, but it has {size}; prepare it and {self.bin_path} again"
            )
        mapped = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        self._index, raw = Mappings(mapped), mapped.view(np.ndarray)
        at = HEADER.size
        self.lengths: npt.NDArray[np.int32] = raw[at : at + 4 * num_sequences].view("<i4")
        at += 4 * num_sequences
        self.pointers: npt.NDArray[np.int64] = raw[at : at + 8 * num_sequences].view("<i8")
        at += 8 * num_sequences
        self.document_indices: npt.NDArray[np.int64] = raw[at : at + 8 * num_bounds].view("<i8")

    def _refuse_odd_bounds(self) -> None:
        bounds, last = self.document_indices, len(self.lengths)
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != last or np.any(np.diff(bounds) < 0):
            wrong = np.flatnonzero(np.diff(bounds) < 0)
            where = f"; they decrease after document {wrong[0]}" if len(wrong) else ""
            ends = f"from {bounds[0]} to {bounds[-1]}" if len(bounds) else "empty"
            raise DataError(
                f"the document bounds of {self.idx_path} must rise from 0 to its {last} sequences, "
                f"but they are {ends}{where}; prepare it and {self.bin_path} again"
            )

    def _refuse_odd_size(self, size: int) -> None:
        needed = 0
        if len(self.lengths):
            if self.lengths.min() < 0 or self.pointers.min() < 0:
                raise DataError(
                    f"{self.idx_path} contains a negative length or offset; "
                    f"prepare it and {self.bin_path} again"
                )
            ends = self.pointers + self.lengths * np.int64(self.dtype.itemsize)
            # A pointer near the maximum of int64 would give a negative end.
            needed = max(int(ends.max()), int(self.pointers.max()))
        if size != needed:
            state = "shorter" if size < needed else "longer"
            raise DataError(
                f"{self.bin_path} is {state} than {self.idx_path} requires: it has {size} bytes, "
                f"the index describes {needed}; the two files do not belong together, or one was "
                "truncated"
            )


class IndexedWriter:
    """Write PREFIX.bin and PREFIX.idx; both appear, complete, when the block ends without error.

        with IndexedWriter(prefix, "uint16") as writer:
            writer.add_document(tokens)

    Args:
        prefix: common path of the files; missing folders are created.
        dtype: one of `DTYPES`; `smallest_dtype(vocab_size)` for text.

    Raises:
        DataError: a token does not fit the dtype, lengths do not add up, or the disk refuses a
            write; existing files under the final names are then unchanged.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix = prefix_of(prefix)
        self.bin_path, self.idx_path = files_of(self.prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype.name not in _DTYPE_NAMES:
            known = ", ".join(_DTYPE_NAMES)
            raise DataError(f"tokens cannot be stored as {dtype}; known are {known}")
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._documents: list[npt.NDArray[np.int64]] = []
        self._num_sequences = 0
        # Exits run in reverse order: write the index, close and rename .bin, rename .idx.
        with ExitStack() as files:
            self._idx_draft = files.enter_context(atomic_path(self.idx_path))
            bin_draft = files.enter_context(atomic_path(self.bin_path))
            self._bin = files.enter_context(open(bin_draft, "wb"))
            files.push(self._write_index)
            self._files = files.pop_all()

    def add_document(
        self, tokens: npt.ArrayLike, sequence_lengths: Sequence[int] | None = None
    ) -> None:
        """Append one document: [tokens], cut into sequences of the given lengths (one if None)."""
        array = np.asarray(tokens)
        lengths = [array.size] if sequence_lengths is None else list(sequence_lengths)
        self._append(array, np.asarray(lengths, dtype=np.int64))
        self._documents.append(np.array([self._num_sequences], dtype=np.int64))

    def add_documents(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Append documents of one sequence each: all tokens in one array, and the lengths."""
        lengths = np.asarray(lengths, dtype=np.int64)
        first = self._num_sequences
        self._append(np.asarray(tokens), lengths)
        self._documents.append(np.arange(first + 1, first + 1 + len(lengths), dtype=np.int64))

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def _append(self, tokens: Tokens, lengths: npt.NDArray[np.int64]) -> None:
        if int(lengths.sum()) != tokens.size or (lengths.size and lengths.min() < 0):
            raise DataError(
                f"{tokens.size} tokens were given for {self.bin_path}, but the sequence lengths "
                f"add up to {int(lengths.sum())}"
            )
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(
                f"a sequence of {int(lengths.max())} tokens is too long for {self.idx_path}, which "
                f"counts to {np.iinfo(np.int32).max}: cut it into several"
            )
        self._refuse_unfit(tokens)
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._lengths.append(lengths.astype(np.int32))
        self._num_sequences += len(lengths)

    def _refuse_unfit(self, tokens: Tokens) -> None:
        if self.dtype.kind == "f" or not tokens.size or tokens.dtype == self.dtype:
            return
        low, high = int(tokens.min()), int(tokens.max())
        bounds = np.iinfo(self.dtype)
        if low < bounds.min or high > bounds.max:
            raise DataError(
                f"tokens from {low} to {high} do not fit {self.bin_path}, whose dtype "
                f"{self.dtype.name} holds {bounds.min} to {bounds.max}"
            )

    def _write_index(self, error_type: object, *_: object) -> None:
        """Write the temporary index, unless the block raised."""
        if error_type is not None:
            return
        lengths = np.concatenate([np.empty(0, np.int32), *self._lengths])
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1] * np.int64(self.dtype.itemsize), out=pointers[1:])
        documents = np.concatenate([np.zeros(1, np.int64), *self._documents])
        code = _DTYPE_NAMES.index(self.dtype.name) + 1
        with open(self._idx_draft, "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
            file.write(lengths.astype("<i4").data)
            file.write(pointers.astype("<i8").data)
            file.write(documents.astype("<i8").data)
        # An old index next to a new .bin of equal size would be read without an error; a .bin
        # without an index is refused.
        self.idx_path.unlink(missing_ok=True)
