"""HFPipelineModule: a transformers model as a list of layers.

from_pretrained: a Hugging Face folder or config -> HFPipelineModule.

The model type "hf" of the config: what its section delegates to.

The transformers model of layers that one process has built; it shares their parameters.
"""

import copy
import json
import os
from collections.abc import Container, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.config.sections.hf_section import LONGEST_DEFAULT, HFSection
from pipemega.errors import ConfigError
from pipemega.hf.description import ModelDescription
from pipemega.hf.families import family_of, refuse_other_class_loss, refuse_unknown_family
from pipemega.hf.model_facts import (
    VocabularyNames,
    declared_positions,
    equality_key,
    refuse_missing_positions,
    untrained_rotary_positions,
)
from pipemega.hf.placeholders import import_transformers, parameters_on_meta
from pipemega.hf.routed_experts import auxiliary_losses
from pipemega.hf.segments import LayerArguments, Segment, build_layer
from pipemega.hf.tasks import (
    FLOAT_INPUT_SHAPES,
    TEXT_CLASSIFICATION,
    TokenLoss,
    class_loss,
    model_class_of,
    task_of,
)
from pipemega.hf.weights.key_mapping import tied_names
from pipemega.hf.weights.safetensors_files import WeightSource, is_transposed
from pipemega.hf.weights.safetensors_source import SafetensorsSource
from pipemega.lora.adapters import is_adapter, with_adapter
from pipemega.models.build_model import ModelContext
from pipemega.moe.router import RouterConfig
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.spec import EXPERT_AXIS, TENSOR_AXIS, LayerSpec, TiedLayerSpec


class HFPipelineModule(PipelineModule):
    """A transformers model with one stack of layers, or with an encoder and a decoder.

        layers    segment 0, layers of the stack, segment 1      (and the decoder's, segment 2)

    Args:
        description: the description of the model.
        source: reads the first values of the parameters; None: initialise as HF does.
        folder: the folder with config.json and the tokenizer of the model; None: the model was
            built from a `PretrainedConfig`.
        loss_fn: maps (output, labels) to the loss; None: the loss of the task.
        losses: the auxiliary losses of the routers of experts; None: there are none.

    Raises:
        ConfigError: the model has no auxiliary losses that fit.
    """

    def __init__(
        self,
        description: ModelDescription,
        source: WeightSource | None = None,
        folder: Path | None = None,
        loss_fn: Any = None,
        losses: RouterConfig | None = None,
    ) -> None:
        self._losses = losses
        self.description, self.source, self.folder = description, source, folder
        self._vocabulary = VocabularyNames(description)
        self._arguments = LayerArguments(description)
        layers: list[LayerSpec] = []
        self._layer_names: dict[int, str] = {}  # position -> name of the layer in HF's model
        for index, (stack, path) in enumerate(description.places):
            if index == description.first_of_stack[stack]:
                layers.append(self._segment(stack, source))
            self._layer_names[len(layers)] = path
            layers.append(self._layer(index, source))
        layers.append(self._segment(len(description.stacks), source))
        super().__init__(layers, loss_fn=self._loss() if loss_fn is None else loss_fn)

    @property
    def hf_config(self) -> Any:
        """The `PretrainedConfig` of the model."""
        return self.description.config

    def checkpoint_metadata(self) -> dict[str, Any]:
        config = self.hf_config.to_dict()
        config["architectures"] = [self.description.class_name]
        # JSON has no other values.
        plain = json.loads(json.dumps(config, default=str))
        folder = None if self.folder is None else str(self.folder.absolute())
        return {"hf": {"config": plain, "folder": folder}}

    @property
    def follows_positions(self) -> bool:
        """Whether attention follows position_ids that restart: packed documents stay separate."""
        return self._arguments.follow_positions

    def _segment(self, number: int, source: WeightSource | None) -> LayerSpec:
        d, names = self.description, self._vocabulary
        arguments = (d, self._arguments, number, source, TENSOR_AXIS)
        is_last = number == len(d.stacks)
        has_table = any(names.is_table(name) for name in d.segment_modules[number])
        if names.head_is_tied if is_last else (has_table and names.is_tied):
            attribute = f"hf.{names.table}.weight"
            return TiedLayerSpec("words", Segment, *arguments, tied_weight_attr=attribute)
        return LayerSpec(Segment, *arguments)

    def _layer(self, index: int, source: WeightSource | None) -> LayerSpec:
        d = self.description
        build = partial(build_layer)
        build.__name__ = type(d.layers[index]).__name__  # type: ignore[attr-defined]
        arguments = (
            d, self._arguments, index, source, TENSOR_AXIS, EXPERT_AXIS, self._losses
        )  # fmt: skip
        shared = family_of(d.config_of_layer(index)).shared
        spec = LayerSpec(build, *arguments)
        if shared:
            key = f"stack {d.places[index][0]}"
            spec = TiedLayerSpec(key, build, *arguments, tied_weight_attr=shared)
        spec.equality_key = equality_key(d, index)
        return spec

    def _loss(self) -> Any:
        if self._losses is not None and self._vocabulary.head is None:
            raise ConfigError(
                f"model.moe_aux_loss_coeff and model.moe_z_loss_coeff need a loss of tokens, and "
                f"{self.description.class_name} has none: set them to 0",
                on_every_rank=True,
            )
        if self.description.special.loss is not None:
            return self.description.special.loss
        if self._vocabulary.head is None:
            refuse_other_class_loss(self.hf_config)
            return class_loss
        head = self.description.model.get_output_embeddings()
        return LayerSpec(TokenLoss, head.out_features, TENSOR_AXIS, self._losses is not None)

    def hf_name(self, logical: str) -> str:
        """Return HF's name of a logical tensor `layers.<position>.<name>`."""
        _, position, inner = logical.split(".", 2)
        if int(position) in self._layer_names:
            return f"{self._layer_names[int(position)]}.{inner}"
        name = inner.removeprefix("hf.")
        return self.description.tied.get(name, name)

    def module_name(self, logical: str) -> str:
        _, position, *inner = logical.split(".", 2)
        return self.hf_name(logical) if inner else self._layer_names.get(int(position), "")

    def other_names(self, name: str) -> tuple[str, ...]:
        return tied_names(self.description.model).get(name, (name,))[1:]  # the saved one is first

    def is_output_head(self, position: int, inner: str) -> bool:
        head = self._vocabulary.head
        return head is not None and self.module_name(f"layers.{position}.{inner}") == head

    def logical_name(self, hf: str) -> str:
        """Return the logical name of HF's tensor `hf`, which may be a tied name.

        Raises:
            ConfigError: the model has no such tensor.
        """
        name = self.description.tied.get(hf, hf)
        if name not in self._logical_names:
            raise ConfigError(f"{self.description.class_name} has no tensor {hf!r}")
        return self._logical_names[name]

    @cached_property
    def _logical_names(self) -> dict[str, str]:
        """HF's name -> logical name; a tied parameter has the name from its first layer."""
        names: dict[str, str] = {}
        tied: set[tuple[str, str]] = set()
        for position, (spec, layer) in enumerate(zip(self.specs, self.meta_layers, strict=True)):
            for inner in layer.state_dict():
                logical, tie = f"layers.{position}.{inner}", spec.ties.get(inner)
                if tie is None or tie not in tied:
                    names[self.hf_name(logical)] = logical
            tied |= set(spec.ties.values())
        return names


