"""Load the tokenizer that `data.tokenizer` names.

Tokenizers of the `tokenizers` package: tokenizer.json, vocab.json with merges.txt, trained.

Tokenizers of tiktoken, from files that are on this machine.

Tokenizers of SentencePiece: a `.model` file.

Text to token ids and back, with any tokenizer.
"""

import base64
import copy
import hashlib
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pipemega.errors import ConfigError, DataError
from pipemega.lazy_imports import deferred

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = deferred("numpy")

EOD = "<|endoftext|>"

# Of a key that needs it.
UNKNOWN_EOD = (
    "data.{key} needs the end-of-document id, but no tokenizer defines one: set data.tokenizer, or "
    "data.eod_id to the id"
)


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        vocab_size: one more than the largest id.
        eod: id of the token that ends a document; None if there is none.
    """

    vocab_size: int
    eod: int | None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text; the text of a special token has no special meaning."""

    @abstractmethod
    def encode_example(self, text: str) -> list[int]:
        """Return the ids of text that is a whole example, as the model's own tokenizer does.

        Special tokens in the text are recognised, and those that the tokenizer itself adds (such as
        the one that begins a sequence) are added.
        """

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if it is not in the vocabulary."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, special tokens included."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the text of a file from which `load_tokenizer` loads the tokenizer."""

    def encode_examples(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, as `encode_example`."""
        return [self.encode_example(text) for text in texts]

    def encode_batch(self, texts: Sequence[str]) -> "Iterator[npt.NDArray[np.int64]]":
        """Yield the ids of each text, as `encode`."""
        for text in texts:
            yield np.array(self.encode(text), dtype=np.int64)

    def digest(self) -> str:
        """Return a digest of the tokenizer, independent of its path."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def set_eod(self, eod: int | str) -> None:
        """Set the token that ends a document: its id or its text.

        Raises:
            DataError: it is not in the vocabulary.
        """
        found = self.id_of(eod) if isinstance(eod, str) else eod
        if found is None or not 0 <= found < self.vocab_size:
            raise DataError(
                f"data.eod_id is {eod!r}, which is not in the vocabulary of the tokenizer: its ids "
                f"are 0 to {self.vocab_size - 1}"
            )
        self.eod = found


# Every byte, and the end of a document.
SMALLEST_VOCABULARY = 257


class FastTokenizer(Tokenizer):
    """A thin wrapper of a tokenizer of the `tokenizers` package.

    Args:
        end_of_sequence: token that ends a document; None: "<|endoftext|>".
    """

    def __init__(self, inner: tokenizers.Tokenizer, end_of_sequence: str | None = None) -> None:
        self._inner = inner
        # "<|endoftext|>" inside of a text is text, not the end of a document.
        inner.encode_special_tokens = True
        # transformers stores the settings of its last call in tokenizer.json.
        inner.no_truncation()
        inner.no_padding()
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod = None
        if end_of_sequence is not None:
            self.eod = inner.token_to_id(end_of_sequence)
        if self.eod is None:
            self.eod = inner.token_to_id(EOD)

    @classmethod
    def of_json(cls, text: str, path: Path) -> "FastTokenizer":
        """Load a tokenizer from the content of the tokenizer.json at `path`.

        Raises:
            DataError: it is not a tokenizer.json.
        """
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the package raises Exception, or panics
            raise DataError(
                f"{path} is not a tokenizer.json of the tokenizers package: {error}"
            ) from error
        is_own = path.name == "tokenizer.json"
        return cls(inner, end_of_sequence_of(path.parent) if is_own else None)

    @classmethod
    def of_merges(cls, vocabulary: Path, merges: Path) -> "FastTokenizer":
        """Load GPT-2's byte-level BPE.

        Raises:
            DataError: the files are not a vocabulary and its merges.
        """
        try:
            model = models.BPE.from_file(str(vocabulary), str(merges))
        except Exception as error:  # the package raises Exception
            raise DataError(
                f"{vocabulary} and {merges} are not the vocabulary and the merges of a BPE: {error}"
            ) from error
        inner = _byte_level(model)
        if inner.token_to_id(EOD) is not None:
            inner.add_special_tokens([EOD])
        return cls(inner, end_of_sequence_of(vocabulary.parent))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "FastTokenizer":
        """Train a byte-level BPE with `vocab_size` tokens, or fewer if the text yields fewer.

        The same texts in the same order give the same tokenizer.

        Raises:
            ConfigError: `vocab_size` is smaller than the number of bytes and special tokens.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"data.vocab_size is {vocab_size}, but a byte-level vocabulary needs at least "
                f"{SMALLEST_VOCABULARY}: every byte and the end of a document"
            )
        inner = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOD],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    def to_json(self) -> str:
        return str(self._inner.to_str())

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_example(self, text: str) -> list[int]:
        return list(self._with_special_tokens.encode(text).ids)

    def encode_batch(self, texts: Sequence[str]) -> "Iterator[npt.NDArray[np.int64]]":
        """Yield the ids of each text; the package encodes in parallel threads."""
        for encoding in _batch_encoder(self._inner)(list(texts), add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.int64)

    def encode_examples(self, texts: Sequence[str]) -> list[list[int]]:
        encode = _batch_encoder(self._with_special_tokens)
        return [list(encoding.ids) for encoding in encode(list(texts))]

    def id_of(self, token: str) -> int | None:
        found: int | None = self._inner.token_to_id(token)
        return found

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=False))

    @cached_property
    def _with_special_tokens(self) -> tokenizers.Tokenizer:
        inner = copy.deepcopy(self._inner)
        inner.encode_special_tokens = False
        return inner


