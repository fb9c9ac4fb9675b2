"""The ViT as a registered model type: what its section of the config delegates to."""

from typing import Any

import torch
from torch import Tensor

from pipemega.config.model_vit import ViTSection
from pipemega.kernels import Kernels
from pipemega.models.build_model import ModelContext
from pipemega.models.vit import vit
from pipemega.models.vit_config import ViTConfig
from pipemega.pipeline.module import PipelineModule


def build(section: ViTSection, context: ModelContext) -> PipelineModule:
    """Return the ViT."""
    config = ViTConfig.of(context.config)
    kernels = Kernels.detect("cpu" if context.device.type == "meta" else context.device)
    return vit(config, kernels, boundary=_hidden(config, context))


def _hidden(config: ViTConfig, context: ModelContext) -> Tensor:
    """Return the message between two layers, as a meta tensor."""
    length = -(-config.length // context.tensor) if config.sequence_parallel else config.length
    return torch.empty(
        context.micro_batch_size,
        length,
        config.hidden_size,
        dtype=context.dtype,
        device="meta",
        requires_grad=True,
    )


def sample(section: ViTSection, context: ModelContext) -> tuple[Any, Any]:
    """Return images and class ids of one micro-batch."""
    shape = (section.num_channels, section.image_size, section.image_size)
    images = torch.empty(context.micro_batch_size, *shape)
    return images, torch.empty(context.micro_batch_size, dtype=torch.int64)
