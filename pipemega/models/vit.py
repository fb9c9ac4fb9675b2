"""Vision transformer (ViT) as a list of LayerSpecs.

    position      0                 1 .. L      L + 1
    layer         patch embedding   blocks      head

The message between layers is `hidden` [batch, length, hidden]: the class token, if there is one,
and the patches. Under sequence parallelism it is a slice of the sequence, which is padded to a
multiple of the tensor ranks. No layer reads the padding: attention leaves it out, and the head
drops it.

Source: Dosovitskiy et al. 2020, arXiv:2010.11929.

Sizes and options of a vision transformer.

Initial weights of a ViT.

            weights                                    biases             positions   head
    jax     patches: LeCun normal; blocks: Xavier      patches: 0         N(0, 0.02)  0
            uniform                                    blocks: N(0, 1e-6)
    torch   U(-1/sqrt(in), 1/sqrt(in))                 the same           0           the same

where `in` is the number of inputs of an output. The class token starts at 0.

Sources: google-research/vision_transformer (jax); torch's `nn.Linear` and `nn.Conv2d` (torch).

Weights of a ViT with the names of torchvision's `VisionTransformer`, in both directions.

    torchvision                                     here
    conv_proj                                       layers.0.projection
    class_token                                     layers.0.class_token
    encoder.pos_embedding                           layers.0.positions
    encoder.layers.encoder_layer_<i>.ln_1           layers.<1 + i>.attention_norm
      .self_attention.in_proj_weight, _bias           .attention.qkv.weight, .bias
      .self_attention.out_proj                        .attention.output
      .ln_2, .mlp.0, .mlp.3                           .mlp_norm, .mlp.up, .mlp.down
    encoder.ln                                      layers.<1 + L>.norm
    heads.head                                      layers.<1 + L>.linear

All tensors have the same layout. Files of torchvision's first version name the linear layers
mlp.linear_1 and mlp.linear_2.

The ViT as a registered model type: what its section of the config delegates to.

The loss of image classifiers.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.config import Config
from pipemega.config.sections.image_model_sections import ViTSection
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, DataError
from pipemega.kernels import Kernels
from pipemega.models.build_model import ModelContext, with_values
from pipemega.models.transformer_block import MLP, Block, BlockConfig, DropPath, drop_path_rate
from pipemega.parameters import InitMethod, attach_shard, even_share, normal, shard_of
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.spec import TENSOR_AXIS, LayerSpec
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pipemega.tensor_parallel.collectives import SEQUENCE_DIM, gather_from_tensor, scatter_sequence


@dataclass(frozen=True, kw_only=True)
class ViTConfig(BlockConfig):
    """Sizes and options of a ViT; the keys of `ViTSection` say what they mean.

    Args:
        length: positions of an image: patches, and the class token if there is one.
    """

    first_block: ClassVar[int] = 1

    image_size: int
    patch_size: int
    num_channels: int
    num_classes: int
    pool: Literal["class", "mean"]
    drop_path: float
    init: Literal["torch", "jax"]
    label_smoothing: float
    length: int
    causal: bool = False

    @classmethod
    def of(cls, config: Config) -> "ViTConfig":
        """Return the ViT of the sections `model` and `mesh`.

        Raises:
            ConfigError: the section `model` has another type, or its sizes do not divide by
                mesh.tensor.
        """
        section, mesh = config.model, config.mesh
        if not isinstance(section, ViTSection):
            found = "is missing" if section is None else f"has the type {section.type!r}"
            raise ConfigError(f"the section 'model' {found}, and a ViT needs the type 'vit'")
        even_share(section.num_attention_heads, mesh.tensor, "model.num_attention_heads")
        length = section.num_patches + (section.pool == "class")
        sequence_parallel = mesh.sequence_parallel and mesh.tensor > 1
        own = {f.name for f in fields(cls)}
        return cls(
            **{key: value for key, value in section.model_dump().items() if key in own}
            | {
                "ffn_hidden_size": section.feed_forward_size,
                "num_query_groups": section.num_attention_heads,
                "kv_channels": section.hidden_size // section.num_attention_heads,
                "length": length,
                "sequence_parallel": sequence_parallel,
                "padded_from": length if sequence_parallel and length % mesh.tensor else None,
            }
        )


Init = Literal["torch", "jax"]

# Standard deviation of a normal distribution that is cut off at 2 standard deviations.
_TRUNCATED_STD = 0.87962566103423978


Weights = nn.Conv2d | nn.Linear | ColumnParallelLinear | RowParallelLinear


def initialize_patches(layer: Weights, init: Init) -> None:
    """Set the init methods of the patch embedding."""
    fan_in = _fan_in(layer)
    if init == "jax":
        _set(layer, _truncated_normal(1 / math.sqrt(fan_in)), zero)
    else:
        _initialize_as_torch(layer)


def initialize_linear(layer: Weights, init: Init, blocks: int = 1) -> None:
    """Set the init methods of a linear layer of a block.

    Args:
        blocks: linear layers whose outputs it stacks: query, key and value.
    """
    if init == "jax":
        fan_out, fan_in = shard_of(layer.weight).shape
        bound = math.sqrt(6 / (fan_in + fan_out / blocks))
        _set(layer, uniform(bound), normal(1e-6))
    else:
        _initialize_as_torch(layer)


def initialize_head(layer: Weights, init: Init) -> None:
    """Set the init methods of the head."""
    if init == "jax":
        _set(layer, zero, zero)
    else:
        _initialize_as_torch(layer)


def positions_method(init: Init) -> InitMethod:
    """Return the init method of the position embeddings."""
    return normal(0.02) if init == "jax" else zero


def zero(tensor: Tensor, generator: torch.Generator) -> object:
    """Fill with 0."""
    return tensor.zero_()


def uniform(bound: float) -> InitMethod:
    """Return an initializer with a uniform distribution from -bound to bound."""
    return lambda tensor, generator: tensor.uniform_(-bound, bound, generator=generator)


def _truncated_normal(std: float) -> InitMethod:
    full = std / _TRUNCATED_STD

    def fill(tensor: Tensor, generator: torch.Generator) -> object:
        return nn.init.trunc_normal_(tensor, 0.0, full, -2 * full, 2 * full, generator=generator)

    return fill


def _initialize_as_torch(layer: Weights) -> None:
    method = uniform(1 / math.sqrt(_fan_in(layer)))
    _set(layer, method, method)


def _fan_in(layer: Weights) -> int:
    return math.prod(shard_of(layer.weight).shape[1:])


def _set(layer: Weights, weight: InitMethod, bias: InitMethod) -> None:
    for parameter, method in ((layer.weight, weight), (layer.bias, bias)):
        if parameter is not None:
            set_init_method(parameter, method)


def set_init_method(parameter: Tensor, method: InitMethod) -> None:
    """Let `initialize_parameters` fill the parameter by `method`."""
    assert isinstance(parameter, nn.Parameter)
    attach_shard(parameter, replace(shard_of(parameter), init_method=method))


_EMBEDDING = {
    "conv_proj.": "projection.",
    "class_token": "class_token",
    "encoder.pos_embedding": "positions",
}
_BLOCK = {
    "ln_1.": "attention_norm.",
    "self_attention.in_proj_": "attention.qkv.",
    "self_attention.out_proj.": "attention.output.",
    "ln_2.": "mlp_norm.",
    "mlp.0.": "mlp.up.",
    "mlp.3.": "mlp.down.",
}
_HEAD = {"encoder.ln.": "norm.", "heads.head.": "linear."}
_OLD_NAMES = {"mlp.linear_1.": "mlp.0.", "mlp.linear_2.": "mlp.3."}
_BLOCK_PREFIX = re.compile(r"encoder\.layers\.encoder_layer_(\d+)\.")


def vit_from_torchvision(
    net: PipelineModule, state: Mapping[str, Tensor], *, new_head: bool = False
) -> PipelineModule:
    """Return the ViT with the weights of torchvision's `state_dict()`.

        weights = torchvision.models.vit_b_16(weights="DEFAULT").state_dict()
        net = vit_from_torchvision(pipemega.build_model(config, mesh), weights, new_head=True)

    Args:
        net: the model that `build_model` or `vit` returned.
        new_head: initialize the head, for another number of classes.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape; the same on every rank.
    """
    head = len(net) - 1
    values = {_our_name(name, head): tensor for name, tensor in state.items()}
    if not new_head:
        return with_values(net, values)
    new = {f"layers.{head}.linear.{name}" for name in ("weight", "bias")}
    return with_values(net, {n: v for n, v in values.items() if n not in new}, new)


def vit_to_torchvision(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with torchvision's names.

        torch.save(vit_to_torchvision(engine.parameter_state()), "vit.pth")

    Args:
        parameters: logical name -> unsharded parameter of a ViT.

    Raises:
        ConfigError: the ViT has no class token, which torchvision's has; or it is no ViT.
    """
    if "layers.0.projection.weight" not in parameters:
        raise ConfigError("these are not the parameters of a ViT: they have no patch embedding")
    if "layers.0.class_token" not in parameters:
        raise ConfigError(
            "torchvision's VisionTransformer has a class token, and this ViT has none "
            "(model.pool 'mean'): torchvision cannot load its weights"
        )
    head = max(int(name.split(".")[1]) for name in parameters)
    return {_their_name(name, head): tensor for name, tensor in parameters.items()}


