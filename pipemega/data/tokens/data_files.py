"""The files that the config section `data` names: do they exist, and which vocabulary have they?"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipemega.config import Config
from pipemega.config.sections.data_section import DataSection
from pipemega.data.tokens.corpus import (
    Corpus,
    files_of,
    find_corpus,
    prefix_of,
    read_manifest,
    tokenizer_of,
)
from pipemega.errors import ConfigError, DataError, PipemegaError
from pipemega.lazy_imports import deferred, load_name
from pipemega.storage.build_once import digest_of, user_cache_folder

if TYPE_CHECKING:
    from pipemega.data.tokens import token_files, tokenizers
else:
    token_files = deferred("pipemega.data.tokens.token_files")
    tokenizers = deferred("pipemega.data.tokens.tokenizers")


class DataKind(NamedTuple):
    """Names of what finds the inputs of a kind of data, and of what builds its datasets."""

    inputs: str
    build: str


# Key of the section `data` -> the kind of data that it selects; without these keys it is tokens.
KINDS = {
    "images": DataKind(
        "pipemega.data.images.image_paths:image_inputs",
        "pipemega.data.images.image_dataset:build_images",
    ),
    "format": DataKind(
        "pipemega.data.finetuning.record_files:record_inputs",
        "pipemega.data.finetuning.finetuning_dataset:build_finetuning",
    ),
}


class DataInput(NamedTuple):
    """One input of the training data.

    Args:
        key: the config key that names it.
        name: the name in the config.
        size: bytes of its files.
        tokens: number of tokens in token files; 0 for other files.
        classes: number of classes in a folder of images; 0 for other files.
        error: why it cannot be read; empty if it can.
    """

    key: str
    name: str
    size: int = 0
    tokens: int = 0
    error: str = ""
    classes: int = 0


def data_inputs(section: DataSection) -> Iterator[DataInput]:
    """Yield every file, folder and prefix that `section` names."""
    for key, prefix in section.keyed_token_files:
        yield _token_files(key, prefix)
    corpora = (section.corpus,) if isinstance(section.corpus, str) else section.corpus or ()
    for name in corpora:
        try:
            yield DataInput("data.corpus", name, find_corpus(name).num_bytes)
        except DataError as error:
            yield DataInput("data.corpus", name, error=f"data.corpus: {error}")
    for key, kind in KINDS.items():
        if getattr(section, key) is not None:
            yield from load_name(kind.inputs)(section)
    if section.images is not None:
        return
    if section.chat_template is not None:
        yield _file("data.chat_template", section.chat_template)
    if section.tokenizer is not None:
        try:
            size = len(tokenizers.load_tokenizer(section.tokenizer, section.eod_id).to_json())
            yield DataInput("data.tokenizer", section.tokenizer, size)
        except PipemegaError as error:
            yield DataInput("data.tokenizer", section.tokenizer, error=f"data.tokenizer: {error}")


def _file(key: str, name: str) -> DataInput:
    path = Path(name).expanduser()
    if path.is_file():
        return DataInput(key, name, path.stat().st_size)
    return DataInput(key, name, error=f"{key}: {name} does not exist")


def check_data_inputs(section: DataSection) -> None:
    """Check that all inputs exist.

    Raises:
        DataError: some do not; the message has a line for each of them.
    """
    errors = [found.error for found in data_inputs(section) if found.error]
    if len(errors) == 1:
        raise DataError(errors[0])
    if errors:
        raise DataError("\n  ".join([f"{len(errors)} inputs of the data are missing:", *errors]))


def _token_files(key: str, name: str) -> DataInput:
    files = files_of(prefix_of(name))
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        are = "do not exist" if len(missing) > 1 else "does not exist"
        error = (
            f"{key} {name!r}: {' and '.join(missing)} {are}; a data path is the common "
            "prefix of both files, which 'pipemega data prepare' writes"
        )
        if " " in name:
            error += "; give several prefixes as a list"
        return DataInput(key, name, error=error)
    try:
        tokens = token_files.IndexedDataset(name).num_tokens
    except DataError as error:
        return DataInput(key, name, error=f"{key} {name!r}: {error}")
    size = sum(path.stat().st_size for path in files)
    return DataInput(key, name, size, tokens)


def token_prefixes(section: DataSection) -> list[Path]:
    """Return the prefixes of all token files of `section`, each once."""
    return list(dict.fromkeys(prefix_of(prefix) for _, prefix in section.keyed_token_files))


def corpus_prefix(section: DataSection) -> tuple[Corpus, Path]:
    """Return the corpus of `section`, and the prefix of its token files in the cache folder.

    Raises:
        DataError: the corpus does not exist, or the tokenizer cannot be read.
    """
    assert section.corpus, "checked by the caller"
    corpus = find_corpus(section.corpus)
    given = None if section.tokenizer is None else tokenizers.load_tokenizer(section.tokenizer)
    tokenizer = section.vocab_size if given is None else given.digest()
    made_of = {"corpus": corpus.identity, "tokenizer": tokenizer}
    if section.eod_id is not None:  # files of earlier versions have no such key
        made_of["eod"] = section.eod_id
    key = digest_of(made_of)
    label = re.sub(r"[^A-Za-z0-9]+", "-", Path(corpus.name).name).strip("-")[:40] or "corpus"
    root = Path(section.cache_path).expanduser() if section.cache_path else user_cache_folder()
    return corpus, root / "corpora" / f"{label}-{key[:16]}" / "text"


def find_tokenizer(
    prefixes: Sequence[Path], named: str | None, eod: int | str | None = None
) -> "tokenizers.Tokenizer | None":
    """Return the named tokenizer, or the one next to the first token files; None if there is none.

    Args:
        eod: see `load_tokenizer`; None: the token that ended the documents, if it is known.

    Raises:
        DataError: some files were made with another tokenizer.
    """
    manifests = [read_manifest(prefix) for prefix in prefixes]
    path = tokenizer_of(prefixes[0]) if named is None else named
    if named is None and (manifests[0] is None or not Path(path).is_file()):
        return None
    if eod is None and manifests[0] is not None:
        eod = manifests[0].eod
    tokenizer = tokenizers.load_tokenizer(path, eod)
    digest = tokenizer.digest()
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        if manifest is not None and manifest.tokenizer_digest != digest:
            raise DataError(
                f"{prefix} was not made with the tokenizer {path}, so its token ids have another "
                "meaning: set data.tokenizer to the tokenizer that made it, or prepare the text "
                "again"
            )
    return tokenizer


def run_tokenizer(config: Config) -> "tuple[str, tokenizers.Tokenizer] | None":
    """Return path and tokenizer of a run: named, or from its token files, corpus or model.

    None if there is none; a corpus that was never prepared has none yet.

    Raises:
        ConfigError, DataError: it cannot be read; the corpus does not exist.
    """
    section, named = config.data, config.data.tokenizer
    prefixes = token_prefixes(section)
    if section.corpus and named is None:
        prefixes = [corpus_prefix(section)[1]]
    if prefixes:
        found = find_tokenizer(prefixes, named, section.eod_id)
        if found is not None:
            return named or str(tokenizer_of(prefixes[0])), found
    if named is None and config.model is not None:
        named = config.model.default_tokenizer()
    return None if named is None else (named, tokenizers.load_tokenizer(named, section.eod_id))


def load_chat_tokenizer(tokenizer: str, template: str | None = None) -> Any:
    """Return the tokenizer of transformers with a chat template.

    Raises:
        ConfigError: transformers is not installed.
        DataError: the tokenizer cannot be loaded, has no chat template or no offsets.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "data.format 'chat' needs transformers: pip install 'pipemega[hf]'"
        ) from error
    path = Path(tokenizer).expanduser()
    folder = path if path.is_dir() else path.parent
    has_config = any((folder / name).is_file() for name in ("tokenizer_config.json", "config.json"))
    try:
        if path.is_dir() or (path.name == "tokenizer.json" and has_config):
            found: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        else:
            found = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # transformers and tokenizers raise many classes
        raise DataError(
            f"data.tokenizer {tokenizer!r} is not a Hugging Face tokenizer, which data.format "
            f"'chat' needs: {error}"
        ) from error
    if template is not None:
        found.chat_template = _template_of(Path(template).expanduser())
    if found.chat_template is None:
        raise DataError(
            f"the tokenizer {tokenizer} has no chat template: name a file with one by "
            "data.chat_template, or use data.format 'instruction'"
        )
    if not found.is_fast:
        raise DataError(
            f"{type(found).__name__} of {tokenizer} cannot say which text a token is from, so the "
            "answers cannot be found: use a tokenizer with a tokenizer.json"
        )
    return found


