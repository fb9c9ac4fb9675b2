"""Segment: what of a Hugging Face model runs before a stack of layers, or after the last one."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipemega.distributed.mesh import Axis
from pipemega.errors import DataError
from pipemega.hf.description import LayerReached, ModelDescription
from pipemega.hf.first_values import set_first_values
from pipemega.hf.fp32_parameters import cast_parameter, keep_in_fp32
from pipemega.hf.layer_arguments import LayerArguments
from pipemega.hf.layer_messages import pack, split_hidden, unpack
from pipemega.hf.parameter_memory import allocate
from pipemega.hf.placeholders import ModuleStub, set_module
from pipemega.hf.sharded_vocabulary import ShardedHead, TableStub, shard_embedding
from pipemega.hf.vocabulary_names import VocabularyNames
from pipemega.hf.weight_source import WeightSource
from pipemega.tensor_parallel.collectives import (
    SEQUENCE_DIM,
    gather_from_tensor,
    scatter_sequence,
)
from pipemega.tensor_parallel.deferred_logits import DeferredLogits, defers_logits
from pipemega.tensor_parallel.output_shard import OutputShard

_FLOAT_INPUTS = ("inputs_embeds", "pixel_values", "input_features")


class Segment(nn.Module):
    """The transformers model with placeholders for all layers and stubs for other segments.

    Args:
        description: of the model.
        arguments: of its layers.
        number: 0 before the first stack of layers; the last one has the head.
        axis: the tensor axis of the mesh.
        source: None: initialised as HF does it.

    Shape:
        segment 0: inputs by HF's names, or the main input alone  ->  message
        the others: message  ->  message, or the logits of this rank's slice of the vocabulary;
            within `defer_logits` DeferredLogits, if the model returns what its head returns
    """

    # Mostly Python code around a lookup, a norm or a head.
    compiled_method: str | None = None

    def __init__(
        self,
        description: ModelDescription,
        arguments: LayerArguments,
        number: int,
        source: WeightSource | None,
        axis: Axis,
    ) -> None:
        super().__init__()
        self._description, self._arguments, self._number = description, arguments, number
        self._received: Tensor | None = None
        self.output_shard: OutputShard | None = None
        self._head = ""  # name of the head, if this segment returns its output
        self._axis = axis if description.sequence_parallel else Axis("tensor")
        self.hf = self._local_part(axis)
        keep_in_fp32(self.hf, description.model, "")
        self._of_dtype = cast_parameter(self.hf)
        self._stubs = tuple(m for m in self.hf.modules() if isinstance(m, ModuleStub))
        device = torch.get_default_device()
        allocate(self.hf, device)
        if device.type == "meta":
            return
        names = {name: name for name in self.hf.state_dict()}
        keep, vocabulary = set(description.segment_modules[number]), VocabularyNames(description)
        if vocabulary.table:
            # A tied weight has this name in all segments.
            keep.add(vocabulary.owner(vocabulary.table))
        set_first_values(self.hf, source, lambda: description.shell(keep, None), names)

    def _local_part(self, axis: Axis) -> nn.Module:
        """Return the shell of this segment on meta, with the vocabulary sharded."""
        d, vocabulary = self._description, VocabularyNames(self._description)
        keep = set(d.segment_modules[self._number])
        is_last = self._number == len(d.stacks)
        uses = [name for name in keep if vocabulary.is_table(name)]
        if is_last:
            # Other names of the table, which do not run.
            keep.difference_update(uses)
        model = d.shell(keep, self._on_layer)
        for name in () if is_last else uses:
            embedding = model.get_submodule(name)
            shard_embedding(embedding, axis)
            # In all segments the tied weight has the name under which HF saves it.
            set_module(model, vocabulary.table, embedding)
        if is_last and vocabulary.head is not None:
            linear = d.model.get_submodule(vocabulary.head)
            table: nn.Module | None = None
            if vocabulary.head_is_tied:
                table = TableStub(d.model.get_submodule(vocabulary.table), axis)
                set_module(model, vocabulary.table, table)
                vocabulary.drop_second_bias(model)
            head = ShardedHead(linear, axis, table)
            set_module(model, vocabulary.head, head)
            self.output_shard = head.output_shard
            self._head = vocabulary.head if d.returns_head else ""
        return model

    def forward(self, x: Any) -> Any:
        d = self._description
        if self._number == 0:
            inputs = self._check_inputs(x if isinstance(x, dict) else {d.main_input: x})
            passed = d.special.float_inputs
            side = {k: v for k, v in inputs.items() if not v.is_floating_point() or k in passed}
            if len(d.stacks) == 1 and not d.reads_tokens:
                # Layers know its shape from the hidden states.
                side.pop(d.main_input, None)
        else:
            hidden, _, side = unpack(x)
            # With sequence parallelism a layer returns a slice.
            self._received = gather_from_tensor(hidden, self._axis, dim=SEQUENCE_DIM)
            inputs = d.stand_in_inputs(self._received, side)
        head = self.hf.get_submodule(self._head) if self._head else None
        try:
            if isinstance(head, ShardedHead) and defers_logits(self, head, self.hf):
                return self._deferred(head, inputs)
            output = self._run(inputs)
        except LayerReached as reached:
            hidden, others = reached.args
            slots = self._arguments.carried_slots(d.first_of_stack[self._number], hidden, side)
            carried = [others[place] for place in slots]
            return pack(scatter_sequence(hidden, self._axis), carried, side)
        finally:
            self._received = None
        return d.special.output(output)

    def _deferred(self, head: ShardedHead, inputs: dict[str, Any]) -> DeferredLogits:
        """Run the shell up to its head; return what the head returns instead of its logits."""
        head.deferred = []
        try:
            self._run(inputs)
            return head.deferred[-1]
        finally:
            head.deferred = None

    def _run(self, inputs: dict[str, Any]) -> Any:
        if not any(x.is_meta for x in inputs.values()):
            if self._of_dtype is not None:
                # The forward casts to the dtype of what other segments return.
                module, name = self._of_dtype
                for stub in self._stubs:
                    vars(stub)["dtype"] = module.get_parameter(name).dtype
            return self._description.run(self.hf, inputs)
        dtype = torch.get_default_dtype() if self._received is None else self._received.dtype
        return self._arguments.run_on_meta(self.hf, inputs, dtype)

    def _on_layer(self, index: int, args: Any, kwargs: Any) -> Any:
        d = self._description
        hidden, *others = split_hidden(args, kwargs)
        if d.places[index][0] == self._number:
            raise LayerReached(hidden, pytree.tree_leaves(tuple(others)))
        is_last_before = index + 1 == len(d.layers) or d.places[index + 1][0] == self._number
        if is_last_before:
            assert self._received is not None
            hidden = self._received
        return d.as_layer_output(index, hidden)

    def _refuse_packed(self, positions: Tensor) -> None:
        if bool((positions[..., 1:] < positions[..., :-1]).any()):
            raise DataError(
                f"the position_ids restart within a sample (packed documents), but the layers of "
                f"{self._description.class_name} do not keep documents separate: train with "
                f"one document in each sample (data.packing, or "
                f"data.reset_position_ids and data.reset_attention_mask, false)"
            )

    def _check_inputs(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        d = self._description
        for name, value in inputs.items():
            if name == "position_ids" and not self._arguments.follow_positions:
                self._refuse_packed(value)
            if name not in d.accepted:
                raise DataError(
                    f"{d.class_name} has no input {name!r}; it has: {', '.join(sorted(d.accepted))}"
                )
            floats = (*_FLOAT_INPUTS, *d.special.float_inputs)
            if value.is_floating_point() and name not in floats:
                raise DataError(
                    f"input {name!r} is {value.dtype}: only {', '.join(floats)} may be floating "
                    f"point; other inputs are integers or bool"
                )
        missing = d.accepted.difference(inputs)
        if d.config.is_encoder_decoder and "decoder_input_ids" in missing:
            raise DataError(
                f"{d.class_name} needs decoder_input_ids in the inputs (the labels shifted right, "
                f"beginning with decoder_start_token_id); it has: {', '.join(inputs)}"
            )
        return inputs
