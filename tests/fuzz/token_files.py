"""Coverage-guided fuzzing of the reader of token files.

    make fuzz                                            runs it for one minute
    python -m tests.fuzz.token_files -max_total_time=600

Needs atheris (pip install atheris) and accepts libFuzzer's options. It stops at the first input
that gives neither data nor a DataError with the file names, and writes that input to a file.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["pipemega.data"]):
    from pipemega.data.tokens.token_files import DTYPES, IndexedDataset, IndexedWriter, files_of

from pipemega.errors import DataError

# The first two bytes of an input are the length of .idx; then come .idx and .bin.
LENGTH = 2


def packed(prefix: Path) -> bytes:
    """Return a pair of files as one input."""
    bin_path, idx_path = files_of(prefix)
    idx = idx_path.read_bytes()
    return len(idx).to_bytes(LENGTH, "little") + idx + bin_path.read_bytes()


def read(prefix: Path, raw: bytes) -> None:
    """Write the pair of files that `raw` encodes, and read all of it."""
    size = int.from_bytes(raw[:LENGTH], "little")
    bin_path, idx_path = files_of(prefix)
    idx_path.write_bytes(raw[LENGTH : LENGTH + size])
    bin_path.write_bytes(raw[LENGTH + size :])
    try:
        data = IndexedDataset(prefix)
        tokens = 0
        for sequence in range(len(data)):
            tokens += len(data.get(sequence))
            assert len(data.get(sequence, 1, 2)) <= 2
            assert 0 <= data.document_of(sequence) < data.num_documents
        assert tokens == int(data.lengths.sum(dtype="int64"))
        assert len(data.span(0, len(data))) <= data.num_tokens
        data.fingerprint()
    except DataError as error:
        if str(prefix) not in str(error):
            raise AssertionError(f"an error without a name: {error}") from error


def write_seeds(folder: Path) -> None:
    for dtype in DTYPES.values():
        prefix = folder / dtype
        with IndexedWriter(prefix, dtype) as writer:
            writer.add_document([1, 2, 3], [1, 2])
            writer.add_document([4])
        raw = packed(prefix)
        for path in files_of(prefix):
            path.unlink()
        prefix.write_bytes(raw)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pipemega-fuzz-", dir=_memory()))
    try:
        seeds = folder / "seeds"
        write_seeds(seeds)
        arguments = [sys.argv[0], *sys.argv[1:], "-max_len=400", str(seeds)]
        atheris.Setup(arguments, lambda raw: read(folder / "pair", raw))
        atheris.Fuzz()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _memory() -> str | None:
    """Files that are written a thousand times a second belong in memory."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()