def from_pretrained(
    path_or_config: Any,
    *,
    task: str | None = None,
    pretrained: bool = True,
    sequence_parallel: bool = False,
    attn_implementation: str | None = None,
    num_labels: int | None = None,
    loss_fn: Any = None,
    moe_aux_loss_coeff: float = 0.0,
    moe_z_loss_coeff: float = 0.0,
) -> HFPipelineModule:
    """Return a Hugging Face model as layers; nothing is downloaded, no remote code runs.

    Args:
        path_or_config: a folder with config.json and safetensors, or a `PretrainedConfig`.
        task: a key of `pipemega.hf.tasks.TASKS`, such as "causal-lm"; by default the task of the
            config's `architectures`.
        pretrained: load the weights of the folder; False: initialise as HF does.
        sequence_parallel: shard activations between the layers over the sequence
            (`mesh.sequence_parallel`).
        attn_implementation: "eager", "sdpa", "flash_attention_2"...; by default HF's choice.
        num_labels: number of classes of a classification task; by default the config's number.
        loss_fn: maps (output, labels) to the loss, as for `PipelineModule`; by default the loss of
            the task. The output is the logits; SAM's output is (pred_masks, iou_scores).
        moe_aux_loss_coeff, moe_z_loss_coeff: weights of the losses that balance the experts of each
            layer, and that keep the logits of its router small; not with a `loss_fn`.

    Raises:
        ConfigError: names the folder, the key or the version, and the way out; the same on every
            rank.
    """
    folder, config = read_config(path_or_config)
    if pretrained and folder is None:
        raise ConfigError(
            "from_pretrained() got a config, which has no weights: give the folder of the "
            "weights, or pretrained=False to initialise the model",
            on_every_rank=True,
        )
    config = copy.deepcopy(config)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    if num_labels is not None:
        config.num_labels = num_labels
    description = ModelDescription(
        config, model_class_of(config, task), sequence_parallel=sequence_parallel
    )
    source: WeightSource | None = None
    if pretrained:
        assert folder is not None
        source = SafetensorsSource(folder, description.config, description.class_name)
    losses = auxiliary_losses(description, moe_aux_loss_coeff, moe_z_loss_coeff)
    if losses is not None and loss_fn is not None:
        raise ConfigError(
            "moe_aux_loss_coeff and moe_z_loss_coeff need the loss of the task, whose weights they "
            "have: leave loss_fn out, or set them to 0",
            on_every_rank=True,
        )
    return HFPipelineModule(description, source, folder, loss_fn, losses)


def read_config(path_or_config: Any) -> tuple[Path | None, Any]:
    """Return (folder, PretrainedConfig)."""
    transformers = import_transformers()
    if isinstance(path_or_config, transformers.PretrainedConfig):
        return None, path_or_config
    if not isinstance(path_or_config, str | os.PathLike):
        raise ConfigError(
            f"from_pretrained() takes a folder or a PretrainedConfig, not "
            f"{type(path_or_config).__name__}",
            on_every_rank=True,
        )
    folder = Path(path_or_config)
    _check_config_file(folder, transformers.CONFIG_MAPPING)
    return folder, transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )


