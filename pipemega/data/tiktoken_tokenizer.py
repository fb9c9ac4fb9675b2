"""Tokenizers of tiktoken, from files that are on this machine."""

import base64
import importlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pipemega.data.tokenizer import EOD, Tokenizer
from pipemega.errors import ConfigError, DataError

KIND = "tiktoken"
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
                "type": KIND,
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
        # A vocabulary may have gaps, which a model that is not trained yet can generate.
        known = (i for i in map(int, ids) if self._is_token(i))
        raw = b"".join(self._inner.decode_single_token_bytes(i) for i in known)
        return raw.decode("utf-8", errors="replace")

    def _is_token(self, token_id: int) -> bool:
        try:
            self._inner.decode_single_token_bytes(token_id)
        except KeyError:
            return False
        return True


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
