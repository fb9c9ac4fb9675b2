"""Tokenize a corpus into PREFIX.bin, .idx, .tokenizer.json and .manifest.json.

The manifest is written last and identifies the source of the other files. If it matches, the files
are reused; otherwise they are written again, each under a temporary name until it is complete.
"""

import glob
import json
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from pipemega.data.tokens.corpus import (
    Corpus,
    Prepared,
    Skipped,
    files_of,
    find_corpus,
    manifest_of,
    prefix_of,
    read_manifest,
    tokenizer_of,
)
from pipemega.data.tokens.token_files import IndexedDataset, IndexedWriter, smallest_dtype
from pipemega.data.tokens.tokenizers import EOD, FastTokenizer, Tokenizer, load_tokenizer
from pipemega.errors import DataError
from pipemega.storage.build_once import Say, atomic_path, build_once, digest_of

# Increase it to invalidate files of older versions.
FORMAT = 1
CHUNK_CHARACTERS = 1 << 20
CHUNK_DOCUMENTS = 4096
# More text hardly improves a vocabulary, and training needs memory.
TRAINING_CHARACTERS = 200_000_000
SECONDS_BETWEEN_LINES = 10.0

Chunk = tuple[list[str], int]
Encoded = tuple[npt.NDArray[np.generic], npt.NDArray[np.int32]]


def _file_id(path: Path) -> tuple[int, int]:
    """Return what two paths of one file have in common."""
    status = path.stat()
    return status.st_dev, status.st_ino


@dataclass(frozen=True)
class PrepareOptions:
    """How `prepare` reads and tokenizes a corpus.

    Attributes:
        tokenizer: see `load_tokenizer`; None trains a byte-level BPE on the corpus.
        eod: id or text of the token that ends a document; None: the tokenizer's own.
        vocab_size: vocabulary size of the trained tokenizer.
        append_eod: end each document with this token.
        json_key: key of the text in a JSON line.
        workers: number of worker processes. 0 uses the threads of the tokenizer in this process;
            a training rank needs that, since a new process would run the user's main module again.
    """

    tokenizer: str | Path | None = None
    vocab_size: int = 8192
    eod: int | str | None = None
    append_eod: bool = True
    json_key: str = "text"
    workers: int = 0


def prepare(
    inputs: str | Path | Sequence[str | Path],
    output_prefix: str | Path,
    options: PrepareOptions | None = None,
    *,
    say: Say | None = None,
    progress: bool = False,
    deadline_seconds: float = 3600.0,
) -> Prepared:
    """Tokenize a corpus, unless finished files exist; one process works, others wait.

    Args:
        inputs: see `corpus.find_corpus`.
        output_prefix: common path of the files.
        options: tokenizer, reading and workers.
        say: called with progress lines.
        progress: show a progress bar on stderr instead.
        deadline_seconds: maximum wait for another process that prepares the same files.

    Returns:
        The manifest. The files do not depend on the number of workers.

    Raises:
        DataError: no documents, an unreadable input, a tokenizer without an end-of-document token,
            a worker that died, a failed write.
    """
    options = options or PrepareOptions()
    prefix = prefix_of(output_prefix)
    corpus = find_corpus(inputs, options.json_key)
    given = None
    if options.tokenizer is not None:
        given = load_tokenizer(options.tokenizer, options.eod)
    if given is not None and options.append_eod and given.eod is None:
        raise DataError(
            f"the tokenizer {options.tokenizer} has no token {EOD!r} to end a document: name "
            "another token with data.eod_id (--eod-id), or set --no-append-eod (documents are then "
            "not separated)"
        )
    source: dict[str, object] = {
        "format": FORMAT,
        "corpus": corpus.identity,
        "tokenizer": options.vocab_size if given is None else given.digest(),
        "append eod": options.append_eod,
    }
    if options.eod is not None:  # files of earlier versions have no such key
        source["eod"] = options.eod
    job = _Job(corpus, prefix, options, given, digest_of(source), say, progress)
    job.refuse_overwriting()
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {prefix}: {error.strerror}") from error
    return build_once(
        prefix.with_name(f".{prefix.name}.lock"),
        find=job.find,
        build=job.run,
        what=f"the tokens of {corpus.name}",
        deadline_seconds=deadline_seconds,
        say=say,
    )


