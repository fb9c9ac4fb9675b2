"""Segment: what of a Hugging Face model runs before a stack of layers, or after the last one.

A layer of a Hugging Face model on one rank: sharded, and called with a message alone.

LayerArguments: what HF's forward passes to each layer besides its hidden states.

Masks, rotary tables, positions: computed by a run of the model with placeholders for layers and
stubs for embeddings and head, once for each shape and each set of side inputs.
"""

import copy
import re
from collections import OrderedDict
from contextlib import suppress
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipemega.distributed.mesh import Axis
from pipemega.errors import DataError
from pipemega.hf.activation_regions import ActivationRegions, has_dropout
from pipemega.hf.description import LayerReached, ModelDescription, Side, pack, split_hidden, unpack
from pipemega.hf.families import check_tensor_ranks, family_of, is_compared, styles_of
from pipemega.hf.model_facts import VocabularyNames
from pipemega.hf.placeholders import (
    ModuleStub,
    allocate,
    on_cpu,
    on_meta,
    run_on_meta,
    set_module,
    zeros_on_cpu,
)
from pipemega.hf.routed_experts import check_expert_ranks, enable_deferral, watch_routers
from pipemega.hf.sharding import (
    ShardedHead,
    Sharding,
    TableStub,
    shard_embedding,
    shard_layer,
)
from pipemega.hf.weights.safetensors_files import WeightSource, cast_parameter, keep_in_fp32
from pipemega.hf.weights.safetensors_source import set_first_values
from pipemega.moe.router import RouterConfig
from pipemega.monitor import get_logger
from pipemega.tensor_parallel.collectives import SEQUENCE_DIM, gather_from_tensor, scatter_sequence
from pipemega.tensor_parallel.deferred_logits import DeferredLogits, OutputShard, defers_logits

# Micro-batches of a pipeline are in flight at the same time, and backward may recompute one.
_KEPT = 16

# (leaves, tree, [(leaf, index of the carried tensor)]) of one layer.
_Recorded = tuple[list[Any], Any, list[tuple[int, int]]]