def _batch_encoder(inner: tokenizers.Tokenizer) -> Callable[..., Any]:
    # Newer versions have a faster variant that omits the offsets.
    encode: Callable[..., Any] = getattr(inner, "encode_batch_fast", inner.encode_batch)
    return encode


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def end_of_sequence_of(folder: Path) -> str | None:
    """Return the end-of-sequence token of a folder of transformers; None if it names none."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            token = content["eos_token"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


TIKTOKEN = "tiktoken"
PREFIX = "tiktoken:"


class TiktokenTokenizer(Tokenizer):
    """A thin wrapper of an encoding of tiktoken.

    Args:
        inner: the `tiktoken.Encoding`.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.vocab_size = int(inner.max_token_value) + 1
        self.eod = inner._special_tokens.get(EOD)

    @classmethod
    def named(cls, name: str) -> "TiktokenTokenizer":
        """Load the encoding `name` without a download.

        Raises:
            ConfigError: tiktoken is not installed.
            DataError: the encoding is unknown, or its files are not on this machine.
        """
        tiktoken = _tiktoken(f"{PREFIX}{name}")
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise DataError(f"tiktoken has no encoding {name!r}; it has {', '.join(sorted(known))}")
        with _no_downloads(name):
            return cls(tiktoken.get_encoding(name))

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> "TiktokenTokenizer":
        """Load what `to_json` returned."""
        ranks = {base64.b64decode(token): rank for token, rank in content["ranks"].items()}
        inner = _tiktoken(content["name"]).Encoding(
            content["name"],
            pat_str=content["pattern"],
            mergeable_ranks=ranks,
            special_tokens=content["special_tokens"],
        )
        return cls(inner)

    def to_json(self) -> str:
        inner = self._inner
        ranks = {
            base64.b64encode(token).decode("ascii"): rank
            for token, rank in inner._mergeable_ranks.items()
        }
        return json.dumps(
            {
                "type": TIKTOKEN,
                "name": inner.name,
                "pattern": inner._pat_str,
                "special_tokens": inner._special_tokens,
                "ranks": ranks,
            }
        )

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._inner.encode_ordinary(text)]

    def encode_example(self, text: str) -> list[int]:
        return [int(i) for i in self._inner.encode(text, allowed_special="all")]

    def id_of(self, token: str) -> int | None:
        try:
            return int(self._inner.encode_single_token(token))
        except KeyError:
            return None

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._bytes_of(int(i)) for i in ids).decode("utf-8", errors="replace")

    def _bytes_of(self, token_id: int) -> bytes:
        try:
            return bytes(self._inner.decode_single_token_bytes(token_id))
        except KeyError:
            # A vocabulary may have gaps, which a model that is not trained yet can generate.
            return b""


def _tiktoken(name: str) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise ConfigError(f"the tokenizer {name} needs tiktoken: pip install tiktoken") from error
    return tiktoken


@contextmanager
def _no_downloads(name: str) -> Iterator[None]:
    """Let tiktoken read files of this machine only, also if it would download missing ones."""
    load: Any = importlib.import_module("tiktoken.load")
    original = load.read_file

    def refuse(path: str) -> Any:
        if "://" not in path:
            return original(path)
        raise DataError(
            f"tiktoken has no file of the encoding {name!r} on this machine, and nothing is "
            f"downloaded: run tiktoken.get_encoding({name!r}) on a machine with network access, "
            "copy its cache folder, and set TIKTOKEN_CACHE_DIR to the copy; or use a tokenizer.json"
        )

    load.read_file = refuse
    try:
        yield
    finally:
        load.read_file = original


SENTENCEPIECE = "sentencepiece"


class SentencePieceTokenizer(Tokenizer):
    """A thin wrapper of SentencePiece. The end of a document is the model's end of a sequence.

    Args:
        model: content of the `.model` file.
        path: path of the file, for messages.

    Raises:
        ConfigError: the package is not installed.
        DataError: `model` is not a SentencePiece model.
    """

    def __init__(self, model: bytes, path: Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ConfigError(
                f"the tokenizer {path} needs SentencePiece: pip install sentencepiece"
            ) from error
        try:
            self._inner: Any = SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"{path} is not a SentencePiece model; if it is a list of tokens of tiktoken (as "
                "Llama 3's tokenizer.model), name the folder with its tokenizer.json instead"
            ) from error
        self._model = model
        self.vocab_size = int(self._inner.get_piece_size())
        end = int(self._inner.eos_id())
        self.eod = end if end >= 0 else self.id_of(EOD)

    @classmethod
    def of_json(cls, content: dict[str, Any], path: Path) -> "SentencePieceTokenizer":
        """Load what `to_json` returned."""
        return cls(base64.b64decode(content["model"]), path)

    def to_json(self) -> str:
        model = base64.b64encode(self._model).decode("ascii")
        return json.dumps({"type": SENTENCEPIECE, "model": model})

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._inner.encode(text)]

    def encode_example(self, text: str) -> list[int]:
        # A .model does not say whether its model expects the token that begins a sequence.
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> "Iterator[npt.NDArray[np.int64]]":
        for ids in self._inner.encode(list(texts)):
            yield np.array(ids, dtype=np.int64)

    def id_of(self, token: str) -> int | None:
        found = int(self._inner.piece_to_id(token))
        return found if self._inner.id_to_piece(found) == token else None

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode([int(i) for i in ids]))


