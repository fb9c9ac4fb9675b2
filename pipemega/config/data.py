"""`data`: the training data."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import field_validator

from pipemega.config.key_kinds import Section, own, rule
from pipemega.config.value_types import Count, Name, Whole

# 256 bytes and the end-of-document token.
_SMALLEST_VOCABULARY = 257

# Keys that only records to fine-tune on have.
RECORD_KEYS = (
    "format", "path", "valid_path", "key", "prompt_template", "chat_template", "packing",
    "truncation", "pad_to_multiple_of",
)  # fmt: skip


class DataSection(Section):
    """The training data: text (`corpus`), token files (`data_path`), examples to fine-tune on
    (`format` and `path`) or random tokens (`mock`)."""

    corpus: Name | tuple[Name, ...] | None = own(
        None, "Text files, folders, globs (tokenized once), or `python-stdlib`: Python's sources."
    )
    data_path: Name | tuple[Name | float, ...] | None = own(
        None, "Megatron token files: a prefix, a list of prefixes, or weight, prefix, weight, ..."
    )
    format: Literal["chat", "instruction", "text"] | None = own(
        None,
        "Fine-tune on the records of `path`: conversations, prompts with responses, or texts. The "
        "loss counts answers only (texts: all tokens).",
    )
    path: Name | tuple[Name, ...] | None = own(
        None, "Files of records: JSON lines or parquet; a list and globs are allowed."
    )
    valid_path: Name | tuple[Name, ...] | None = own(
        None, "Files of validation records; null: a share of `path`, by `split`."
    )
    key: Name | None = own(
        None,
        "Key of a record that has the messages, the response or the text; null: the usual names.",
    )
    prompt_template: str | None = own(
        None,
        "Prompt of an instruction, such as `Q: {question} A: `: each name is a key of the record; "
        "null: the key `prompt`, or Alpaca's template.",
    )
    chat_template: Name | None = own(
        None, "File with the chat template (Jinja); null: that of the tokenizer."
    )
    packing: bool = own(
        True,
        "Put several records in one sample, with position ids that restart and attention within "
        "each record; false: one record per sample, padded.",
    )
    truncation: Literal["truncate", "split", "drop"] | None = own(
        None,
        "What to do with a record that is longer than `model.seq_length`: cut its end off, split "
        'it, or leave it out; null: `"split"` for texts, otherwise `"truncate"`.',
    )
    pad_to_multiple_of: Count | None = own(
        None,
        "Without packing: pad a micro-batch to its longest sample, rounded up to a multiple of "
        "this; null: to `model.seq_length`.",
    )
    mock: bool = own(False, "Use random tokens, to try a mesh or a model without data.")
    split: str = own("969,30,1", "Shares of the training, validation and test sets.")
    tokenizer: Name | None = own(
        None,
        "A `tokenizer.json`, GPT-2's `vocab.json` (`merges.txt` beside it), a SentencePiece "
        "`.model`, a folder of a Hugging Face tokenizer, or `tiktoken:NAME`; null: that of the "
        "Hugging Face model, else a BPE that is trained on `corpus`.",
    )
    eod_id: Whole | Name | None = own(
        None,
        "Id (or text) of the token that ends a document; null: the end-of-sequence token that the "
        "tokenizer's files name, otherwise `<|endoftext|>`.",
    )
    vocab_size: int = own(8192, "Vocabulary size of the trained BPE.", ge=_SMALLEST_VOCABULARY)
    cache_path: Name | None = own(
        None, "Folder of indices and tokenized text; null: beside the data, or the user's cache."
    )
    num_workers: Whole = own(
        0,
        "Number of worker processes that read samples of a map-style dataset; 0: none. If the "
        "dataset has `deterministic = True`, as the datasets of this section have, the workers are "
        "threads.",
    )
    prefetch: Whole = own(
        2, "Micro-batches to read ahead, if `num_workers` or a deterministic dataset allows it."
    )
    compare_every: Whole = own(
        100,
        "Compare what the pipeline and tensor ranks of a data rank have read, in the first three "
        "calls of `train_batch` (and of `eval_batch`), and then once per this many calls; "
        "deterministic datasets are not compared; 0: never.",
    )
    eod_mask_loss: bool = own(False, "Mask the loss where the input is the end-of-document token.")
    reset_position_ids: bool = own(
        False,
        "Restart position ids after each end-of-document token; with `model.type` hf only together "
        "with `reset_attention_mask`.",
    )
    reset_attention_mask: bool = own(
        False,
        "Prevent attention across the documents of a sample; requires `reset_position_ids`.",
    )

    @property
    def packs(self) -> bool:
        """Whether a sample contains several records, which do not see each other."""
        return self.format is not None and self.packing

    @property
    def inputs_per_token(self) -> int:
        """Numbers per token that the layers of the GPT need: positions (1), and documents (2)."""
        if self.format is not None:
            return 2
        return self.reset_position_ids + self.reset_attention_mask

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """`split` as three shares that add up to 1."""
        numbers = [float(part) for part in self.split.split(",")]
        first, second, third = (number / sum(numbers) for number in numbers)
        return first, second, third

    @property
    def blend(self) -> tuple[tuple[float | None, str], ...]:
        """`data_path` as (weight, prefix) pairs; weight is None if `data_path` has no weights."""
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
        # nan and inf fail this comparison.
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
            raise ValueError(
                f"the weights in data.data_path {weights} must be >= 0, and one of them > 0"
            )
        return given

    @rule("corpus", "data_path", "mock", "path")
    def _one_source(self) -> Iterator[str]:
        sources: Mapping[str, Any] = {
            "corpus": self.corpus, "data_path": self.data_path, "mock": self.mock, "path": self.path
        }  # fmt: skip
        given = [f"data.{name}" for name, value in sources.items() if value]
        if len(given) > 1:
            yield f"{' and '.join(given)} are set: keep one"

    @rule("reset_attention_mask", "reset_position_ids")
    def _documents_are_separated_by_positions(self) -> Iterator[str]:
        if self.reset_attention_mask and not self.reset_position_ids:
            yield (
                "data.reset_attention_mask separates documents where the position ids restart: set "
                "data.reset_position_ids to true too"
            )

    @rule(*RECORD_KEYS)
    def _records_have_a_format(self) -> Iterator[str]:
        if self.format is not None:
            return
        given = [f"data.{name}" for name in RECORD_KEYS if getattr(self, name) not in (None, True)]
        if given:
            yield (
                f"{' and '.join(given)} need data.format: set it to 'chat', 'instruction' or 'text'"
            )

    @rule("format", "prompt_template", "chat_template", "packing", "pad_to_multiple_of")
    def _keys_fit_the_format(self) -> Iterator[str]:
        if self.format is None:
            return
        if self.prompt_template is not None and self.format != "instruction":
            yield (
                f"data.prompt_template is for data.format 'instruction', not {self.format!r}: "
                "remove one of them"
            )
        if self.chat_template is not None and self.format != "chat":
            yield (
                f"data.chat_template is for data.format 'chat', not {self.format!r}: remove one of "
                "them"
            )
        if self.pad_to_multiple_of is not None and self.packing:
            yield (
                "data.pad_to_multiple_of is for samples that are padded: set data.packing to "
                "false, or remove it (a packed sample is padded to model.seq_length)"
            )


def errors_of_padding(config: Any) -> Iterator[str]:
    """Yield errors of samples with different lengths on the mesh of a `Config`."""
    multiple, mesh, shapes = config.data.pad_to_multiple_of, config.mesh, config.pipeline.shapes
    if multiple is None:
        return
    if mesh.pipeline > 1 and shapes != "exchanged":
        yield (
            "data.pad_to_multiple_of gives micro-batches different lengths, and pipeline.shapes is "
            f"{shapes!r}: set it to 'exchanged', or remove data.pad_to_multiple_of (samples are "
            "then padded to model.seq_length)"
        )
    if mesh.sequence_parallel and multiple % mesh.tensor:
        yield (
            f"data.pad_to_multiple_of ({multiple}) must be a multiple of mesh.tensor "
            f"({mesh.tensor}), which shards the sequence"
        )
