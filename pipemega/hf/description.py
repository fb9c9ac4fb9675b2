"""ModelDescription: a Hugging Face model without memory, and shells that run around its layers.

    HF model     embeddings ... masks, rotary ... [ layer 0 ] ... [ layer n-1 ] ... norm, head
    segment 0    runs up to layer 0, whose input is its output
    segment 1    runs from the output of the last layer; its output is the output of the model

An encoder-decoder has two stacks of layers and three segments; the second one contains the norm of
the encoder and the embeddings of the decoder. A shell is the model with placeholders for layers and
for the modules of other segments. HF's own forward runs in it, with the masks of each family.

Finds out whether a model returns the output of its head, a plain linear, as it is.

The message between the layers of a Hugging Face model.

hidden                      [batch, sequence, hidden], if nothing else is needed
(hidden, carried, side)     carried: other tensors with a gradient, such as an encoder's output
                            side: integer inputs from which masks and positions are computed
"""

import copy
import inspect
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipemega.errors import ConfigError
from pipemega.hf.families import refuse_settings
from pipemega.hf.placeholders import (
    LayerPlaceholder,
    ModuleStub,
    allocate,
    parameters_on_meta,
    set_module,
    without_values,
    zeros_like_output,
)
from pipemega.hf.routed_experts import IMPLEMENTATION as EXPERTS
from pipemega.hf.routed_experts import register_experts
from pipemega.hf.tasks import FLOAT_INPUT_SHAPES, special_model


def head_outputs(description: Any, shell: nn.Module) -> list[tuple[Tensor, int]]:
    """Return a list that takes what the head of `shell` returns, with its version.

    It remains empty if the head is no plain linear.

    Args:
        description: a `ModelDescription`; its model has the head.
        shell: a copy of the model with stubs for all modules with parameters.
    """
    d, outputs = description, list[tuple[Tensor, int]]()
    head = d.model.get_output_embeddings()
    name = next((name for name in d.owners if d.model.get_submodule(name) is head), None)

    def take(stub: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        # As a linear returns it: `contiguous()` of a model then does nothing.
        output = output.contiguous()
        outputs.append((output, output._version))
        return output

    if name is not None and type(head) is nn.Linear:
        shell.get_submodule(name).register_forward_hook(take)
    return outputs


def is_last_of(outputs: list[tuple[Tensor, int]], output: Any) -> bool:
    """Return whether a model returned what its head returned last, not changed in place."""
    if not outputs:
        return False
    from_head, version = outputs[-1]
    return output is from_head and output._version == version


Side = dict[str, Tensor]


def unpack(message: Any) -> tuple[Tensor, list[Tensor], Side]:
    """Return (hidden, carried, side) of a message."""
    if isinstance(message, Tensor):
        return message, [], {}
    hidden, carried, side = message
    return hidden, list(carried), side


def pack(hidden: Tensor, carried: list[Tensor], side: Side) -> Any:
    """Return the message with these parts."""
    return (hidden, carried, side) if carried or side else hidden


def split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any, Any]:
    """Return (hidden, other args, other kwargs) of the call of a layer."""
    if args:
        return args[0], args[1:], kwargs
    others = {key: value for key, value in kwargs.items() if key != "hidden_states"}
    return kwargs["hidden_states"], (), others


class LayerReached(Exception):
    """Ends a run of a shell at a layer; carries the input of the layer."""


