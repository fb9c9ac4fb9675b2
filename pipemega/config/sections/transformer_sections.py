"""The keys of `model` that the built-in transformers have in common, with Megatron's names.

`model.rope_scaling`: rotary frequencies for longer sequences, by the keys of transformers.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pipemega.config.declarations import (
    Count,
    Fraction,
    Positive,
    Section,
    own,
    rule,
)
from pipemega.config.model_registry import ModelSection
from pipemega.config.sections.pipeline_sections import MeshSection


class TransformerSection(ModelSection):
    """A built-in model of equal transformer blocks."""

    other_layers: ClassVar[tuple[str, ...]]
    """The layers of the pipeline besides the blocks."""

    num_layers: Count = own(..., "Number of transformer blocks.")
    hidden_size: Count = own(..., "Hidden size of the transformer.")
    num_attention_heads: Count = own(..., "Number of attention (query) heads.")
    ffn_hidden_size: Count | None = own(None, "Feed-forward size; null: 4 * hidden_size.")
    attention_dropout: Fraction = own(0.1, "Dropout probability of the attention weights.")
    hidden_dropout: Fraction = own(0.1, "Dropout probability of embeddings and residuals.")
    recompute: Literal["none", "selective", "full"] = own(
        "none", "Activations to recompute: none, of attention (selective), of whole blocks (full)."
    )
    recompute_method: Literal["uniform", "block"] | None = own(
        None,
        'With `model.recompute` `"full"`: `"uniform"` forms groups of recompute_num_layers blocks, '
        'and stores only the input of a group; `"block"` recomputes only the first '
        "recompute_num_layers blocks of each stage, one by one; null recomputes all blocks, "
        "one by one.",
    )
    recompute_num_layers: Count = own(1, "Number of blocks for recompute_method.")
    recompute_keep: tuple[Literal["attention", "linear"], ...] | None = own(
        None,
        'With `model.recompute` `"selective"`: recompute each block, but keep the results of these '
        'operators: fused attention (`"attention"`), matrix products of linears (`"linear"`); '
        "null: keep all but the attention.",
    )

    @property
    def feed_forward_size(self) -> int:
        """`ffn_hidden_size`, or its default if it is null."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    def layer_count(self) -> int:
        return self.num_layers + len(self.other_layers)

    def sharded_sizes(self, mesh: MeshSection) -> Mapping[str, int]:
        """Return key -> size of what is sharded over the tensor ranks."""
        return {
            "num_attention_heads": self.num_attention_heads,
            "ffn_hidden_size": self.feed_forward_size,
        }

    def mesh_errors(self, mesh: MeshSection) -> Iterator[str]:
        """Yield why the model cannot be sharded over this mesh."""
        for name, size in self.sharded_sizes(mesh).items():
            if size % mesh.tensor:
                yield (
                    f"model.{name} ({size}) must be a multiple of mesh.tensor ({mesh.tensor}), "
                    f"over which it is sharded; the nearest {near_multiples(size, mesh.tensor)}"
                )

    @rule("recompute", "recompute_keep")
    def _keep_fits_recompute(self) -> Iterator[str]:
        keep = self.recompute_keep
        if keep is not None and self.recompute != "selective":
            yield (
                f"model.recompute_keep {[*keep]} says what selective recomputation keeps, and "
                f"model.recompute is {self.recompute!r}: set it to 'selective', or remove "
                "recompute_keep"
            )
        elif keep is not None and not keep:
            yield (
                "model.recompute_keep is empty, which recomputes whole blocks: set "
                "model.recompute to 'full' for that"
            )

    @rule("recompute", "recompute_method", "recompute_num_layers")
    def _method_fits_recompute(self) -> Iterator[str]:
        method, number = self.recompute_method, self.recompute_num_layers
        if method is not None and self.recompute != "full":
            yield (
                f"model.recompute_method {method!r} recomputes whole blocks, and model.recompute "
                f"is {self.recompute!r}: set it to 'full', or remove recompute_method"
            )
        if method is None and number != 1:
            yield (
                f"model.recompute_num_layers ({number}) has no effect without "
                "model.recompute_method: set it to 'uniform' or 'block'"
            )