def _check_config_file(folder: Path, families: Container[str]) -> None:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no config.json: give the folder of a model as save_pretrained writes "
            f"it; nothing is downloaded",
            on_every_rank=True,
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is damaged: {error}", on_every_rank=True) from error
    refuse_unknown_family(folder, content, families)


def build(section: HFSection, context: ModelContext) -> HFPipelineModule:
    """Return the model of the folder; without its weights on the meta device."""
    mesh = context.config.mesh
    net = from_pretrained(
        section.folder,
        task=section.task,
        pretrained=section.pretrained and context.device.type != "meta",
        sequence_parallel=mesh.sequence_parallel and context.tensor > 1,
        attn_implementation=section.attn_implementation,
        num_labels=section.num_labels,
        moe_aux_loss_coeff=section.moe_aux_loss_coeff,
        moe_z_loss_coeff=section.moe_z_loss_coeff,
    )
    refuse_missing_positions(net.description, _sequence_length(section, net.hf_config))
    return net


def remarks(section: HFSection) -> Iterator[str]:
    """Yield warnings for the log."""
    config = _hf_config(section)
    warning = untrained_rotary_positions(config, _sequence_length(section, config))
    if warning is not None:
        yield warning


def sample(section: HFSection, context: ModelContext) -> tuple[Any, Any] | None:
    """Return (inputs, labels) of one micro-batch; None: token ids are the only input."""
    config, size = _hf_config(section), context.micro_batch_size
    model_class = model_class_of(config, section.task)
    main_input, task = model_class.main_input_name, task_of(config, model_class)
    shape = FLOAT_INPUT_SHAPES.get(main_input)
    tokens = torch.empty(size, _sequence_length(section, config), dtype=torch.int64)
    if task == "token-classification":
        return tokens, tokens.clone()
    if shape is not None and not config.is_encoder_decoder:
        return {main_input: torch.empty(size, *shape(config))}, tokens[:, 0]
    if not config.is_encoder_decoder:
        return (tokens, tokens[:, 0]) if task in TEXT_CLASSIFICATION else None
    main = tokens if shape is None else torch.empty(size, *shape(config))
    return {main_input: main, "decoder_input_ids": tokens.clone()}, tokens.clone()


def sample_tokens(section: HFSection) -> int | None:
    """Return `seq_length`, or its default; None for a model whose data are not token ids alone."""
    config = _hf_config(section)
    model_class = model_class_of(config, section.task)
    is_text = model_class.main_input_name == "input_ids" and not config.is_encoder_decoder
    trains_on_text = is_text and task_of(config, model_class) not in TEXT_CLASSIFICATION
    return _sequence_length(section, config) if trains_on_text else None


def vocabulary(section: HFSection) -> int | None:
    """Return the vocabulary size of the model; None if it has none."""
    return getattr(_hf_config(section).get_text_config(), "vocab_size", None)


def _sequence_length(section: HFSection, config: Any) -> int:
    if section.seq_length is not None:
        return section.seq_length
    return min([LONGEST_DEFAULT, *declared_positions(config).values()])


def _hf_config(section: HFSection) -> Any:
    _, config = read_config(section.folder)
    return config


def unsplit_model(net: HFPipelineModule, layers: Mapping[int, nn.Module]) -> Any:
    """Return the transformers model with the parameters of `layers`, in evaluation mode.

    No parameter is copied, so what changes them changes both; except weights with an adapter, which
    is merged into the copy.

    Args:
        layers: position in `net` -> layer, for all positions, built without tensor ranks.

    Raises:
        ConfigError: layers lack a parameter of the model, or have others.
    """
    tensors: dict[str, Tensor] = {}
    for position, layer in layers.items():
        for inner, tensor in layer.state_dict(keep_vars=True).items():
            if is_adapter(inner):
                continue
            value = with_adapter(layer, inner, tensor.detach())
            value = value.T if is_transposed(tensor) else value
            # Tied parameters have the same name.
            tensors.setdefault(net.hf_name(f"layers.{position}.{inner}"), value)
    described = net.description
    with parameters_on_meta():
        model: Any = type(described.model)._from_config(
            copy.deepcopy(described.config), dtype=torch.get_default_dtype()
        )
    _, others = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    # Each layer has its own copy of what only the first one has in the model.
    shared = tuple(f".{name}" for name in family_of(described.config).shared)
    unexpected = [name for name in others if not name.endswith(shared)]
    if unexpected or missing:
        raise ConfigError(
            f"{described.class_name} of transformers cannot be made of the layers: they lack "
            f"{', '.join(missing) or 'nothing'}, and have {', '.join(unexpected) or 'nothing'} "
            f"besides",
            on_every_rank=True,
        )
    # The parameters have it; the buffers were computed on the CPU.
    device = next(iter(tensors.values())).device
    return model.to(device).eval().requires_grad_(False)