class ModelDescription:
    """One model: its stacks of layers, its names, its ties.

    Args:
        config: a `PretrainedConfig`; copied.
        model_class: builds the model: an Auto class or a class of transformers.
        sequence_parallel: layers get and return slices of the sequence.

    Attributes:
        model: the model on the meta device, without its layers.
        layers: the layers of all stacks, in the order in which they run.
        places: (stack, name in the model) of each layer.
        first_of_stack: index of the first layer of each stack.
        owners: outermost modules with parameters that contain no layers.
        loose_parameters: names of the parameters that belong to modules that contain layers.
        segment_modules: names of the owners, and of the loose parameters, of each segment.
        tied: name of a tied tensor -> name under which HF saves it.
        reads_tokens: what layers get (DeepSeek-V4's hash routing), or the token whose output
            classifies the sample, depends on the token ids: they go to every stage.
        returns_head: the model returns the output of its head, a plain linear, without scaling or
            soft caps.

    Raises:
        ConfigError: the layers were not found, or exchange more than hidden states.
    """

    def __init__(self, config: Any, model_class: Any, *, sequence_parallel: bool = False) -> None:
        refuse_settings(config)
        register_experts()
        self.sequence_parallel = sequence_parallel
        self.config = copy.deepcopy(config)
        build = getattr(model_class, "from_config", None) or model_class._from_config
        try:
            with parameters_on_meta():
                self.model: Any = build(self.config, dtype=torch.get_default_dtype())
        except Exception as error:
            # Each family checks its sizes with errors of its own.
            raise ConfigError(
                f"transformers cannot build the model of family {self.config.model_type!r} "
                f"(attn_implementation {self.config._attn_implementation!r}): "
                f"{type(error).__name__}: {error}",
                on_every_rank=True,
            ) from error
        self.config = self.model.config
        self.config._experts_implementation = EXPERTS
        self.model.eval()
        self.main_input: str = self.model.main_input_name
        self.tied: dict[str, str] = dict(getattr(self.model, "all_tied_weights_keys", None) or {})
        parameters = inspect.signature(self.model.forward).parameters
        self.accepted = frozenset(parameters)
        passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._has_cache = "use_cache" in parameters or (
            passes_on and hasattr(self.config, "use_cache")
        )
        self.special = special_model(self.class_name)
        self.stacks = _find_stacks(self.model, self.special.stacks)
        self.layers: list[nn.Module] = []
        self.places: list[tuple[int, str]] = []
        self.first_of_stack: list[int] = []
        for stack, path in enumerate(self.stacks):
            self.first_of_stack.append(len(self.layers))
            for number, layer in enumerate(self.model.get_submodule(path)):
                self.layers.append(layer)
                self.places.append((stack, f"{path}.{number}"))
            # A shell copies the model for every segment; layers are copied one by one.
            set_module(self.model, path, nn.ModuleList())
        self.loose_parameters = _loose_parameters(self)
        self.owners = _parameter_owners(self)
        self.reads_tokens = self.returns_head = False
        self.outputs_per_layer = [0] * len(self.stacks)  # 0: a tensor, else the length of a tuple
        try:
            self.segment_modules = _find_segments(self)
        except ConfigError:
            raise
        except Exception as error:
            raise _no_pipeline(
                self.model,
                f"its forward fails with placeholders in the place of its layers: "
                f"{type(error).__name__}: {error}",
            ) from error

    @property
    def class_name(self) -> str:
        return type(self.model).__name__

    def config_of_layer(self, index: int) -> Any:
        """Return the config of the model that a layer belongs to; Blip2 contains another model."""
        inside = self.places[index][1].startswith("language_model.") and self.special.stacks
        return self.config.text_config if inside else self.config

    def __repr__(self) -> str:
        return self.class_name

    def shell(self, keep: set[str], on_layer: Any, on_stub: Any = None) -> nn.Module:
        """Return a copy of the model without memory: placeholders for layers, stubs for the rest.

        Args:
            keep: names of the owners, and of the loose parameters, that are kept.
            on_layer: see `LayerPlaceholder`.
            on_stub: see `ModuleStub`.
        """
        model: nn.Module = copy.deepcopy(self.model)
        for number, name in enumerate(self.owners):
            if name not in keep:
                stub = ModuleStub(number, self.model.get_submodule(name), on_stub)
                set_module(model, name, stub)
        for name in self.loose_parameters:
            if name not in keep:
                _without_values(model, name)
        placeholders = [LayerPlaceholder(i, x, on_layer) for i, x in enumerate(self.layers)]
        for stack, path in enumerate(self.stacks):
            own = [p for p, (s, _) in zip(placeholders, self.places, strict=True) if s == stack]
            set_module(model, path, nn.ModuleList(own))
        return model

    def run(self, shell: nn.Module, inputs: dict[str, Any]) -> Any:
        """Call a shell by HF's names of inputs, without a cache of keys and values."""
        if self._has_cache:
            inputs = {**inputs, "use_cache": False}
        return shell(**inputs, **self.special.constants)

    def stand_in_inputs(self, like: Tensor, side: Side) -> dict[str, Tensor]:
        """Return inputs for a shell without embeddings; `like` is [batch, sequence, ...]."""
        if self.main_input in side:
            return side
        zero = torch.zeros((), device=like.device)
        if self.main_input in FLOAT_INPUT_SHAPES:
            shape = FLOAT_INPUT_SHAPES[self.main_input](self.config)
            return {self.main_input: zero.to(like.dtype).expand(like.shape[0], *shape), **side}
        # transformers warns about padding tokens.
        token = zero.long() + int(getattr(self.config.get_text_config(), "pad_token_id", None) == 0)
        return {self.main_input: token.expand(like.shape[:2]), **side}

    def as_layer_output(self, index: int, hidden: Tensor) -> Any:
        """Return `hidden` as the layers of this family return it."""
        length = self.outputs_per_layer[self.places[index][0]]
        return hidden if not length else (hidden, *[None] * (length - 1))