# In a folder, the first of these that exists is the tokenizer.
_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model")


def load_tokenizer(name: str | Path, eod: int | str | None = None) -> Tokenizer:
    """Load a tokenizer from files of this machine.

    Args:
        name: a tokenizer.json; GPT-2's vocab.json or merges.txt, with the other one beside it
            (gpt2-vocab.json and gpt2-merges.txt too), or both, separated by a comma; a
            `.model` of SentencePiece; a folder with one of these, as transformers writes it; or
            "tiktoken:NAME".
        eod: id or text of the token that ends a document; None: the end-of-sequence
            token that the files name, otherwise "<|endoftext|>".

    Raises:
        DataError: no file exists, a file is damaged, or `eod` is not in the vocabulary.
        ConfigError: the package of the format is not installed.
    """
    tokenizer = _load(str(name))
    if eod is not None:
        tokenizer.set_eod(eod)
    return tokenizer


def _load(name: str) -> Tokenizer:
    if name.startswith(PREFIX):
        return TiktokenTokenizer.named(name.removeprefix(PREFIX))
    files = tokenizer_paths(name)
    path = tokenizer_file(files[0]) if len(files) == 1 else files[0]
    vocabulary, merges = files if len(files) == 2 else _vocabulary_and_merges(path)
    missing = [file for file in (vocabulary, merges) if file and not file.is_file()]
    if missing and (len(files) == 2 or _is_half_of_a_bpe(path)):
        raise DataError(
            f"{missing[0]} does not exist: a BPE needs vocab.json and merges.txt in one folder, or "
            "both names, as VOCAB.json,MERGES.txt"
        )
    if vocabulary and merges and not missing:
        return FastTokenizer.of_merges(vocabulary, merges)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"the tokenizer {path} cannot be read: {error.strerror}") from error
    if path.suffix == ".model":
        return SentencePieceTokenizer(content, path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a tokenizer.json: {error}") from error
    if text.lstrip().startswith("[") and '"token_bytes"' in text[:1000]:
        raise DataError(
            f"{path} is a vocabulary of Megatron-LM's TikTokenizer, which is not supported. Token "
            "files need no tokenizer: remove data.tokenizer, set model.vocab_size (131072 unless "
            "the job said otherwise) and data.eod_id (2, the id of '</s>')"
        )
    own = _own_content(text)
    try:
        if own.get("type") == SENTENCEPIECE:
            return SentencePieceTokenizer.of_json(own, path)
        if own.get("type") == TIKTOKEN:
            return TiktokenTokenizer.of_json(own)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return FastTokenizer.of_json(text, path)


def tokenizer_paths(name: str) -> tuple[Path, ...]:
    """Return the file or folder of `load_tokenizer`'s name, or the two files of a BPE."""
    path = Path(name).expanduser()
    names = name.split(",")
    if len(names) != 2 or path.exists():
        return (path,)
    return Path(names[0].strip()).expanduser(), Path(names[1].strip()).expanduser()


def _vocabulary_and_merges(path: Path) -> tuple[Path, Path] | tuple[None, None]:
    """Return the two files of a BPE, one of which is `path`, by their names."""
    if path.suffix == ".json" and "vocab" in path.name:
        return path, path.with_name(path.stem.replace("vocab", "merges") + ".txt")
    if path.suffix == ".txt" and "merges" in path.name:
        return path.with_name(path.stem.replace("merges", "vocab") + ".json"), path
    return None, None


def _is_half_of_a_bpe(path: Path) -> bool:
    """Return whether a file with the name of a vocabulary or merges is one, not a tokenizer."""
    if path.suffix == ".txt":
        return True
    try:
        ids = json.loads(path.read_bytes()).values()
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return all(isinstance(token_id, int) for token_id in ids)


def _own_content(text: str) -> dict[str, Any]:
    """Return the content of a file by `Tokenizer.to_json` of the other packages, else {}."""
    if not text.startswith('{"type"'):
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer's file that `path` names: itself, or one in the folder `path`.

    Raises:
        DataError: it does not exist; the message names the files that were looked for.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"the tokenizer {path} does not exist")
    for name in _FILES:
        if (path / name).is_file():
            return path / name
    found = sorted(file.name for file in path.iterdir())
    shown = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
    raise DataError(
        f"the folder {path} has no tokenizer: it has none of {', '.join(_FILES)}"
        + (f", but {shown}" if shown else "")
    )
