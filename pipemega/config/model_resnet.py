"""`model` with type "resnet": a residual network for images."""

from collections.abc import Iterable
from typing import Any, Literal

from pipemega.config.key_kinds import own, rule
from pipemega.config.model_registry import ModelSection, register_model
from pipemega.config.value_types import Count, Fraction

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

    builder = "pipemega.models.registered_resnet"

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
