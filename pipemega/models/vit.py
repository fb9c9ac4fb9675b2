"""Vision transformer (ViT) as a list of LayerSpecs.

    position      0                 1 .. L      L + 1
    layer         patch embedding   blocks      head

The message between layers is `hidden` [batch, length, hidden]: the class token, if there is one,
and the patches. Under sequence parallelism it is a slice of the sequence, which is padded to a
multiple of the tensor ranks. No layer reads the padding: attention leaves it out, and the head
drops it.

Source: Dosovitskiy et al. 2020, arXiv:2010.11929.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.distributed.mesh import Axis
from pipemega.errors import DataError
from pipemega.kernels import Kernels
from pipemega.models.block import Block
from pipemega.models.classification_loss import ClassificationLoss
from pipemega.models.drop_path import DropPath, drop_path_rate
from pipemega.models.vit_config import ViTConfig
from pipemega.models.vit_init import (
    initialize_head,
    initialize_linear,
    initialize_patches,
    positions_method,
    set_init_method,
    zero,
)
from pipemega.pipeline.module import PipelineModule
from pipemega.pipeline.spec import TENSOR_AXIS, LayerSpec
from pipemega.tensor_parallel.collectives import SEQUENCE_DIM, gather_from_tensor, scatter_sequence


def vit(
    config: ViTConfig, kernels: Kernels | None = None, *, boundary: Any = None
) -> PipelineModule:
    """Return the model with its loss; inputs are images, labels class ids or probabilities.

    Args:
        kernels: selects the norms; torch's by default.
        boundary: see `PipelineModule`.

    Shape:
        images [batch, channels, image, image]  ->  logits [batch, classes]
    """
    kernels, c = kernels or Kernels.detect("cpu"), config
    net = PipelineModule(
        [
            LayerSpec(PatchEmbedding, c, TENSOR_AXIS),
            *(
                LayerSpec(
                    ViTBlock, c, kernels, TENSOR_AXIS, drop_path_rate(c.drop_path, i, c.num_layers)
                )
                for i in range(c.num_layers)
            ),
            LayerSpec(ClassifierHead, c, kernels, TENSOR_AXIS),
        ],
        loss_fn=LayerSpec(ClassificationLoss, c.num_classes, c.label_smoothing),
        boundary=boundary,
    )
    net.checkpoints = c.checkpoints
    return net


class PatchEmbedding(nn.Module):
    """Maps patches of images to hidden; adds a class token and positions; then dropout.

    Every tensor rank computes the whole layer.

    Shape:
        images [batch, channels, image, image]  ->  hidden [batch, length (/ T), hidden]
    """

    def __init__(self, config: ViTConfig, axis: Axis) -> None:
        super().__init__()
        c = config
        self._config, self._axis = c, axis
        self.projection = nn.Conv2d(c.num_channels, c.hidden_size, c.patch_size, c.patch_size)
        initialize_patches(self.projection, c.init)
        self.class_token: nn.Parameter | None = None
        if c.pool == "class":
            self.class_token = nn.Parameter(torch.zeros(1, 1, c.hidden_size))
            set_init_method(self.class_token, zero)
        self.positions = nn.Parameter(torch.zeros(1, c.length, c.hidden_size))
        set_init_method(self.positions, positions_method(c.init))
        self.dropout = nn.Dropout(c.hidden_dropout)

    def forward(self, images: Tensor) -> Tensor:
        self._check(images)
        patches = self.projection(images.to(self.projection.weight.dtype))
        hidden: Tensor = patches.flatten(2).transpose(1, 2)  # [batch, patches, hidden]
        if self.class_token is not None:
            token = self.class_token.expand(len(hidden), -1, -1)
            hidden = torch.cat([token, hidden], SEQUENCE_DIM)
        hidden = self.dropout(hidden + self.positions)
        if self._config.sequence_parallel:
            padding = -hidden.shape[SEQUENCE_DIM] % self._axis.size
            hidden = scatter_sequence(F.pad(hidden, (0, 0, 0, padding)), self._axis)
        return hidden

    def _check(self, images: Tensor) -> None:
        c = self._config
        shape = (c.num_channels, c.image_size, c.image_size)
        if images.shape[1:] != shape:
            raise DataError(
                f"the ViT takes images [batch, {', '.join(map(str, shape))}] (model.num_channels, "
                f"model.image_size twice), and those of this batch are {list(images.shape)}"
            )
        if not images.is_floating_point():
            raise DataError(
                f"the ViT takes images of floating-point numbers, and those of this batch are "
                f"{str(images.dtype).removeprefix('torch.')}: scale and normalize them first"
            )


class ViTBlock(Block):
    """A block whose residual branches a sample skips with probability `drop_path`."""

    def __init__(self, config: ViTConfig, kernels: Kernels, axis: Axis, drop_path: float) -> None:
        super().__init__(config, kernels, axis)
        initialize_linear(self.attention.qkv, config.init, blocks=3)
        for linear in (self.attention.output, self.mlp.up, self.mlp.down):
            initialize_linear(linear, config.init)
        if drop_path:
            self.dropout = nn.Sequential(self.dropout, DropPath(drop_path))


class ClassifierHead(nn.Module):
    """Norm, then a linear layer of the class token or of the mean over the patches.

    Shape:
        hidden [batch, length (/ T), hidden]  ->  logits [batch, classes], on every tensor rank
    """

    def __init__(self, config: ViTConfig, kernels: Kernels, axis: Axis) -> None:
        super().__init__()
        self._config, self._axis = config, axis
        self.norm = kernels.layer_norm(config.hidden_size, eps=config.norm_epsilon)
        self.linear = nn.Linear(config.hidden_size, config.num_classes)
        initialize_head(self.linear, config.init)

    def forward(self, hidden: Tensor) -> Tensor:
        c = self._config
        if c.sequence_parallel:
            hidden = gather_from_tensor(hidden, self._axis, SEQUENCE_DIM)
        if c.pool == "class":
            pooled = self.norm(hidden[:, 0])
        else:
            pooled = self.norm(hidden[:, : c.length]).mean(1)
        return self.linear(pooled)  # type: ignore[no-any-return]
