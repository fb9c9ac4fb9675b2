"""A corpus becomes token files: PREFIX.bin, .idx, .tokenizer.json and .manifest.json.

The manifest comes last and says what the others were made of. While it matches, and the files are
as it says, they are used as they are; otherwise they are made again, each under a temporary name
until it is whole.
"""

import glob
import hashlib
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

from pipemega.data.caching import Say, atomic_path, build_once, digest_of
from pipemega.data.corpus import Corpus, Skipped, find_corpus
from pipemega.data.indexed import IndexedDataset, IndexedWriter, files_of, prefix_of, smallest_dtype
from pipemega.data.tokenizer import EOD, TextTokenizer
from pipemega.errors import DataError

# A change of this number makes old prepared files stale.
FORMAT = 1
CHUNK_CHARACTERS = 1 << 20
CHUNK_DOCUMENTS = 4096
# A vocabulary learns little from more text than this, and training takes memory.
TRAINING_CHARACTERS = 200_000_000
SECONDS_BETWEEN_LINES = 10.0

Chunk = tuple[list[str], int]
Encoded = tuple[npt.NDArray[np.generic], npt.NDArray[np.int32]]


@dataclass(frozen=True)
class Prepared:
    """The manifest of prepared files: what they were made of, and what came out.

    Attributes:
        made_of: digest of corpus, tokenizer and settings.
        corpus: the corpus in words.
        vocab_size: of the tokenizer.
        eod: the id that ends a document, or None.
        append_eod: whether each document ends with it.
        documents, tokens: how many came out.
        dtype: of the tokens.
        tokenizer_digest: of PREFIX.tokenizer.json.
    """

    made_of: str
    corpus: str
    vocab_size: int
    eod: int | None
    append_eod: bool
    documents: int
    tokens: int
    dtype: str
    tokenizer_digest: str

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens ({self.dtype}), "
            f"vocabulary {self.vocab_size:,}"
        )


def manifest_of(prefix: Path) -> Path:
    """Where the manifest of a prefix is."""
    return prefix.with_name(prefix.name + ".manifest.json")


def tokenizer_of(prefix: Path) -> Path:
    """Where the tokenizer that made a prefix is."""
    return prefix.with_name(prefix.name + ".tokenizer.json")


def read_manifest(prefix: str | Path) -> Prepared | None:
    """The manifest beside a prefix; None if there is none, as with files that Megatron wrote.

    Raises:
        DataError: there is one, and it is damaged.
    """
    path = manifest_of(prefix_of(prefix))
    try:
        return Prepared(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); remove it and prepare again") from error


def prepare(
    inputs: str | Path | Sequence[str | Path],
    output_prefix: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 8192,
    append_eod: bool = True,
    json_key: str = "text",
    workers: int = 0,
    say: Say | None = None,
    progress: bool = False,
    deadline_seconds: float = 3600.0,
) -> Prepared:
    """Tokenize a corpus, unless that was done before; one process does it, others wait.

    Args:
        inputs: see `corpus.find_corpus`.
        output_prefix: the files' common path.
        tokenizer: a tokenizer.json; None trains a byte-level BPE on the corpus.
        vocab_size: of the one that is trained.
        append_eod: end each document with "<|endoftext|>".
        json_key: where a JSON line holds its text.
        workers: processes that tokenize; 0 uses the tokenizer's own threads in this process,
            which is right inside of a training rank: starting a process would run the user's
            main module again.
        say: takes lines about the progress.
        progress: show a bar instead, on stderr.
        deadline_seconds: how long to wait for another process that prepares the same.

    Returns:
        The manifest; the files do not depend on the number of workers.

    Raises:
        DataError: no documents, an unreadable input, a tokenizer without an end of document, a
            worker that died, a disk that refuses.
    """
    prefix = prefix_of(output_prefix)
    corpus = find_corpus(inputs, json_key)
    given = None if tokenizer is None else TextTokenizer.load(tokenizer)
    if given is not None and append_eod and given.eod is None:
        raise DataError(
            f"the tokenizer {tokenizer} has no token {EOD!r} to end a document with: add one, or "
            "go without (--no-append-eod), and then documents run into each other"
        )
    made_of = digest_of(
        {
            "format": FORMAT,
            "corpus": corpus.identity,
            "tokenizer": vocab_size if given is None else digest_of_tokenizer(given),
            "append eod": append_eod,
        }
    )
    _Job.refuse_overwriting(corpus, prefix)
    job = _Job(corpus, prefix, made_of, append_eod, workers, say, progress)
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {prefix}: {error.strerror}") from error
    return build_once(
        prefix.with_name(f".{prefix.name}.lock"),
        find=job.find,
        build=lambda: job.run(given, vocab_size),
        what=f"the tokens of {corpus.name}",
        deadline_seconds=deadline_seconds,
        say=say,
    )