@dataclass(frozen=True)
class _Job:
    """One run of `prepare`."""

    corpus: Corpus
    prefix: Path
    options: PrepareOptions
    given: Tokenizer | None
    made_of: str
    say: Say | None
    progress: bool

    def refuse_overwriting(self) -> None:
        outputs = *files_of(self.prefix), manifest_of(self.prefix), tokenizer_of(self.prefix)
        existing = {_file_id(path): path for path in outputs if path.exists()}
        both = [existing[one] for one in map(_file_id, self.corpus.files) if one in existing]
        if both:
            raise DataError(
                f"the output would overwrite the input {min(both)}: choose another prefix"
            )

    def find(self) -> Prepared | None:
        """Return the manifest of existing files, if they are complete and of the same source."""
        try:
            manifest = read_manifest(self.prefix)
            if manifest is None or manifest.made_of != self.made_of:
                return None
            data = IndexedDataset(self.prefix)
            tokenizer = load_tokenizer(tokenizer_of(self.prefix))
        except DataError:
            return None
        found = len(data), data.num_tokens, tokenizer.digest()
        expected = manifest.documents, manifest.tokens, manifest.tokenizer_digest
        return manifest if found == expected else None

    def run(self) -> Prepared:
        """Train a tokenizer if none is given, tokenize the corpus, write all files."""
        started = time.monotonic()
        # Files of a killed run: this process holds the lock, so no other process writes them.
        for stale in self.prefix.parent.glob(f".{glob.escape(self.prefix.name)}.*.tmp"):
            stale.unlink(missing_ok=True)
        tokenizer = self.given or self._train(self.options.vocab_size)
        dtype = smallest_dtype(tokenizer.vocab_size)
        skipped = Skipped()
        documents = tokens = 0
        with (
            atomic_path(tokenizer_of(self.prefix)) as tokenizer_path,
            IndexedWriter(self.prefix, dtype) as writer,
        ):
            tokenizer_path.write_text(tokenizer.to_json(), encoding="utf-8")
            chunks = self._reported(_chunks(self.corpus, skipped))
            end = tokenizer.eod if self.options.append_eod else None
            for ids, lengths in self._encode(chunks, tokenizer_path, end, dtype.name):
                writer.add_documents(ids, lengths)
                documents, tokens = documents + len(lengths), tokens + len(ids)
            if not documents:
                raise DataError(f"corpus {self.corpus.name} contains no text (skipped: {skipped})")
            # The old manifest does not describe the new files.
            manifest_of(self.prefix).unlink(missing_ok=True)
        manifest = Prepared(
            made_of=self.made_of,
            corpus=self.corpus.name,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            append_eod=self.options.append_eod,
            documents=documents,
            tokens=tokens,
            dtype=dtype.name,
            tokenizer_digest=tokenizer.digest(),
        )
        with atomic_path(manifest_of(self.prefix)) as path:
            path.write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
        omitted = f" (skipped: {skipped})" if skipped.empty or skipped.undecodable else ""
        self._tell(
            f"prepared {self.prefix} in {time.monotonic() - started:.1f} s: "
            f"{manifest.describe()}{omitted}"
        )
        return manifest

    def _train(self, vocab_size: int) -> Tokenizer:
        self._tell(f"training a tokenizer with {vocab_size:,} tokens on {self.corpus.name}")
        tokenizer = FastTokenizer.train(self._training_texts(), vocab_size)
        if self.options.eod is not None:
            tokenizer.set_eod(self.options.eod)
        return tokenizer

    def _training_texts(self) -> Iterator[str]:
        remaining = TRAINING_CHARACTERS
        for text, _ in self.corpus.documents(Skipped()):
            yield text[:remaining]
            remaining -= len(text)
            if remaining <= 0:
                self._tell(f"training uses the first {TRAINING_CHARACTERS:,} characters")
                return

    def _encode(
        self, chunks: Iterable[Chunk], tokenizer: Path, end: int | None, dtype: str
    ) -> Iterator[Encoded]:
        """Yield the token arrays of each chunk, in corpus order."""
        workers = self.options.workers
        if workers < 1:
            for texts, _ in chunks:
                yield encode_chunk(tokenizer, texts, end, dtype)
            return
        # Spawned, so that a worker inherits no threads and locks.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread)
        running: deque[Future[Encoded]] = deque()
        try:
            for texts, _ in chunks:
                running.append(pool.submit(encode_chunk, tokenizer, texts, end, dtype))
                # A bounded queue: the corpus may be larger than memory.
                if len(running) > 2 * workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                f"a worker process that tokenized {self.corpus.name} was killed, perhaps because "
                "memory ran out: use fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _reported(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks, and report progress by a bar or by lines."""
        total, done = self.corpus.num_bytes, 0
        reported = time.monotonic()
        bar = tqdm(
            total=total, unit="B", unit_scale=True, desc="tokenizing", disable=not self.progress,
            file=sys.stderr,
        )  # fmt: skip
        with bar:
            for chunk in chunks:
                yield chunk
                # `total` has the compressed size of .gz files; reading yields more bytes.
                step = min(chunk[1], total - done)
                done += step
                bar.update(step)
                if not self.progress and time.monotonic() - reported > SECONDS_BETWEEN_LINES:
                    reported = time.monotonic()
                    self._tell(f"tokenized {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    def _tell(self, line: str) -> None:
        if self.say is not None:
            self.say(line)


def _chunks(corpus: Corpus, skipped: Skipped) -> Iterator[Chunk]:
    """Yield documents in chunks of about a million characters, with the bytes read for each."""
    texts: list[str] = []
    characters = read = 0
    for text, size in corpus.documents(skipped):
        texts.append(text)
        characters += len(text)
        read += size
        if characters >= CHUNK_CHARACTERS or len(texts) >= CHUNK_DOCUMENTS:
            yield texts, read
            texts, characters, read = [], 0, 0
    if texts:
        yield texts, read


def encode_chunk(path: Path, texts: list[str], end: int | None, dtype: str) -> Encoded:
    """Return (tokens of all texts in one array, number of tokens of each); runs in a worker.

    Args:
        end: id to append to each text; None: none.
    """
    tokenizer = _tokenizer_at(path)
    ends = np.array([] if end is None else [end], dtype=np.int64)
    arrays = [np.concatenate([ids, ends]) for ids in tokenizer.encode_batch(texts)]
    lengths = np.array([len(array) for array in arrays], dtype=np.int32)
    return np.concatenate(arrays).astype(dtype), lengths


@lru_cache(maxsize=1)
def _tokenizer_at(path: Path) -> Tokenizer:
    """Load once per worker; the path is temporary and never reused."""
    return load_tokenizer(path)


def _one_thread() -> None:
    """Initialise a worker: each uses one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
