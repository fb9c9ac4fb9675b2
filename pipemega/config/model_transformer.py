"""The keys that the built-in transformers have in common, with Megatron's names."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pipemega.config.key_kinds import own, rule
from pipemega.config.mesh import MeshSection
from pipemega.config.model_registry import ModelSection
from pipemega.config.value_types import Count, Fraction


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
