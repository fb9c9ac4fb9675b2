"""`data`: what the model is trained on.  Floor 1."""

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator

from pipemega.config.keys import Name, Section, Whole, own, refused

# 256 bytes and the end of a document.
_SMALLEST_VOCABULARY = 257


class DataSection(Section):
    """Text to be made into tokens (`corpus`), or tokens that are there (`data_path`)."""

    corpus: Name | tuple[Name, ...] | None = own(
        None,
        'Text: files, folders or patterns; `"python-stdlib"`: the sources of the running Python, '
        "which every machine has.",
    )
    data_path: Name | tuple[Name | float, ...] | None = own(
        None,
        "Token files of Megatron's kind, without `.bin` / `.idx`: a prefix, a list of prefixes, or "
        "a list of weight, prefix, weight, prefix, ...",
    )
    mock: bool = own(False, "Random tokens, to try a layout without data.")
    split: str = own("969,30,1", "Shares of training, validation and test.")
    tokenizer: Name | None = own(
        None, "A `tokenizer.json`; null: a byte-level BPE trained on the corpus."
    )
    vocab_size: int = own(
        8192, "Tokens of the BPE that is trained when there is no tokenizer.",
        ge=_SMALLEST_VOCABULARY,
    )  # fmt: skip
    cache_path: Name | None = own(
        None,
        "Where indices and prepared text are kept; null: beside the data, or the user's cache.",
    )
    num_workers: Whole = own(0, "Further threads that read samples; 0: none.")
    prefetch: Whole = own(2, "Micro-batches that are read ahead; 0: none.")
    eod_mask_loss: bool = own(False, "No loss where the input is the end of a document.")
    reset_position_ids: bool = own(False, "Positions begin again after the end of a document.")
    reset_attention_mask: bool = refused(
        False,
        "No attention across documents in one sample.",
        "a mask per sample is not here yet; leave it false, and separate documents with "
        "data.eod_mask_loss and data.reset_position_ids",
        own=True,
    )

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """`split` as three shares that add up to 1."""
        numbers = [float(part) for part in self.split.split(",")]
        first, second, third = (number / sum(numbers) for number in numbers)
        return first, second, third

    @property
    def blend(self) -> tuple[tuple[float | None, str], ...]:
        """`data_path` as (weight, prefix); the weights are None where none are given."""
        given = self.data_path
        if given is None or isinstance(given, str):
            return ((None, given),) if given else ()
        if isinstance(given[0], str):
            return tuple((None, str(prefix)) for prefix in given)
        pairs = zip(given[::2], given[1::2], strict=True)
        return tuple((float(weight), str(prefix)) for weight, prefix in pairs)

    @field_validator("split")
    @classmethod
    def _three_shares(cls, split: str) -> str:
        try:
            shares = [float(part) for part in split.split(",")]
        except ValueError:
            shares = []
        # A number that is not finite fails both comparisons.
        if len(shares) != 3 or not all(0 <= s < float("inf") for s in shares) or not sum(shares):
            raise ValueError(
                f"data.split must be three shares such as '969,30,1' (training, validation, test), "
                f"not {split!r}"
            )
        return split

    @field_validator("data_path")
    @classmethod
    def _prefixes_or_pairs(cls, given: Any) -> Any:
        if not isinstance(given, tuple):
            return given
        prefixes = [isinstance(part, str) for part in given]
        pairs = len(given) % 2 == 0 and prefixes == [False, True] * (len(given) // 2)
        if not given or not (all(prefixes) or pairs):
            raise ValueError(
                "data.data_path must be a prefix, a list of prefixes, or a list of weight, prefix, "
                f"weight, prefix, ..., not {list(given)}"
            )
        weights = [part for part in given if not isinstance(part, str)]
        if any(weight < 0 for weight in weights) or (weights and not sum(weights)):
            raise ValueError(f"the weights in data.data_path {weights} must be shares above 0")
        return given

    @model_validator(mode="after")
    def _one_source(self) -> "DataSection":
        sources: Mapping[str, Any] = {
            "corpus": self.corpus, "data_path": self.data_path, "mock": self.mock
        }  # fmt: skip
        given = [f"data.{name}" for name, value in sources.items() if value]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given: keep one")
        return self