def _parameter_owners(d: ModelDescription) -> list[str]:
    """Return the outermost modules that have parameters of their own and contain no layers."""
    owners = [
        name
        for name, module in d.model.named_modules()
        if name
        and not _contains_layers(d, name)
        and (next(module.parameters(recurse=False), None) is not None or name in d.special.segments)
    ]
    return [n for n in owners if not any(n.startswith(f"{other}.") for other in owners)]


def _contains_layers(d: ModelDescription, name: str) -> bool:
    return any(not name or stack.startswith(f"{name}.") for stack in d.stacks)


def _loose_parameters(d: ModelDescription) -> list[str]:
    """Return the parameters of modules that contain layers.

    Raises:
        ConfigError: it is not known which segment uses one.
    """
    loose = [
        name
        for name, _ in d.model.named_parameters()
        if _contains_layers(d, name.rpartition(".")[0])
    ]
    for name in loose:
        if name not in d.special.segments:
            raise _no_pipeline(
                d.model, f"the module that contains its layers has a parameter of its own, {name}"
            )
    return loose


def _without_values(model: nn.Module, name: str) -> None:
    """Replace a parameter by zeros that are no parameter."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    like = owner._parameters.pop(last)
    assert like is not None
    zeros = torch.zeros((), dtype=like.dtype, device="cpu").expand(like.shape)
    owner.register_buffer(last, zeros, persistent=False)


def _find_stacks(model: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the lists of layers, in the order in which they run.

    Args:
        known: see `SpecialModel.stacks`. By default lists of the classes that HF does not split
            over devices: the encoder comes first, the decoder last.
    """
    if known:
        found: list[str] = []
        for name in known:
            inner = _find_stacks(model.get_submodule(name[:-1]), ()) if name[-1] == "." else ("",)
            found += [name + stack for stack in inner]
        return tuple(found)
    unsplit: set[str] = set()
    for module in model.modules():
        unsplit |= set(getattr(module, "_no_split_modules", None) or ())
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    found = [n for n, m in lists.items() if type(m[0]).__name__ in unsplit]
    if not found:  # older families name no such class
        number = getattr(model.config, "num_hidden_layers", None)
        found = [n for n, m in lists.items() if len(m) == number]
    if not found or len(found) > 2:
        raise _no_pipeline(
            model,
            f"it has {len(found) or 'no'} lists of layers"
            f"{': ' + ', '.join(found) if found else ''}; a model needs one stack of layers, or an "
            f"encoder and a decoder",
        )
    return tuple(sorted(found, key=lambda name: "decoder" in name.split(".")))


def _check_hidden(
    d: ModelDescription, index: int, shape: torch.Size, given: tuple[Tensor, list[Any]], hint: str
) -> None:
    """Refuse a layer that gets hidden states of another shape than the first one, or a cache.

    Args:
        given: hidden states, and the other arguments of the layer.
        hint: added to the message.
    """
    x, others = given
    gets = f"hidden states {list(x.shape)}, and the first layer {list(shape)}"
    if x.shape == shape:
        gets = "a cache" * any(type(leaf).__name__.endswith("Cache") for leaf in others)
    if gets:
        raise _no_pipeline(d.model, f"layer {index} ({d.places[index][1]}) gets {gets}{hint}")


