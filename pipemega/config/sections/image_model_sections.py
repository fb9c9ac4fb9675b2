"""`model` with type "vit": a vision transformer that classifies images.

`model` with type "resnet": a residual network for images.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pipemega.config.declarations import Count, Fraction, Positive, own, rule
from pipemega.config.model_registry import ModelSection, register_model
from pipemega.config.sections.transformer_sections import TransformerSection, near_multiples

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

    builder = "pipemega.models.vit"
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
        "Initial weights: as in the original ViT in JAX (the head is 0), or torch's defaults of "
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


# Depth -> blocks of each of the four stages.
BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}

# The layers besides the blocks: stem and head.
_OTHER_LAYERS = 2


@register_model("resnet")
class ResNetSection(ModelSection):
    """A residual network."""

    builder = "pipemega.models.resnet"

    type: Literal["resnet"] = own("resnet", "Type of the model.")
    depth: Literal[18, 34, 50, 101, 152] = own(50, "Layers with weights; from 50 on: bottlenecks.")
    stem: Literal["imagenet", "cifar"] = own(
        "imagenet",
        '`"imagenet"`: a 7 x 7 convolution and a max pooling, which divide the image size by 4; '
        '`"cifar"`: a 3 x 3 convolution, which keeps it.',
    )
    num_classes: Count = own(1000, "Number of classes.")
    image_size: Count = own(224, "Height and width of an image.")
    num_channels: Count = own(3, "Channels of an image.")
    width: Count = own(64, "Channels of the stem; the standard models have 64.")
    batch_norm: Literal["plain", "deferred"] = own(
        "plain",
        '`"plain"`: each micro-batch updates the running statistics; `"deferred"`: each step '
        "updates them once, from the values of the whole batch.",
    )
    sync: bool = own(
        False,
        'With batch_norm `"deferred"`: normalize each micro-batch with the joint statistics of all '
        "data ranks, as nn.SyncBatchNorm does.",
    )
    zero_init_residual: bool = own(
        False, "Start with blocks that are identities: the last norm of each has weight 0."
    )
    label_smoothing: Fraction = own(
        0.0, "Share of the target probability that is spread over the classes."
    )

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        return BLOCKS[self.depth]

    @property
    def has_bottlenecks(self) -> bool:
        """Whether a block has three convolutions, not two."""
        return self.depth >= 50

    def layer_count(self) -> int:
        return sum(self.blocks) + _OTHER_LAYERS

    def sample(self, context: Any) -> Any:
        return self.above("sample")(self, context)

    @rule("sync", "batch_norm")
    def _only_deferred_statistics_are_joined(self) -> Iterable[str]:
        if self.sync and self.batch_norm != "deferred":
            yield (
                f"model.sync needs model.batch_norm 'deferred', and model.batch_norm is "
                f"{self.batch_norm!r}: set model.batch_norm to 'deferred', or model.sync to false"
            )
