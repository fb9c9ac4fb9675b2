"""`lora`: low-rank adapters for the linear layers of a frozen model, with peft's meaning."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipemega.config.key_kinds import Section, own, rule
from pipemega.config.value_types import Count, Fraction, Name, Positive
from pipemega.errors import ConfigError


class LoraSection(Section):
    """Train y = W x + alpha / r * B A x, with W frozen; see docs/lora.md."""

    r: Count = own(8, "Rank: rows of A, columns of B.")
    alpha: Positive = own(8.0, "The product B A is multiplied by alpha / r.")
    targets: Name | tuple[Name, ...] = own(
        "all-linear",
        'Linear layers with an adapter: `"all-linear"`, all except the output head and layers with '
        "tied weights; a list of names, each a whole name or its last parts (`q_proj` matches "
        "`model.layers.0.self_attn.q_proj`); or a regular expression that matches whole names.",
    )
    dropout: Fraction = own(0.0, "Dropout probability of the input of A.")
    rslora: bool = own(False, "Multiply by alpha / sqrt(r) (rank-stabilized LoRA).")
    train_also: tuple[Name, ...] = own(
        (),
        "Layers to train completely, such as a new head: names as in `targets` (peft: "
        "`modules_to_save`).",
    )
    path: Name | None = own(
        None,
        "Folder of an adapter in peft's format to start from. Keys that are not set here take the "
        "values of its adapter_config.json.",
    )

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (self.r**0.5 if self.rslora else self.r)

    @rule("targets")
    def _has_targets(self) -> Iterator[str]:
        if self.targets == ():
            yield 'lora.targets is an empty list: name the layers, or write "all-linear"'

    def with_file_values(self, values: Mapping[str, Any]) -> "LoraSection":
        """Return the section with the values of an adapter's file for the keys that are not set.

        Raises:
            ConfigError: a key that is set has another value; on every rank.
        """
        for key, value in values.items():
            own_value = getattr(self, key)
            if key in self.model_fields_set and key != "dropout" and not _equal(own_value, value):
                raise ConfigError(
                    f"lora.{key} is {own_value!r}, and {self.path}/adapter_config.json has "
                    f"{value!r}: remove lora.{key}, or start without lora.path",
                    on_every_rank=True,
                )
        new = {key: value for key, value in values.items() if key not in self.model_fields_set}
        return self.model_copy(update=new)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return sorted(one) == sorted(other)
    return bool(one == other)
