"""`deepspeed.moe`: scripts import its names also where the model has no experts."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from pipemega.errors import ConfigError


class MoE(nn.Module):
    """Refuses to build a layer of experts.

    Raises:
        ConfigError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "deepspeed.moe.layer.MoE: mixture-of-experts layers do not exist; use a layer without "
            "experts",
            on_every_rank=True,
        )


def is_moe_param(param: Tensor) -> bool:
    """Return False: there are no experts."""
    return False


def has_moe_layers(model: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): there are no experts."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: float = 0
) -> list[dict[str, Any]]:
    """Return the groups as a list: there are no experts, which would get groups of their own."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    return [dict(group) for group in groups]