@dataclass(frozen=True)
class _Job:
    """One preparation."""

    corpus: Corpus
    prefix: Path
    made_of: str
    append_eod: bool
    workers: int
    say: Say | None
    progress: bool

    @staticmethod
    def refuse_overwriting(corpus: Corpus, prefix: Path) -> None:
        outputs = {*files_of(prefix), manifest_of(prefix), tokenizer_of(prefix)}
        both = {path.resolve() for path in outputs} & {path.resolve() for path in corpus.files}
        if both:
            raise DataError(f"the output would overwrite the input {min(both)}: name another one")

    def find(self) -> Prepared | None:
        """What was prepared before, if it is of the same corpus and whole."""
        try:
            manifest = read_manifest(self.prefix)
        except DataError:
            return None
        if manifest is None or manifest.made_of != self.made_of:
            return None
        try:
            data = IndexedDataset(self.prefix)
            tokenizer = TextTokenizer.load(tokenizer_of(self.prefix))
        except DataError:
            return None
        same = (len(data), data.num_tokens) == (manifest.documents, manifest.tokens)
        return (
            manifest
            if same and digest_of_tokenizer(tokenizer) == manifest.tokenizer_digest
            else None
        )

    def run(self, given: TextTokenizer | None, vocab_size: int) -> Prepared:
        """Train if need be, tokenize, write."""
        started = time.monotonic()
        # What a killed run left; the lock is ours, so nobody writes them any more.
        for left in self.prefix.parent.glob(f".{glob.escape(self.prefix.name)}.*.tmp"):
            left.unlink(missing_ok=True)
        tokenizer = given or self._train(vocab_size)
        dtype = smallest_dtype(tokenizer.vocab_size)
        skipped = Skipped()
        documents = tokens = 0
        with (
            atomic_path(tokenizer_of(self.prefix)) as tokenizer_path,
            IndexedWriter(self.prefix, dtype) as writer,
        ):
            tokenizer_path.write_text(tokenizer.to_json(), encoding="utf-8")
            chunks = self._reported(_chunks(self.corpus, skipped))
            for ids, lengths in self._encode(chunks, tokenizer_path, dtype.name):
                writer.add_documents(ids, lengths)
                documents, tokens = documents + len(lengths), tokens + len(ids)
            if not documents:
                raise DataError(f"the corpus {self.corpus.name} holds no text (left out {skipped})")
            # The old manifest does not speak of the files that now take their names.
            manifest_of(self.prefix).unlink(missing_ok=True)
        manifest = Prepared(
            made_of=self.made_of,
            corpus=self.corpus.name,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            append_eod=self.append_eod,
            documents=documents,
            tokens=tokens,
            dtype=dtype.name,
            tokenizer_digest=digest_of_tokenizer(tokenizer),
        )
        with atomic_path(manifest_of(self.prefix)) as path:
            path.write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
        left_out = f" (left out {skipped})" if skipped.empty or skipped.undecodable else ""
        self._tell(
            f"prepared {self.prefix} in {time.monotonic() - started:.1f} s: "
            f"{manifest.describe()}{left_out}"
        )
        return manifest

    def _train(self, vocab_size: int) -> TextTokenizer:
        self._tell(f"training a vocabulary of {vocab_size:,} on {self.corpus.name}")
        return TextTokenizer.train(self._training_texts(), vocab_size)

    def _training_texts(self) -> Iterator[str]:
        room = TRAINING_CHARACTERS
        for text, _ in self.corpus.documents(Skipped()):
            yield text[:room]
            room -= len(text)
            if room <= 0:
                self._tell(f"its first {TRAINING_CHARACTERS:,} letters are enough for that")
                return

    def _encode(self, chunks: Iterable[Chunk], tokenizer: Path, dtype: str) -> Iterator[Encoded]:
        """Token arrays chunk by chunk, in the order of the corpus."""
        if self.workers < 1:
            for texts, _ in chunks:
                yield encode_chunk(tokenizer, texts, self.append_eod, dtype)
            return
        # Spawned, so that a worker has none of this process's threads and locks.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_one_thread)
        running: deque[Future[Encoded]] = deque()
        try:
            for texts, _ in chunks:
                running.append(pool.submit(encode_chunk, tokenizer, texts, self.append_eod, dtype))
                # A bounded number on the way: the corpus may be larger than memory.
                if len(running) > 2 * self.workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                f"a worker that tokenized {self.corpus.name} was ended from outside, perhaps for "
                "want of memory: try fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _reported(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The chunks, with a bar or now and then a line."""
        total, done = self.corpus.num_bytes, 0
        spoke = time.monotonic()
        bar = tqdm(
            total=total, unit="B", unit_scale=True, desc="tokenizing", disable=not self.progress,
            file=sys.stderr,
        )  # fmt: skip
        with bar:
            for chunk in chunks:
                yield chunk
                # Of a packed file we know the packed size alone, and read more than that.
                step = min(chunk[1], total - done)
                done += step
                bar.update(step)
                if not self.progress and time.monotonic() - spoke > SECONDS_BETWEEN_LINES:
                    spoke = time.monotonic()
                    self._tell(f"tokenized {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    def _tell(self, line: str) -> None:
        if self.say is not None:
            self.say(line)


def _chunks(corpus: Corpus, skipped: Skipped) -> Iterator[Chunk]:
    """Documents in portions of about a million letters, with the bytes read for each."""
    texts: list[str] = []
    letters = read = 0
    for text, size in corpus.documents(skipped):
        texts.append(text)
        letters += len(text)
        read += size
        if letters >= CHUNK_CHARACTERS or len(texts) >= CHUNK_DOCUMENTS:
            yield texts, read
            texts, letters, read = [], 0, 0
    if texts:
        yield texts, read


def encode_chunk(path: Path, texts: list[str], append_eod: bool, dtype: str) -> Encoded:
    """Texts -> (their tokens in one array, tokens of each); runs in a worker."""
    tokenizer = _tokenizer_at(path)
    end = np.array([tokenizer.eod] if append_eod else [], dtype=np.int64)
    arrays = [np.concatenate([ids, end]) for ids in tokenizer.encode_batch(texts)]
    lengths = np.array([len(array) for array in arrays], dtype=np.int32)
    return np.concatenate(arrays).astype(dtype), lengths


@lru_cache(maxsize=1)
def _tokenizer_at(path: Path) -> TextTokenizer:
    """Loaded once in each worker; the path is a temporary one, and never used twice."""
    return TextTokenizer.load(path)


def _one_thread() -> None:
    """In a worker: the workers are the parallelism, so each keeps to one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def digest_of_tokenizer(tokenizer: TextTokenizer) -> str:
    """Stands for the tokenizer, wherever its file lies."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
