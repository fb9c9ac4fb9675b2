"""Which linears of a model get an adapter: `lora.targets` and `lora.train_also`.

A model with LoRA: its layers build themselves with adapters; all other weights are frozen.

Merging: the weight of a linear with its adapter, W + scale * B A.
"""

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipemega.config import Config
from pipemega.config.name_suggestions import did_you_mean
from pipemega.config.sections.run_sections import LoraSection
from pipemega.distributed.mesh import Mesh, on_all_ranks
from pipemega.errors import ConfigError
from pipemega.lora.low_rank import SCALE, A, B, LinearShape, add_adapter
from pipemega.lora.peft_files import load_adapter, section_of
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.spec import LayerSpec
from pipemega.pipeline.model.stages import LocalModel
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear

ALL_LINEAR = "all-linear"


class Named(NamedTuple):
    """A module of a layer.

    Args:
        position: position of the layer.
        inner: name of the module in the layer; "" for the layer itself.
        name: name of the module in the whole model, as `targets` and peft's files have it.
        module: the module, on the meta device.
        others: names of modules of the whole model that have the same weight.
    """

    position: int
    inner: str
    name: str
    module: nn.Module
    others: tuple[str, ...]


def modules_of(net: PipelineModule) -> Iterator[Named]:
    """Yield all modules with parameters."""
    for position, layer in enumerate(net.meta_layers):
        for inner, module in layer.named_modules():
            if next(module.parameters(), None) is not None:
                logical = ".".join(filter(None, ("layers", str(position), inner)))
                name = net.module_name(logical)
                others = (o.removesuffix(".weight") for o in net.other_names(f"{name}.weight"))
                yield Named(position, inner, name, module, tuple(others))


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is called to compute y = W x + b; without heads."""
    kind = type(module).__name__
    parallel = isinstance(module, nn.Linear | ColumnParallelLinear | RowParallelLinear)
    # nn.MultiheadAttention reads the weight of its output projection without calling it.
    return (parallel and kind != "NonDynamicallyQuantizableLinear") or kind == "Conv1D"


def can_adapt(module: nn.Module) -> bool:
    """Return whether `module` is a linear, or a vocabulary-parallel head with its own weight."""
    has_weight = "weight" in module._parameters and not hasattr(module, "lookup")
    return is_linear(module) or (hasattr(module, "product") and has_weight)


def find_targets(net: PipelineModule, section: LoraSection) -> list[Named]:
    """Return the linears of `lora.targets` outside of the layers of `lora.train_also`, as peft.

    Raises:
        ConfigError: a target matches no linear, r is larger than a dimension, or the weight is
            tied; names the target and the layer; on every rank.
    """
    modules = list(modules_of(net))
    linears = [named for named in modules if is_linear(named.module)]
    if section.targets == ALL_LINEAR:
        found = [
            named
            for named in linears
            if not net.is_output_head(named.position, named.inner) and _tie(net, named) is None
        ]
    else:
        found = _matching(modules, section.targets, "lora.targets")
    whole = tuple(f"{named.name}." for named in find_trained(net, section))
    if found and all(f"{named.name}.".startswith(whole) for named in found):
        raise ConfigError(
            f"lora.train_also trains all layers of lora.targets completely ({found[0].name!r} ...),"
            " so none gets an adapter: leave them out of lora.train_also, or train without LoRA",
            on_every_rank=True,
        )
    found = [named for named in found if not f"{named.name}.".startswith(whole)]
    if not found:
        raise ConfigError(
            "lora.targets is 'all-linear', and the model has no linear layer besides its output "
            "head and tied ones: LoRA has nothing to train",
            on_every_rank=True,
        )
    for named in found:
        _check(net, named, section)
    return found


def find_trained(net: PipelineModule, section: LoraSection) -> list[Named]:
    """Return the modules of `lora.train_also`, which are trained completely.

    Raises:
        ConfigError: a name matches no module; on every rank.
    """
    modules = list(modules_of(net))
    return _matching(modules, section.train_also, "lora.train_also") if section.train_also else []


def _matching(modules: Sequence[Named], targets: str | Sequence[str], key: str) -> list[Named]:
    patterns = [targets] if isinstance(targets, str) else targets
    by_pattern = {p: [m for m in modules if _matches(m, p, targets)] for p in patterns}
    for pattern, matched in by_pattern.items():
        if not matched:
            ends = _ends(m for m in modules if can_adapt(m.module) or key != "lora.targets")
            raise ConfigError(
                f"{key}: {pattern!r} matches no layer of the model{did_you_mean(pattern, ends)}",
                on_every_rank=True,
            )
    names = {m.name for matched in by_pattern.values() for m in matched}
    return [module for module in modules if module.name in names]


def _matches(named: Named, pattern: str, targets: str | Sequence[str]) -> bool:
    names = named.name, *named.others
    if isinstance(targets, str):
        return any(re.fullmatch(pattern, name) for name in names)
    return any(f".{name}".endswith(f".{pattern}") for name in names)


def _ends(modules: Iterable[Named]) -> list[str]:
    """Return the names without the positions of layers: "attention.qkv"."""
    names = (named.name for named in modules if named.name)
    return list(dict.fromkeys(re.sub(r"^.*?\.\d+\.(?=\D)", "", name) for name in names))


def _check(net: PipelineModule, named: Named, section: LoraSection) -> None:
    kind = type(named.module).__name__
    if not can_adapt(named.module):
        raise ConfigError(
            f"lora.targets matches {named.name!r}, which is a {kind}: an adapter needs a linear "
            f"layer; to train this layer completely, name it in lora.train_also",
            on_every_rank=True,
        )
    tie = _tie(net, named)
    if tie is not None:
        raise ConfigError(
            f"lora.targets matches {named.name!r}, whose weight is tied by the key {tie!r}: its "
            f"copies would get different adapters; leave it out of lora.targets",
            on_every_rank=True,
        )
    outputs, inputs = LinearShape.of(named.module).weight.shape
    if section.r > min(outputs, inputs):
        raise ConfigError(
            f"lora.r ({section.r}) is larger than a dimension of {named.name!r} "
            f"({outputs} x {inputs}): use lora.r <= {min(outputs, inputs)}, or leave this layer "
            f"out of lora.targets",
            on_every_rank=True,
        )


def _tie(net: PipelineModule, named: Named) -> str | None:
    """Return the key by which the weight of a module is tied to weights of other layers."""
    weight = f"{named.inner}.weight" if named.inner else "weight"
    return net.specs[named.position].ties.get(weight, (None, ""))[0]


def transform_model(
    config: Config, net: PipelineModule, mesh: Mesh
) -> tuple[Config, PipelineModule]:
    """Return the config with the values of the adapter at `lora.path`, and the adapted model.

    Raises:
        ConfigError: the errors of `section_of` and `add_lora`; on every rank.
    """
    assert config.lora is not None
    section = on_all_ranks(mesh.world, partial(section_of, config.lora))
    return config.model_copy(update={"lora": section}), add_lora(net, section)


def load_values(config: Config, net: PipelineModule, model: LocalModel) -> None:
    """Load the adapter at `lora.path`, if there is one, into the stages of this rank."""
    assert config.lora is not None
    if config.lora.path is not None:
        load_adapter(Path(config.lora.path), net, model)


def add_lora(net: PipelineModule, section: LoraSection) -> PipelineModule:
    """Return `net` with adapters; the names of its own parameters do not change.

    A module that the user has built is changed itself, as peft changes it.

    Raises:
        ConfigError: `lora.targets`, `lora.train_also` or `lora.r` do not fit the model, or it is
            one of `from_module`; on every rank.
    """
    if net.origin is not None:
        raise ConfigError(
            "lora: the layers of PipelineModule.from_module cannot get adapters: give "
            "PipelineModule the list of the layers, or take a model of transformers "
            "(pipemega.from_pretrained)",
            on_every_rank=True,
        )
    targets = _by_position(find_targets(net, section))
    trained = _with_tied_copies(net, _by_position(find_trained(net, section)))
    factories: dict[tuple[Any, ...], _Factory] = {}

    def adapted(position: int, spec: LayerSpec) -> LayerSpec:
        names = targets.get(position, ()), trained.get(position, ())
        if spec.already_built:
            _adapt(net.meta_layers[position], *names, section)
            return spec
        new = copy.copy(spec)
        # Equal layers share their factory: the planner measures one of them.
        key = (spec.typename, *names)
        new.typename = factories.setdefault(key, _Factory(spec.typename, *names, section))
        if spec.equality_key is not None:
            new.equality_key = (spec.equality_key, *names)
        return new

    specs = [adapted(position, spec) for position, spec in enumerate(net.specs)]
    result = net.with_specs(specs, lambda position: _boundary(net, result, position))
    return result


class _Factory:
    """Builds a layer, adds its adapters, and freezes the rest.

    Args:
        typename: the typename of the spec.
        targets: names of linears in the layer.
        trained: names of modules in the layer, or parameters of them, that are not frozen.
    """

    def __init__(
        self,
        typename: Callable[..., nn.Module],
        targets: tuple[str, ...],
        trained: tuple[str, ...],
        section: LoraSection,
    ) -> None:
        self._typename, self._names, self._section = typename, (targets, trained), section
        self.__name__ = getattr(typename, "__name__", type(typename).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        layer = self._typename(*args, **kwargs)
        _adapt(layer, *self._names, self._section)
        return layer


def _adapt(
    layer: nn.Module, targets: Iterable[str], trained: Iterable[str], section: LoraSection
) -> None:
    layer.requires_grad_(False)
    for name in targets:
        linear = layer.get_submodule(name)
        add_adapter(linear, section)
        for child in (A, B):
            linear.get_submodule(child).requires_grad_(True)
    for name in trained:
        layer.get_parameter(name).requires_grad_(True)


def _by_position(modules: Iterable[Named]) -> dict[int, tuple[str, ...]]:
    """Return position -> names in the layer."""
    found: dict[int, tuple[str, ...]] = {}
    for position, inner, *_ in modules:
        found[position] = (*found.get(position, ()), inner)
    return found


def _with_tied_copies(
    net: PipelineModule, modules: dict[int, tuple[str, ...]]
) -> dict[int, tuple[str, ...]]:
    """Return the parameters of the modules by position; tied ones are at all of their positions."""
    copies = {place: tied.places for tied in net.tied_parameters for place in tied.places}
    found: dict[int, tuple[str, ...]] = {}
    for position, inners in modules.items():
        for inner in inners:
            for last, _ in net.meta_layers[position].get_submodule(inner).named_parameters():
                place = position, f"{inner}.{last}" if inner else last
                for each, name in copies.get(place, (place,)):
                    found[each] = tuple(dict.fromkeys((*found.get(each, ()), name)))
    return found


def _boundary(net: PipelineModule, adapted: PipelineModule, position: int) -> Any:
    """Return the declared input of a layer; without a gradient if only frozen layers precede it."""
    before = adapted.meta_layers[:position]
    trains = any(p.requires_grad for layer in before for p in layer.parameters())

    def with_gradient(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad and trains)

    return pytree.tree_map_only(Tensor, with_gradient, net.boundary(position))


Rows = tuple[int, int] | None


def is_adapter(name: str) -> bool:
    """Return whether `name` is the name of a tensor of an adapter."""
    return f".{name}".endswith((f".{A}.weight", f".{B}.weight"))


def adapter_of(name: str) -> tuple[str, str]:
    """Return the names of A and B of the weight `name`."""
    module = name.removesuffix("weight")
    return f"{module}{A}.weight", f"{module}{B}.weight"


def merged(
    name: str,
    weight: Tensor,
    rows: Rows,
    scale: float,
    names: Collection[str],
    read: Callable[[str, Rows], Tensor],
) -> Tensor:
    """Return rows of a weight with the adapter, computed in fp32 or better.

    Args:
        name: name of the weight; a weight without an adapter is returned as it is.
        weight: these rows of the unsharded weight [rows, in].
        rows: [start, stop); None: all.
        scale: `LoraSection.scale`.
        names: names of all tensors.
        read: returns rows of a tensor.
    """
    a, b = adapter_of(name)
    if not name.endswith("weight") or a not in names:
        return weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    product = read(b, rows).to(dtype) @ read(a, None).to(dtype)
    return torch.add(weight.to(dtype), product, alpha=scale)


def with_adapter(layer: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a built, unsharded layer; a weight with an adapter merged, as a copy.

    Args:
        name: name of the tensor in the state_dict of the layer.
    """
    path, _, last = name.rpartition(".")
    linear = layer.get_submodule(path)
    if last != "weight" or not hasattr(linear, A):
        return tensor
    names = {f"{child}.weight": linear.get_parameter(f"{child}.weight") for child in (A, B)}
    with torch.no_grad():
        scale = getattr(linear, SCALE)
        whole = merged("weight", tensor, None, scale, names, lambda read, _: names[read])
        return whole.to(tensor.dtype)