class LayerArguments:
    """Records and caches the arguments of the layers of one model."""

    def __init__(self, description: ModelDescription) -> None:
        self._description = description
        self._recorded: OrderedDict[Any, tuple[list[_Recorded], Side]] = OrderedDict()
        self._shells: dict[Any, nn.Module] = {}

    def of(
        self, index: int, hidden: Tensor, carried: list[Tensor], side: Side
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) of layer `index` after its hidden states.

        Args:
            hidden: [batch, sequence, ...]; only its shape, dtype and device count.
            carried, side: see description.py.
        """
        leaves, tree, slots = self._recorded_for(hidden, side)[index]
        if slots:
            leaves = list(leaves)
            for place, number in slots:
                leaves[place] = carried[number]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        return args, kwargs

    @cached_property
    def follow_positions(self) -> bool:
        """Return whether the layers follow position_ids that restart, as in packed documents.

        Every layer must get a mask that follows them, and mix positions by this mask only. Flash
        attention gets the positions instead of a mask.
        """
        d = self._description
        if "position_ids" not in d.accepted or any(_mixes_positions(x) for x in d.layers):
            return False
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device="cpu")
        hidden = torch.zeros(1, 8, 1, device="cpu")
        for index in range(len(d.layers)):
            arguments = self.of(index, hidden, [], {"position_ids": positions})
            given = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
            if "flash" in str(d.config._attn_implementation):
                if not any(t is positions for t in given):
                    return False
            elif not any(_hides_first_document(t) for t in given):
                return False
        return True

    def carried_slots(self, index: int, hidden: Tensor, side: Side) -> list[int]:
        """Return the leaves of the other arguments of layer `index` that are carried, in order."""
        _, _, slots = self._recorded_for(hidden, side)[index]
        first = {number: place for place, number in reversed(slots)}
        return [first[number] for number in sorted(first)]

    def _recorded_for(self, hidden: Tensor, side: Side) -> list[_Recorded]:
        # The version changes if a loader fills the same tensor again.
        inputs = ((name, id(value), value._version) for name, value in side.items())
        key = (hidden.shape[:2], hidden.dtype, hidden.device, *inputs)
        if key not in self._recorded:
            # The side inputs are kept, so that no other tensors get their ids.
            self._recorded[key] = (self._record(hidden, side), side)
            while len(self._recorded) > _KEPT:
                self._recorded.popitem(last=False)
        return self._recorded[key][0]

    def run_on_meta(self, part: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype) -> Any:
        """Return the output of a part of the model on the meta device.

        Args:
            part: the model with placeholders.
            dtype: the dtype of the hidden states.
        """
        d = self._description

        def run_on_cpu() -> None:
            shell = self._shell_on(dtype, torch.device("cpu"))
            _on_each_layer(
                d, shell, lambda index, args, kwargs: _same_hidden(d, index, args, kwargs)
            )
            with torch.enable_grad():
                d.run(shell, zeros_on_cpu(inputs))

        return run_on_meta(lambda: d.run(part, inputs), run_on_cpu)

    def _record(self, hidden: Tensor, side: Side) -> list[_Recorded]:
        if hidden.is_meta:
            with on_cpu():
                found = self._record(*zeros_on_cpu((hidden.detach(), side)))
                return [(on_meta(leaves), tree, slots) for leaves, tree, slots in found]
        d = self._description
        recorded: list[_Recorded] = []
        numbers: dict[int, int] = {}  # id of a carried tensor -> its number
        kept_alive = []

        def on_layer(index: int, args: Any, kwargs: Any) -> Any:
            if index in d.first_of_stack:
                # Each stack has carried tensors of its own.
                numbers.clear()
            x, *others = split_hidden(args, kwargs)
            leaves, tree = pytree.tree_flatten(tuple(others))
            slots = []
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    slots.append((place, numbers.setdefault(id(leaf), len(numbers))))
                    kept_alive.append(leaf)
                    leaves[place] = None
            recorded.append((leaves, tree, slots))
            if len(recorded) == len(d.layers):
                raise LayerReached
            return d.as_layer_output(index, x.detach().requires_grad_())

        shell = self._shell_on(hidden.dtype, hidden.device)
        _on_each_layer(d, shell, on_layer)
        # The innermost hooks apply: otherwise activation checkpointing would count what this saves.
        no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with torch.enable_grad(), no_hooks, suppress(LayerReached):
            d.run(shell, d.stand_in_inputs(hidden, side))
        return recorded

    def _shell_on(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        key = (dtype, device)
        if key not in self._shells:
            shell = self._description.shell(set(), None)
            for module in shell.modules():
                if isinstance(module, ModuleStub):
                    vars(module)["dtype"] = dtype
            self._shells[key] = allocate(shell, device).eval()
        return self._shells[key]


def _on_each_layer(d: ModelDescription, shell: nn.Module, on_layer: Any) -> None:
    for stack in d.stacks:
        for placeholder in shell.get_submodule(stack).children():
            placeholder.on_call = on_layer


def _same_hidden(d: ModelDescription, index: int, args: Any, kwargs: Any) -> Any:
    """Stand in for a layer: return its input."""
    x, *_ = split_hidden(args, kwargs)
    return d.as_layer_output(index, x.detach().requires_grad_())


# Recurrences, and the choice of tokens in sparse attention.
_MIXERS = re.compile(
    r"Indexer|Compressor|Mamba|Mixer$|Recurrent|DeltaNet|LightningAttention|DogeAttention"
)


def _mixes_positions(layer: nn.Module) -> bool:
    """Return whether a layer mixes positions otherwise than by attention with a mask."""
    return any(
        isinstance(module, nn.Conv1d) or _MIXERS.search(type(module).__name__)
        for module in layer.modules()
    )


def _hides_first_document(mask: Tensor) -> bool:
    """Return whether token 4 does not see token 3 in a mask [..., 8, 8]."""
    if mask.dim() != 4 or mask.shape[-2:] != (8, 8):
        return False
    seen = mask[0, 0, 4, 3]
    return not bool(seen) if mask.dtype == torch.bool else bool(seen < -1e3)


_FLOAT_INPUTS = ("inputs_embeds", "pixel_values", "input_features")


class Segment(nn.Module):
    """The transformers model with placeholders for all layers and stubs for other segments.

    Args:
        description: the description of the model.
        arguments: the arguments of its layers.
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


class _LocalLayer:
    """Put before the class of a layer: takes a message instead of HF's arguments."""

    def forward(self: Any, message: Any) -> Any:
        hidden, carried, side = unpack(message)
        args, kwargs = self._arguments.of(self._index, self._like_embeddings(hidden), carried, side)
        for name in self._sliced_arguments:
            if isinstance(kwargs.get(name), Tensor):
                sliced = _heads_of_rank(kwargs[name], hidden.shape[0], self._axis)
                kwargs = {**kwargs, name: sliced}
        with self._regions.during_forward(self.training):
            output = self.hf_forward(hidden, *args, **kwargs)
        return pack(output[0] if isinstance(output, tuple) else output, carried, side)

    # The arguments of HF's layer depend on its index; the layer itself is equal for all.
    compiled_method: str | None = "hf_forward"

    def hf_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _like_embeddings(self: Any, hidden: Tensor) -> Tensor:
        """Return a tensor of the shape and the dtype of the output of the embeddings.

        Masks and rotary tables depend on them. Sequence parallelism shards the sequence, and
        layers with parameters in fp32 return fp32.
        """
        dtype = hidden.dtype
        if self._of_dtype is not None:
            module, name = self._of_dtype
            dtype = module._parameters[name].dtype
        ranks = self._axis.size if self._regions.sequence_parallel else 1
        if ranks == 1 and dtype == hidden.dtype:
            return hidden
        batch, length, *rest = hidden.shape
        return hidden.new_empty((), dtype=dtype).expand(batch, length * ranks, *rest)


