"""First values of the parameters of one part of a model: from a source, or as HF initialises it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.errors import ConfigError
from pipemega.hf.parameter_memory import allocate
from pipemega.hf.weight_source import WeightSource, is_transposed
from pipemega.parameters import shard_of


def set_first_values(
    module: nn.Module,
    source: WeightSource | None,
    whole_model: Callable[[], Any],
    names: Mapping[str, str],
) -> None:
    """Load parameters and persistent buffers of `module`; initialise those without a value.

    Args:
        source: None: all parameters are initialised.
        whole_model: see `_initialize_as_hf`.
        names: name in `module` -> name in the state_dict of the transformers model.
    """
    tensors = module.state_dict(keep_vars=True)
    if source is None or not all(source.has(names[name]) for name in tensors):
        _initialize_as_hf(module, whole_model, names)
    if source is not None:
        for name, tensor in tensors.items():
            if source.has(names[name]):
                source.load(names[name], tensor)


def _initialize_as_hf(
    module: nn.Module, whole_model: Callable[[], Any], names: Mapping[str, str]
) -> None:
    """Fill the shards of `module` with slices of a whole that HF has initialised on the CPU.

    The values come from torch's CPU generator, so they are equal on every mesh if its seed is.

    Args:
        whole_model: returns the transformers model with the unsharded part and no other layers,
            on meta; called once.
        names: see `set_first_values`. Parameters that the whole does not have are tied to those
            of another part, and are skipped.

    Raises:
        ConfigError: HF does not initialise a parameter.
    """
    with torch.device("cpu"), torch.no_grad():
        whole: Any = allocate(whole_model(), "cpu")
        for parameter in whole.parameters():
            parameter.fill_(torch.nan)
        for part in whole.modules():
            vars(part).pop("_is_hf_initialized", None)
        whole.initialize_weights()
    values: dict[str, Tensor] = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in module.named_parameters():
        full = values.get(names[name])
        if full is None:
            continue
        if bool(full.isnan().any()):
            raise ConfigError(
                f"{type(whole).__name__} does not initialise {names[name]}: transformers has no "
                f"rule for it. Train from saved weights (pretrained=True)",
                on_every_rank=True,
            )
        shard_of(parameter).copy_from_full(full.T if is_transposed(parameter) else full, parameter)
