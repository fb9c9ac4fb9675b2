"""`model.rope_scaling`: rotary frequencies for longer sequences, by the keys of transformers."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pipemega.config.key_kinds import Section, own, rule
from pipemega.config.value_types import Count, Positive

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]

# Keys that a rope_type uses, besides `factor`; a key with True must be given.
_KEYS: dict[str, dict[str, bool]] = {
    "default": {},
    "linear": {},
    "dynamic": {"original_max_position_embeddings": True},
    "yarn": {
        "original_max_position_embeddings": True, "attention_factor": False, "beta_fast": False,
        "beta_slow": False, "mscale": False, "mscale_all_dim": False, "truncate": False,
    },
    "llama3": {
        "original_max_position_embeddings": True, "low_freq_factor": True,
        "high_freq_factor": True,
    },
}  # fmt: skip


class RopeScalingSection(Section):
    """`rope_scaling` (or `rope_parameters`) of a config of transformers."""

    old_names: ClassVar[Mapping[str, str]] = {"type": "rope_type"}

    rope_type: RopeType = own(
        "default",
        '`"linear"`: positions / factor; `"dynamic"`: NTK, a larger base for samples longer than '
        'the original length; `"yarn"`; `"llama3"`; `"default"`: no scaling.',
    )
    factor: Positive | None = own(
        None,
        "Longest sequence / original length; >= 1. yarn: null for max_position_embeddings / "
        "original.",
    )
    original_max_position_embeddings: Count | None = own(
        None,
        "Length of the sequences before scaling. dynamic: the `max_position_embeddings` of "
        "transformers.",
    )
    attention_factor: Positive | None = own(
        None, "yarn: factor of queries and keys; null: from `factor`, `mscale`, `mscale_all_dim`."
    )
    beta_fast: Positive = own(32.0, "yarn: rotations from which channels are not scaled.")
    beta_slow: Positive = own(1.0, "yarn: rotations up to which channels are scaled by factor.")
    mscale: Positive | None = own(
        None, "yarn: weight of log(factor) in the numerator of the attention factor."
    )
    mscale_all_dim: Positive | None = own(
        None, "yarn: weight of log(factor) in the denominator of the attention factor."
    )
    truncate: bool = own(True, "yarn: round the range of channels to integers.")
    low_freq_factor: Positive | None = own(
        None, "llama3: wavelengths above original length / this are scaled by factor."
    )
    high_freq_factor: Positive | None = own(
        None, "llama3: wavelengths below original length / this are not scaled."
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and "rope_theta" in raw:
            raise ValueError("rope_theta is model.rotary_base here: move its value there")
        if isinstance(raw, Mapping) and "partial_rotary_factor" in raw:
            raise ValueError(
                "partial_rotary_factor is model.rotary_percent here: move its value there"
            )
        return raw

    def hf_keys(self) -> dict[str, Any]:
        """Return the keys of transformers that `rope_type` uses, without null."""
        names = ("rope_type", "factor", *_KEYS[self.rope_type])
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @rule("rope_type", *(name for keys in _KEYS.values() for name in keys), "factor")
    def _keys_fit_the_type(self) -> Iterator[str]:
        kind, keys = self.rope_type, _KEYS[self.rope_type]
        if kind not in ("default", "yarn") and self.factor is None:
            yield f"model.rope_scaling.factor is missing: rope_type '{kind}' needs it"
        for name, needed in keys.items():
            if needed and getattr(self, name) is None:
                yield f"model.rope_scaling.{name} is missing: rope_type '{kind}' needs it"
        known = {"rope_type", *keys, *(() if kind == "default" else ("factor",))}
        for name, field in type(self).model_fields.items():
            if name not in known and getattr(self, name) != field.default:
                used = ", ".join(other for other, names in _KEYS.items() if name in names)
                yield (
                    f"model.rope_scaling.{name} has no effect on rope_type '{kind}', only on "
                    f"{used or 'the other types'}: remove it"
                )

    @rule("factor", "low_freq_factor", "high_freq_factor")
    def _ranges(self) -> Iterator[str]:
        if self.factor is not None and self.factor < 1:
            yield f"model.rope_scaling.factor ({self.factor:g}) must be at least 1"
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            yield (
                f"model.rope_scaling.low_freq_factor ({low:g}) must be below high_freq_factor "
                f"({high:g})"
            )