def _template_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template {str(path)!r} cannot be read: {error}") from error


def errors_of_eod(section: DataSection, vocab_size: int | None) -> Iterator[str]:
    """Yield errors of the end-of-document id of token files.

    Args:
        vocab_size: vocabulary size of the model, if it is known.

    Raises:
        DataError: as `find_tokenizer`.
    """
    prefixes, eod, named = token_prefixes(section), section.eod_id, section.tokenizer
    if not prefixes or not all(path.is_file() for prefix in prefixes for path in files_of(prefix)):
        return
    if isinstance(eod, int) and vocab_size is not None and eod >= vocab_size:
        yield f"data.eod_id is {eod}, which is outside of the vocabulary of {vocab_size} tokens"
    keys = [key for key in ("eod_mask_loss", "reset_position_ids") if getattr(section, key)]
    if eod is None and keys and (named is None or _exists(named)):
        found = find_tokenizer(prefixes, named)
        if found is None or found.eod is None:
            yield tokenizers.UNKNOWN_EOD.format(key=keys[0])


class Vocabulary(NamedTuple):
    """A vocabulary size, and where it is from.

    Args:
        is_certain: False if the run may use another size.
    """

    size: int
    origin: str
    is_certain: bool = True


def known_vocabulary(section: DataSection) -> Vocabulary | None:
    """Return the vocabulary size of the tokenizer, without preparing text; None if unknown.

    Raises:
        DataError: a tokenizer is damaged, or token files were made with another tokenizer.
    """
    if section.mock:
        return Vocabulary(section.vocab_size, "data.vocab_size of the mock data")
    if section.tokenizer is not None and _exists(section.tokenizer):
        return _vocabulary_of(section.tokenizer)
    prefixes = token_prefixes(section)
    if prefixes:
        tokenizer = None if section.tokenizer else find_tokenizer(prefixes, None)
        return None if tokenizer is None else _vocabulary_of(tokenizer_of(prefixes[0]))
    if section.corpus is None or section.tokenizer is not None:
        return None
    try:
        _, prefix = corpus_prefix(section)
    except DataError:  # the corpus is missing; `data_inputs` reports it
        prefix = None
    prepared = None if prefix is None else read_manifest(prefix)
    if prefix is not None and prepared is not None and tokenizer_of(prefix).is_file():
        return Vocabulary(prepared.vocab_size, f"tokenizer {tokenizer_of(prefix)}")
    return Vocabulary(
        section.vocab_size,
        "data.vocab_size; the tokenizer is trained when the run starts, and a small corpus gives "
        "fewer tokens",
        is_certain=False,
    )


def _exists(tokenizer: str) -> bool:
    is_named = tokenizer.startswith(tokenizers.PREFIX)
    return is_named or all(path.exists() for path in tokenizers.tokenizer_paths(tokenizer))


def _vocabulary_of(path: str | Path) -> Vocabulary:
    return Vocabulary(tokenizers.load_tokenizer(path).vocab_size, f"tokenizer {path}")