def _our_name(name: str, head: int) -> str:
    found = _BLOCK_PREFIX.match(name)
    if found is None:
        ours = _renamed(name, _EMBEDDING)
        if ours is not None:
            return f"layers.0.{ours}"
        ours = _renamed(name, _HEAD)
        return name if ours is None else f"layers.{head}.{ours}"
    inner = name[found.end() :]
    inner = _renamed(inner, _OLD_NAMES) or inner
    first = ViTConfig.first_block
    return f"layers.{first + int(found[1])}.{_renamed(inner, _BLOCK) or inner}"


def _their_name(name: str, head: int) -> str:
    _, position, inner = name.split(".", 2)
    number = int(position)
    table = _EMBEDDING if number == 0 else _HEAD if number == head else _BLOCK
    theirs = _renamed(inner, {ours: theirs for theirs, ours in table.items()}) or inner
    if table is not _BLOCK:
        return theirs
    return f"encoder.layers.encoder_layer_{number - ViTConfig.first_block}.{theirs}"


def _renamed(name: str, table: Mapping[str, str]) -> str | None:
    """Return the name with another start; None: the table has no start of it."""
    for start, other in table.items():
        if name.startswith(start):
            return other + name[len(start) :]
    return None


class ClassificationLoss(nn.Module):
    """Cross entropy of class ids or soft labels, as the mean over the micro-batch.

    Args:
        num_classes: number of classes of the model.
        label_smoothing: share of the target probability that is spread over the classes.

    Shape:
        logits [batch, classes], labels [batch] (ids) or [batch, classes] (probabilities)  ->  []

    Raises:
        DataError: labels of another shape; on the CPU also ids outside the classes.
    """

    def __init__(self, num_classes: int, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self._num_classes, self._label_smoothing = num_classes, label_smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        # In half precision the sum over the classes would lose digits.
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if labels.is_floating_point():
            self._check_shape(labels, (len(logits), self._num_classes), "soft labels")
            labels = labels.to(logits.dtype)
        else:
            self._check_shape(labels, (len(logits),), "class ids")
            self._check_ids(labels)
            labels = labels.long()
        return F.cross_entropy(logits, labels, label_smoothing=self._label_smoothing)

    def _check_shape(self, labels: Tensor, shape: tuple[int, ...], kind: str) -> None:
        if labels.shape != shape:
            raise DataError(
                f"the {kind} of a micro-batch must have the shape {list(shape)}, and theirs is "
                f"{list(labels.shape)}: labels are class ids [batch], or probabilities [batch, "
                f"model.num_classes]"
            )

    def _check_ids(self, labels: Tensor) -> None:
        # Reading values of a GPU would wait for it; its kernel checks them itself.
        if labels.device.type != "cpu" or not len(labels):
            return
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self._num_classes:
            wrong = low if low < 0 else high
            raise DataError(
                f"a label is class {wrong}, and the model has the classes 0 to "
                f"{self._num_classes - 1}: set model.num_classes to the data's number of classes"
            )


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
                f"model.image_size twice), and the images of this batch are {list(images.shape)}"
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
        assert isinstance(self.mlp, MLP), "a ViT has no experts"
        for linear in (self.attention.output, self.mlp.up, self.mlp.down):
            initialize_linear(linear, config.init)
        if drop_path:
            self.dropout = nn.Sequential(self.dropout, DropPath(drop_path))
            self.mlp.output_is_kept = True


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
