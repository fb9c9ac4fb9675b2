"""`model` with type "hf": a model of Hugging Face's transformers, from a folder."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pipemega.config.declarations import Count, Name, NotNegative, own
from pipemega.config.model_registry import ModelSection, register_model

# Longest sample if `seq_length` is null: the positions of a model may be far more than fit.
LONGEST_DEFAULT = 2048


@register_model("hf")
class HFSection(ModelSection):
    """A Hugging Face model."""

    builder = "pipemega.hf.hf_module"

    type: Literal["hf"] = own("hf", "Type of the model.")
    path: Name = own(..., "Folder with config.json, and with safetensors if `pretrained`.")
    pretrained: bool = own(True, "Load the weights of the folder; false: initialize new ones.")
    task: Literal[
        "causal-lm", "masked-lm", "seq2seq", "sequence-classification", "token-classification",
        "image-classification",
    ] | None = own(
        None, "What the model is trained for; null: from `architectures` of config.json."
    )  # fmt: skip
    attn_implementation: Name | None = own(
        None, "Attention of transformers, such as sdpa or flash_attention_2; null: its default."
    )
    num_labels: Count | None = own(
        None, "Number of classes of a classification task; null: from config.json."
    )
    seq_length: Count | None = own(
        None,
        "Tokens per sample; with learned positions (GPT-2, OPT) at most their number; "
        f"null: the number of positions of the model, at most {LONGEST_DEFAULT}.",
    )

    moe_aux_loss_coeff: NotNegative = own(
        0.0, "Weight of the loss of each layer that balances its experts; 0: there is none."
    )
    moe_z_loss_coeff: NotNegative = own(
        0.0, "Weight of the squared log-sum-exp of the logits of each router (ST-MoE: 1e-3)."
    )

    @property
    def folder(self) -> Path:
        """The folder, with `~` expanded."""
        return Path(self.path).expanduser()

    def sample(self, context: Any) -> Any:
        return self.above("sample")(self, context)

    def sample_tokens(self) -> int | None:
        return self.above("sample_tokens")(self)  # type: ignore[no-any-return]

    def vocabulary(self) -> int | None:
        return self.above("vocabulary")(self)  # type: ignore[no-any-return]

    def default_tokenizer(self) -> str | None:
        files = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
        return str(self.folder) if any((self.folder / name).is_file() for name in files) else None

    def input_files(self) -> Iterator[tuple[str, str, str]]:
        yield "model.path", self.path, self._folder_error()

    def _folder_error(self) -> str:
        """Return why the folder cannot be the source of the model; empty if it can."""
        if not self.folder.is_dir():
            return (
                f"model.path: the folder {self.path} does not exist; a model is loaded from a "
                f"folder, and nothing is downloaded"
            )
        if not (self.folder / "config.json").is_file():
            return f"model.path: {self.path} has no config.json, which describes the model"
        if self.pretrained and not any(self.folder.glob("*.safetensors*")):
            return (
                f"model.path: {self.path} has no safetensors, and model.pretrained is true: set it "
                f"to false to start with new weights"
            )
        return ""

    def remarks(self) -> Iterable[str]:
        # Only with a length: reading config.json imports transformers.
        return () if self.seq_length is None else self.above("remarks")(self)

    def computed_values(self) -> Iterator[tuple[str, str, str]]:
        length = self.sample_tokens()
        if self.seq_length is None and length is not None:
            why = f"the positions of the model, at most {LONGEST_DEFAULT}"
            yield "model.seq_length", str(length), why


def errors_of_positions(config: Any) -> Iterator[str]:
    """Yield errors of the position ids that the data of a `Config` gives the model."""
    data = config.data
    if (
        isinstance(config.model, HFSection)
        and data.reset_position_ids
        and not data.reset_attention_mask
    ):
        yield (
            "data.reset_position_ids restarts the position ids at each document, and models of "
            "transformers (model.type 'hf') then limit attention to the document: set "
            "data.reset_attention_mask to true too, or both to false"
        )