def _find_segments(description: ModelDescription) -> list[set[str]]:
    """Run the model around its layers and return the modules of each segment.

    Two runs differ in the outputs of the layers. What a layer gets must not depend on them: except
    for hidden states and an encoder's output, it would have to be sent from stage to stage. A third
    run has other tokens, to set `reads_tokens`.
    """
    d = description
    called: list[set[str]] = [set() for _ in range(len(d.stacks) + 1)]
    segment, failure = 0, ""
    given: list[list[Tensor]] = []
    shapes: dict[int, torch.Size] = {}
    generator = torch.Generator()

    def on_stub(number: int) -> None:
        called[segment].add(d.owners[number])

    def on_layer(index: int, args: Any, kwargs: Any) -> Any:
        nonlocal segment, failure
        stack = d.places[index][0]
        if index == d.first_of_stack[stack]:
            d.outputs_per_layer[stack], failure = _count_outputs(d.layers[index], args, kwargs)
            segment = stack + 1
        x, *others = split_hidden(args, kwargs)
        leaves = pytree.tree_leaves(others)
        _check_hidden(d, index, shapes.setdefault(stack, x.shape), (x, leaves), failure)
        given.append([t for t in leaves if isinstance(t, Tensor)])
        y = torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cpu")
        return d.as_layer_output(index, y.requires_grad_())

    shell = allocate(d.shell(set(), on_layer, on_stub), "cpu")
    from_head = head_outputs(d, shell)
    runs = []
    for seed, inputs in enumerate(_probe_inputs(d)):
        given, segment = [], 0
        generator.manual_seed(seed % 2)
        try:
            with torch.enable_grad(), torch.device("cpu"):
                output = d.run(shell, d.stand_in_inputs(torch.zeros(1, 4, 1), inputs))
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise _no_pipeline(
                d.model,
                f"its forward does not run without its layers: {type(error).__name__}: {error}",
            ) from error
        runs.append(given)
    _refuse_other_state(d, *runs[:2])
    d.returns_head = is_last_of(from_head, d.special.output(output))
    of_sample = d.main_input == "input_ids" and d.special.output(output).dim() == 2
    d.reads_tokens = of_sample or any(
        not t.requires_grad and not torch.equal(t, u)
        for run in runs[2:]
        for t, u in zip(chain(*runs[0]), chain(*run), strict=True)
    )
    _place_other_modules(d, called)
    return called


def _place_other_modules(d: ModelDescription, called: list[set[str]]) -> None:
    """Add the modules that did not run, and move those whose segment the family names."""
    # Such as the second name of a tied table.
    called[-1] |= set(d.owners).difference(*called)
    for name, number in d.special.segments.items():
        for modules in called:
            modules.discard(name)
        if name in (*d.owners, *d.loose_parameters):
            called[number].add(name)


def _probe_inputs(d: ModelDescription) -> list[dict[str, Tensor]]:
    """Return the inputs of the runs, besides those that `stand_in_inputs` adds."""
    ids = torch.zeros(1, 4, dtype=torch.long, device="cpu")
    side = {"decoder_input_ids": ids} if "decoder_input_ids" in d.accepted else {}
    with torch.device("cpu"):
        side |= d.special.probe(d.config)
    if len(d.stacks) > 1 or d.main_input in (*side, *FLOAT_INPUT_SHAPES):
        return [side, side]
    others = torch.arange(2, 6, device="cpu") % d.config.get_text_config().vocab_size
    return [side, side, {**side, d.main_input: ids + others}]


def _count_outputs(layer: nn.Module, args: Any, kwargs: Any) -> tuple[int, str]:
    """Return the length of the tuple that a layer returns, 0 for a tensor; and why it failed."""
    try:
        output = zeros_like_output(without_values(layer), args, kwargs)
    except (NotImplementedError, RuntimeError) as error:
        # The layer reads values, which meta tensors lack; families that return tuples do not.
        return 0, f". A layer alone fails, too: {type(error).__name__}: {error}"
    return (len(output) if isinstance(output, tuple) else 0), ""


def _refuse_other_state(
    d: ModelDescription, first_run: list[list[Tensor]], second_run: list[list[Tensor]]
) -> None:
    """Raise ConfigError if a layer gets tensors that other layers have computed."""
    if len(first_run) != len(d.layers):
        raise _no_pipeline(
            d.model, f"its forward calls {len(first_run)} layers, and it has {len(d.layers)}"
        )
    for index, (first, second) in enumerate(zip(first_run, second_run, strict=True)):
        stack = d.places[index][0]
        # The output of the encoder goes to each layer of the decoder.
        carried = {id(t) for t in first_run[d.first_of_stack[stack]]} if stack else set()
        for t, u in zip(first, second, strict=True):
            computed = t.requires_grad or not torch.equal(t, u)
            if computed and not (t.requires_grad and id(t) in carried):
                raise _no_pipeline(
                    d.model,
                    f"layer {index} ({d.places[index][1]}) gets a tensor {list(t.shape)} that "
                    f"other layers have computed, besides its hidden states",
                )


def _no_pipeline(model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} cannot be split into a pipeline: {why}", on_every_rank=True
    )
