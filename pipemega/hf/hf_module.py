"""HFPipelineModule: a transformers model as a list of layers."""

import json
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pipemega.errors import ConfigError
from pipemega.hf.description import ModelDescription
from pipemega.hf.equal_layers import equality_key
from pipemega.hf.families import family_of
from pipemega.hf.key_mapping import tied_names
from pipemega.hf.label_losses import TokenLoss, class_loss
from pipemega.hf.layer_arguments import LayerArguments
from pipemega.hf.local_layer import build_layer
from pipemega.hf.refusals import refuse_other_class_loss
from pipemega.hf.segments import Segment
from pipemega.hf.vocabulary_names import VocabularyNames
from pipemega.hf.weight_source import WeightSource
from pipemega.pipeline.module import PipelineModule
from pipemega.pipeline.spec import TENSOR_AXIS, LayerSpec, TiedLayerSpec


class HFPipelineModule(PipelineModule):
    """A transformers model with one stack of layers, or with an encoder and a decoder.

        layers    segment 0, layers of the stack, segment 1      (and the decoder's, segment 2)

    Args:
        description: of the model.
        source: of the first values; None: initialised as HF does it.
        folder: from which the model was loaded, with the tokenizer; None without.
        loss_fn: None: that of the task.
    """

    def __init__(
        self,
        description: ModelDescription,
        source: WeightSource | None = None,
        folder: Path | None = None,
        loss_fn: Any = None,
    ) -> None:
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
        arguments = (d, self._arguments, index, source, TENSOR_AXIS)
        shared = family_of(d.config_of_layer(index)).shared
        spec = LayerSpec(build, *arguments)
        if shared:
            key = f"stack {d.places[index][0]}"
            spec = TiedLayerSpec(key, build, *arguments, tied_weight_attr=shared)
        spec.equality_key = equality_key(d, index)
        return spec

    def _loss(self) -> Any:
        if self.description.special.loss is not None:
            return self.description.special.loss
        if self._vocabulary.head is None:
            refuse_other_class_loss(self.hf_config)
            return class_loss
        head = self.description.model.get_output_embeddings()
        return LayerSpec(TokenLoss, head.out_features, TENSOR_AXIS)

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
        """HF's name -> logical name; a tied parameter has that of its first layer."""
        names: dict[str, str] = {}
        tied: set[tuple[str, str]] = set()
        for position, (spec, layer) in enumerate(zip(self.specs, self.meta_layers, strict=True)):
            for inner in layer.state_dict():
                logical, tie = f"layers.{position}.{inner}", spec.ties.get(inner)
                if tie is None or tie not in tied:
                    names[self.hf_name(logical)] = logical
            tied |= set(spec.ties.values())
        return names
