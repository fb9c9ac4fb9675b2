"""The model type "resnet" of the config: what its section delegates to."""

from typing import Any

import torch

from pipemega.config.model_resnet import ResNetSection
from pipemega.models.build_model import ModelContext
from pipemega.models.resnet import ResNet


def build(section: ResNetSection, context: ModelContext) -> ResNet:
    """Return the ResNet."""
    return ResNet(section, context.micro_batch_size, context.dtype)


def sample(section: ResNetSection, context: ModelContext) -> tuple[Any, Any]:
    """Return the images and the class ids of one micro-batch."""
    size = section.image_size
    images = torch.empty(context.micro_batch_size, section.num_channels, size, size)
    return images, torch.empty(context.micro_batch_size, dtype=torch.int64)
