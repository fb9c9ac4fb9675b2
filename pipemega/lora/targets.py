"""Which linears of a model get an adapter: `lora.targets` and `lora.train_also`."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from pipemega.config.lora import LoraSection
from pipemega.config.name_suggestions import did_you_mean
from pipemega.errors import ConfigError
from pipemega.lora.low_rank import LinearShape
from pipemega.pipeline.module import PipelineModule
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear

ALL_LINEAR = "all-linear"


class Named(NamedTuple):
    """A module of a layer.

    Args:
        position: of the layer.
        inner: its name in the layer; "" for the layer itself.
        name: its name in the whole model, as `targets` and peft's files have it.
        module: on the meta device.
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
    """Return the key by which the weight of a module is tied to those of other layers."""
    weight = f"{named.inner}.weight" if named.inner else "weight"
    return net.specs[named.position].ties.get(weight, (None, ""))[0]
