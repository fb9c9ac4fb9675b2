"""`model` with type "vit": a vision transformer that classifies images."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pipemega.config.key_kinds import own, rule
from pipemega.config.model_registry import register_model
from pipemega.config.model_transformer import TransformerSection, near_multiples
from pipemega.config.value_types import Count, Fraction, Positive

# Name -> hidden_size, num_layers, num_attention_heads.
_SIZES = {
    "Ti": (192, 12, 3),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "H": (1280, 32, 16),
}


@register_model("vit")
class ViTSection(TransformerSection):
    """A vision transformer."""

    builder = "pipemega.models.registered_vit"
    other_layers = ("patch embedding", "head")
    variant_keys: ClassVar[tuple[str, ...]] = (
        "hidden_size", "num_layers", "num_attention_heads", "patch_size",
    )  # fmt: skip
    type: Literal["vit"] = own("vit", "Type of the model.")

    variant: (
        Literal[
            "Ti/16", "S/8", "S/16", "S/32", "B/8", "B/16", "B/32", "L/14", "L/16", "L/32",
            "H/14", "H/16",
        ]
        | None
    ) = own(
        None,
        "Name of a standard model: sets hidden_size, num_layers, num_attention_heads and "
        "patch_size, unless they are given.",
    )  # fmt: skip
    num_layers: Count = own(12, "Number of transformer blocks.")
    hidden_size: Count = own(768, "Hidden size of the transformer.")
    num_attention_heads: Count = own(12, "Number of attention heads.")
    image_size: Count = own(224, "Height and width of the images; a multiple of patch_size.")
    patch_size: Count = own(16, "Height and width of a patch.")
    num_channels: Count = own(3, "Channels of the images.")
    num_classes: Count = own(1000, "Number of classes.")
    pool: Literal["class", "mean"] = own(
        "class", "Input of the head: a class token before the patches, or the mean of the patches."
    )
    attention_dropout: Fraction = own(0.0, "Dropout probability of the attention weights.")
    hidden_dropout: Fraction = own(0.0, "Dropout probability of embeddings and residuals.")
    drop_path: Fraction = own(
        0.0,
        "Stochastic depth: probability that a sample skips a residual branch of the last block; it "
        "grows linearly from 0 in the first block of the model.",
    )
    norm_epsilon: Positive = own(1e-6, "Epsilon of the normalization layers.")
    init: Literal["torch", "jax"] = own(
        "jax",
        "Initial weights: those of the original ViT in JAX (the head is 0), or torch's defaults of "
        "linear layers and convolutions.",
    )
    label_smoothing: Fraction = own(
        0.0, "Share of the target probability that is spread over the classes."
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        name, _, patch = str(raw.get("variant")).partition("/")
        if name not in _SIZES or not patch.isdecimal():  # no variant, or an error of its type
            return raw
        return {**dict(zip(cls.variant_keys, (*_SIZES[name], int(patch)), strict=True)), **raw}

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    def sample(self, context: Any) -> Any:
        return self.above("sample")(self, context)

    def computed_values(self) -> Iterator[tuple[str, str, str]]:
        if self.ffn_hidden_size is None:
            why = f"hidden_size {self.hidden_size} x 4"
            yield "model.ffn_hidden_size", str(self.feed_forward_size), why

    @rule("hidden_size", "num_attention_heads", "variant")
    def _heads_divide_the_hidden_size(self) -> Iterator[str]:
        heads, hidden = self.num_attention_heads, self.hidden_size
        if hidden % heads:
            yield (
                f"model.hidden_size ({hidden}) must be a multiple of model.num_attention_heads "
                f"({heads}); the nearest {near_multiples(hidden, heads)}"
            )

    @rule("image_size", "patch_size", "variant")
    def _patches_fill_the_image(self) -> Iterator[str]:
        image, patch = self.image_size, self.patch_size
        if image % patch:
            yield (
                f"model.image_size ({image}) must be a multiple of model.patch_size ({patch}); the "
                f"nearest {near_multiples(image, patch)}"
            )