def build_layer(
    description: ModelDescription,
    arguments: LayerArguments,
    index: int,
    source: WeightSource | None,
    axis: Axis,
    expert: Axis,
    losses: RouterConfig | None = None,
) -> nn.Module:
    """Build this rank's shard of layer `index` on torch's default device.

    The layer is the layer of transformers, with its names of parameters, as a subclass that maps a
    message (description.py) to a message.

    Args:
        axis, expert: the tensor axis and the expert axis.
        losses: see `watch_routers`.

    Raises:
        ConfigError: the layer cannot be sharded over the tensor or expert ranks.
    """
    d, family = description, family_of(description.config_of_layer(index))
    stack, path = d.places[index]
    first = d.first_of_stack[stack]
    # All layers get their own copy of what only the first one has; the copies are tied.
    layer = copy.deepcopy(d.layers[first if family.shared else index])
    styles = styles_of(d.config)
    _check_ranks(d, axis, expert, warns=index == axis.rank == expert.rank == 0)
    regions = ActivationRegions(
        axis, d.sequence_parallel and axis.size > 1, bool(styles) and has_dropout(d.config)
    )
    layer = shard_layer(layer, Sharding(styles, family, d.config, axis, expert, regions))
    enable_deferral(layer)
    watch_routers(layer, d.config, losses)
    keep_in_fp32(layer, d.model, path)
    vars(layer).update(
        _arguments=arguments,
        _index=index,
        _axis=axis,
        _regions=regions,
        _of_dtype=cast_parameter(layer),
        _sliced_arguments=family.sliced_arguments if axis.size > 1 else (),
    )
    if regions.has_dropout:
        vars(layer)["compiled_method"] = None
        vars(layer)["uncompiled_reason"] = (
            "the model has dropout, whose masks depend on the module that runs: set the dropout "
            "rates of its config to 0"
        )
    layer.__class__ = _local_class(type(layer))  # type: ignore[arg-type]
    device = torch.get_default_device()
    allocate(layer, device)
    if device.type != "meta":
        names = {name: f"{path}.{name}" for name in layer.state_dict()}
        names |= {name: f"{d.places[first][1]}.{name}" for name in family.shared}
        set_first_values(layer, source, lambda: _model_with_layer(d, index), names)
    return layer


def _check_ranks(d: ModelDescription, axis: Axis, expert: Axis, *, warns: bool) -> None:
    """Check that the layers can be sharded; warn about a family that was not compared."""
    if axis.size > 1:
        check_tensor_ranks(d.config, axis.size, d.sequence_parallel)
    if expert.size > 1:
        check_expert_ranks(d.layers, d.config, expert.size)
    if warns and axis.size * expert.size > 1 and not is_compared(d.config, expert.size > 1):
        get_logger().warning(
            f"{d.class_name} is sharded by the plan of transformers, and no gradients were "
            f"compared with the unsplit model: run `pipemega hf check` before training"
        )


@cache
def _local_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of the local layers of HF's class `kind`; one, so they compile once."""
    return type(kind.__name__, (_LocalLayer, kind), {})


def _model_with_layer(description: ModelDescription, index: int) -> nn.Module:
    """Return the model with one layer, and without other parameters."""
    model = description.shell(set(), None)
    set_module(model, description.places[index][1], copy.deepcopy(description.layers[index]))
    return model


def _heads_of_rank(tensor: Tensor, batch: int, axis: Axis) -> Tensor:
    """Return the entries of this rank's heads of [batch * heads, ...] or [batch, heads, ...].

    What is equal for all heads, [batch, 1, ...], is returned unchanged.
    """
    if tensor.dim() == 4:
        heads = tensor.shape[1]
        return tensor if heads == 1 else tensor.chunk(axis.size, dim=1)[axis.rank]
    heads = tensor.shape[0] // batch // axis.size
    by_rank = tensor.view(batch, axis.size, heads, *tensor.shape[1:])
    return by_rank[:, axis.rank].reshape(batch * heads, *tensor.shape[1:])