def near_multiples(size: int, of: int, base: int = 0) -> str:
    """Return "that fits is 4" or "that fit are 12 and 16": multiples of `of` next to `size`.

    Args:
        base: added to both.
    """
    below, above = base + size // of * of, base - (-size // of) * of
    return f"that fit are {below} and {above}" if below else f"that fits is {above}"


RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]

# Keys that a rope_type uses, besides `factor`; a key with True must be given.
_KEYS: dict[str, dict[str, bool]] = {
    "default": {},
    "linear": {},
    "dynamic": {"original_max_position_embeddings": True},
    "yarn": {
        "original_max_position_embeddings": True, "attention_factor": False, "beta_fast": False,
        "beta_slow": False, "mscale": False, "mscale_all_dim": False, "truncate": False,
    },
    "llama3": {
        "original_max_position_embeddings": True, "low_freq_factor": True,
        "high_freq_factor": True,
    },
}  # fmt: skip


class RopeScalingSection(Section):
    """`rope_scaling` (or `rope_parameters`) of a config of transformers."""

    old_names: ClassVar[Mapping[str, str]] = {"type": "rope_type"}

    rope_type: RopeType = own(
        "default",
        '`"linear"`: positions / factor; `"dynamic"`: NTK, a larger base for samples longer than '
        'the original length; `"yarn"`; `"llama3"`; `"default"`: no scaling.',
    )
    factor: Positive | None = own(
        None,
        "Longest sequence / original length; >= 1. yarn: null for max_position_embeddings / "
        "original.",
    )
    original_max_position_embeddings: Count | None = own(
        None,
        "Length of the sequences before scaling. dynamic: the `max_position_embeddings` of "
        "transformers.",
    )
    attention_factor: Positive | None = own(
        None, "yarn: factor of queries and keys; null: from `factor`, `mscale`, `mscale_all_dim`."
    )
    beta_fast: Positive = own(32.0, "yarn: rotations from which channels are not scaled.")
    beta_slow: Positive = own(1.0, "yarn: rotations up to which channels are scaled by factor.")
    mscale: Positive | None = own(
        None, "yarn: weight of log(factor) in the numerator of the attention factor."
    )
    mscale_all_dim: Positive | None = own(
        None, "yarn: weight of log(factor) in the denominator of the attention factor."
    )
    truncate: bool = own(True, "yarn: round the range of channels to integers.")
    low_freq_factor: Positive | None = own(
        None, "llama3: wavelengths above original length / this are scaled by factor."
    )
    high_freq_factor: Positive | None = own(
        None, "llama3: wavelengths below original length / this are not scaled."
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and "rope_theta" in raw:
            raise ValueError("rope_theta is model.rotary_base here: move its value there")
        if isinstance(raw, Mapping) and "partial_rotary_factor" in raw:
            raise ValueError(
                "partial_rotary_factor is model.rotary_percent here: move its value there"
            )
        return raw

    def hf_keys(self) -> dict[str, Any]:
        """Return the keys of transformers that `rope_type` uses, without null."""
        names = ("rope_type", "factor", *_KEYS[self.rope_type])
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @rule("rope_type", *(name for keys in _KEYS.values() for name in keys), "factor")
    def _keys_fit_the_type(self) -> Iterator[str]:
        kind, keys = self.rope_type, _KEYS[self.rope_type]
        if kind not in ("default", "yarn") and self.factor is None:
            yield f"model.rope_scaling.factor is missing: rope_type '{kind}' needs it"
        for name, needed in keys.items():
            if needed and getattr(self, name) is None:
                yield f"model.rope_scaling.{name} is missing: rope_type '{kind}' needs it"
        known = {"rope_type", *keys, *(() if kind == "default" else ("factor",))}
        for name, field in type(self).model_fields.items():
            if name not in known and getattr(self, name) != field.default:
                used = ", ".join(other for other, names in _KEYS.items() if name in names)
                yield (
                    f"model.rope_scaling.{name} has no effect on rope_type '{kind}', only on "
                    f"{used or 'the other types'}: remove it"
                )

    @rule("factor", "low_freq_factor", "high_freq_factor")
    def _ranges(self) -> Iterator[str]:
        if self.factor is not None and self.factor < 1:
            yield f"model.rope_scaling.factor ({self.factor:g}) must be at least 1"
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            yield (
                f"model.rope_scaling.low_freq_factor ({low:g}) must be below high_freq_factor "
                f"({high:g})"
            )
