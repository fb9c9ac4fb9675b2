"""ResNet as a list of LayerSpecs: stem, blocks, head.

    position      0      1 .. N     N+1
    layer         stem   blocks     head

The message between layers is an image [batch, channels, height, width]. The tensors of a layer have
torchvision's names; `ResNet.state_names` maps the names of the whole model.

Source: He et al. 2015, arXiv:1512.03385; the stride of a bottleneck is in its 3 x 3 convolution, as
in torchvision.

The model type "resnet" of the config: what its section delegates to.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.config.sections.image_model_sections import ResNetSection
from pipemega.errors import ConfigError
from pipemega.models.build_model import ModelContext, with_values
from pipemega.models.vit import ClassificationLoss
from pipemega.pipeline.model.batch_norm import Deferral
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.spec import LayerSpec


class Stem(nn.Module):
    """The first convolution.

    Shape:
        x [batch, in, size, size]  ->  [batch, out, size / 4, size / 4], or of equal size for CIFAR
    """

    def __init__(self, inputs: int, outputs: int, *, cifar: bool) -> None:
        super().__init__()
        self.cifar = cifar
        size, stride = (3, 1) if cifar else (7, 2)
        self.conv1 = _convolution(inputs, outputs, size, stride)
        self.bn1 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return x if self.cifar else F.max_pool2d(x, 3, stride=2, padding=1)


class ResidualBlock(nn.Module):
    """relu(F(x) + x), where F has two 3 x 3 convolutions, or the three of a bottleneck.

        two            3 x 3 (stride), 3 x 3
        bottleneck     1 x 1, 3 x 3 (stride), 1 x 1 with four times the channels

    Args:
        width: channels of the 3 x 3 convolutions.
        zero_init: the last norm starts with weight 0, so the block with the identity.

    Shape:
        x [batch, inputs, size, size]  ->  [batch, outputs, size / stride, size / stride]
    """

    def __init__(
        self, inputs: int, width: int, stride: int, *, bottleneck: bool, zero_init: bool
    ) -> None:
        super().__init__()
        outputs = width * _expansion(bottleneck)
        shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.count = len(shapes)
        for number, shape in enumerate(shapes, 1):
            self.add_module(f"conv{number}", _convolution(*shape))
            self.add_module(f"bn{number}", nn.BatchNorm2d(shape[1]))
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            convolution = _convolution(inputs, outputs, 1, stride)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))
        if zero_init:
            nn.init.zeros_(self.get_parameter(f"bn{self.count}.weight"))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number in range(1, self.count + 1):
            y = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(y))
            if number < self.count:
                y = F.relu(y, inplace=True)
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(y + shortcut, inplace=True)


class Head(nn.Module):
    """Mean over the image, then the logits of the classes.

    Shape:
        x [batch, channels, size, size]  ->  [batch, classes]
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class ResNet(PipelineModule):
    """A ResNet; `pipemega.module_state_dict` returns its tensors with torchvision's names.

    Args:
        section: sizes and options.
        micro_batch_size, dtype: samples in a message between stages, and its dtype.
    """

    def __init__(self, section: ResNetSection, micro_batch_size: int, dtype: torch.dtype) -> None:
        named = list(_layers(section))
        self._prefixes = tuple(prefix for prefix, _ in named)
        size = section.image_size
        self._images = micro_batch_size, section.num_channels, size, size
        self._dtype = dtype
        deferral: Deferral = section.batch_norm == "deferred"
        super().__init__(
            [spec for _, spec in named],
            LayerSpec(ClassificationLoss, section.num_classes, section.label_smoothing),
            boundary=self._message,
            deferred_batch_norm="sync" if section.sync else deferral,
        )

    @torch.no_grad()
    def _message(self, position: int) -> Tensor:
        """Return the input of a layer on the meta device."""
        x = torch.empty(self._images, device="meta")
        for layer in self.meta_layers[:position]:
            x = layer.eval()(x)
        return x.detach().to(self._dtype).requires_grad_()

    def state_names(self) -> dict[str, str]:
        layers = enumerate(zip(self._prefixes, self.meta_layers, strict=True))
        return {
            prefix + name: f"layers.{position}.{name}"
            for position, (prefix, layer) in layers
            for name in layer.state_dict()
        }

    def module_name(self, logical: str) -> str:
        _, position, name = logical.split(".", 2)
        return self._prefixes[int(position)] + name


def resnet_from_torchvision(
    net: PipelineModule, state: Mapping[str, Tensor], *, new_head: bool = False
) -> PipelineModule:
    """Return the ResNet with the weights and statistics of torchvision's `state_dict()`.

        weights = torchvision.models.resnet50(weights="DEFAULT").state_dict()
        net = resnet_from_torchvision(pipemega.build_model(config, mesh), weights, new_head=True)

    Args:
        net: the model that `build_model` returned.
        new_head: initialize the head, for another number of classes.

    Raises:
        ConfigError: `net` is no ResNet; or a tensor is missing, unknown or of another shape. The
            same on every rank.
    """
    if not isinstance(net, ResNet):
        raise ConfigError(
            "resnet_from_torchvision() takes the model of build_model() with model.type 'resnet'",
            on_every_rank=True,
        )
    names = net.state_names()
    head = {"fc.weight", "fc.bias"} if new_head else set()
    values = {names.get(name, name): value for name, value in state.items() if name not in head}
    return with_values(net, values, {names[name] for name in head})


def _layers(section: ResNetSection) -> Iterator[tuple[str, LayerSpec]]:
    """Yield (prefix of torchvision's names, layer)."""
    channels, bottleneck = section.width, section.has_bottlenecks
    yield "", LayerSpec(Stem, section.num_channels, channels, cifar=section.stem == "cifar")
    for stage, blocks in enumerate(section.blocks):
        width = section.width * 2**stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            spec = LayerSpec(
                ResidualBlock,
                channels,
                width,
                stride,
                bottleneck=bottleneck,
                zero_init=section.zero_init_residual,
            )
            yield f"layer{stage + 1}.{block}.", spec
            channels = width * _expansion(bottleneck)
    yield "", LayerSpec(Head, channels, section.num_classes)


def _expansion(bottleneck: bool) -> int:
    return 4 if bottleneck else 1


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    made = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


def build(section: ResNetSection, context: ModelContext) -> ResNet:
    """Return the ResNet."""
    return ResNet(section, context.micro_batch_size, context.dtype)


def sample(section: ResNetSection, context: ModelContext) -> tuple[Any, Any]:
    """Return the images and the class ids of one micro-batch."""
    size = section.image_size
    images = torch.empty(context.micro_batch_size, section.num_channels, size, size)
    return images, torch.empty(context.micro_batch_size, dtype=torch.int64)
