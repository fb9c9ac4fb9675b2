r"""The config section `optimizer`: its type, and the parameters of each type.

Adam, AdamW and Lamb have DeepSpeed's keys and defaults; the others are the classes of torch.optim,
with torch's default where a key is null.

Groups of parameters that are chosen by name: `optimizer.groups`, and initialize's argument.

[{"params": "norm|bias", "weight_decay": 0.0}, {"params": "^0\.", "lr": 1e-5}]
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import SerializeAsAny, ValidationError

from pipemega.config.declarations import (
    Fraction,
    InvalidType,
    NotNegative,
    Positive,
    Section,
    SectionClass,
    Whole,
    honoured,
    ignored,
    own,
    refused,
    rule,
    type_text,
)
from pipemega.config.name_suggestions import did_you_mean, nearest
from pipemega.config.source import show

_EXAMPLE = 'such as {"params": "norm|bias", "weight_decay": 0.0}'


class GroupSpec(NamedTuple):
    """One group.

    Args:
        key: the key of the group, for messages: "optimizer.groups[0]".
        pattern: a regular expression; `re.search` finds it in the logical names of its parameters.
        options: the options of the optimizer for these parameters.
    """

    key: str
    pattern: str
    options: Mapping[str, Any]


def read_groups(groups: Any, name: str) -> tuple[GroupSpec, ...]:
    """Return the groups, without a check of their options.

    Args:
        name: the name of the key or the argument, for messages.

    Raises:
        ValueError: `groups` is not a list of groups, or a regular expression is invalid.
    """
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise ValueError(f"{name} must be a list of groups {_EXAMPLE}, not {_shown(groups)}")
    return tuple(_read_group(group, f"{name}[{i}]") for i, group in enumerate(groups))


def _read_group(group: Any, key: str) -> GroupSpec:
    if not isinstance(group, Mapping):
        raise ValueError(f"{key} must be a group {_EXAMPLE}, not {_shown(group)}")
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()}
    pattern = options.pop("params", None)
    if not isinstance(pattern, str):
        found = "is missing" if pattern is None else f"must be text, not {_shown(pattern)}"
        raise ValueError(
            f"{key}.params {found}: it is a regular expression for the logical names of the "
            f"group's parameters, {_EXAMPLE}"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{key}.params {pattern!r} is not a regular expression: {error}"
        ) from error
    return GroupSpec(key, pattern, options)


def option_errors(spec: GroupSpec, params: type[Section], names: Sequence[str]) -> Iterator[str]:
    """Yield the errors in the options of a group of an optimizer of the config.

    Args:
        params: the section that describes the options.
        names: names of the options that may differ between groups.
    """
    for name, value in spec.options.items():
        if name not in names:
            yield f"{spec.key} has the unknown option {name!r}{did_you_mean(name, names)}"
            continue
        try:
            params.model_validate({name: value})
        except ValidationError:
            field = params.model_fields[name]
            expected = type_text(field.annotation, field.metadata)
            yield f"{spec.key}.{name} must be {expected}, not {_shown(value)}"


def _shown(value: Any) -> str:
    plain = isinstance(value, str | int | float | tuple | list | dict | None)
    return show(value) if plain else f"a {type(value).__name__}"


Betas = tuple[Fraction, Fraction]


def torch_key(text: str, **constraints: Any) -> Any:
    """Declare a key whose default is the default of the class in torch.optim."""
    return own(None, f"{text}; null: torch's default.", **constraints)


class OptimizerParams(Section):
    """Keys of every optimizer."""

    same_for_all: ClassVar[frozenset[str]] = frozenset({"max_grad_norm"})
    """Keys that cannot differ between groups of parameters."""

    max_grad_norm: None = refused(
        None, "Gradient clipping.", "set gradient_clipping at the top level instead"
    )

    @classmethod
    def group_options(cls) -> list[str]:
        """Return the keys that may differ between groups of parameters."""
        return [name for name in cls.model_fields if name not in cls.same_for_all]

    def arguments(self) -> dict[str, Any]:
        """Return the keys that are not null, as arguments of the optimizer's constructor."""
        return {name: value for name, value in self if value is not None}


class TorchParams(OptimizerParams):
    """Keys that most classes of torch.optim have."""

    lr: NotNegative | None = torch_key("Learning rate")
    weight_decay: NotNegative | None = torch_key("Weight decay")
    foreach: bool | None = torch_key("Update all tensors together")
    maximize: bool | None = torch_key("Maximize the loss, not minimize")


class AdamParams(OptimizerParams):
    """Adam and AdamW, with DeepSpeed's defaults."""

    same_for_all = OptimizerParams.same_for_all | {"torch_adam", "adam_w_mode", "bias_correction"}

    lr: NotNegative = honoured(1e-3, "Learning rate.")
    betas: Betas = honoured((0.9, 0.999), "Decay rates of the two running averages.")
    eps: NotNegative = honoured(1e-8, "Added to the square root of the second moment.")
    weight_decay: NotNegative = honoured(0.0, "Weight decay.")
    torch_adam: bool = honoured(False, "Use torch's Adam even if apex's is installed.")
    adam_w_mode: bool = honoured(
        True, 'Decay the weights, not the gradients: "Adam" is AdamW unless this is false.'
    )
    bias_correction: bool = honoured(True, "Correct the initial bias; false needs apex's Adam.")
    amsgrad: bool | None = torch_key("The AMSGrad variant")
    foreach: bool | None = torch_key("Update all tensors together")
    fused: bool | None = torch_key("Use one fused kernel")
    maximize: bool | None = torch_key("Maximize the loss, not minimize")
    capturable: bool | None = torch_key("Allow capture in a CUDA graph")


class LambParams(OptimizerParams):
    """LAMB, with DeepSpeed's defaults."""

    lr: NotNegative = honoured(1e-3, "Learning rate.")
    betas: Betas = honoured((0.9, 0.999), "Decay rates of the two running averages.")
    eps: NotNegative = honoured(1e-8, "Added to the square root of the second moment.")
    weight_decay: NotNegative = honoured(0.0, "Weight decay.")
    bias_correction: bool = honoured(True, "Correct the averages for their initial 0.")
    max_coeff: Positive = honoured(10.0, "Largest trust ratio.")
    min_coeff: Positive = honoured(0.01, "Smallest trust ratio.")


class SgdParams(TorchParams):
    momentum: NotNegative | None = torch_key("Momentum")
    dampening: float | None = torch_key("Dampening of the momentum")
    nesterov: bool | None = torch_key("Nesterov's momentum")
    fused: bool | None = torch_key("Use one fused kernel")


class AdagradParams(TorchParams):
    lr_decay: NotNegative | None = torch_key("Decay of the learning rate")
    initial_accumulator_value: NotNegative | None = torch_key("Initial sum of squares")
    eps: NotNegative | None = torch_key("Added to the root")
    fused: bool | None = torch_key("Use one fused kernel")


class RmspropParams(TorchParams):
    alpha: NotNegative | None = torch_key("Decay rate of the average of squares")
    eps: NotNegative | None = torch_key("Added to the root")
    momentum: NotNegative | None = torch_key("Momentum")
    centered: bool | None = torch_key("Subtract the square of the mean")
    capturable: bool | None = torch_key("Allow capture in a CUDA graph")


class AdadeltaParams(TorchParams):
    rho: Fraction | None = torch_key("Decay rate of the averages")
    eps: NotNegative | None = torch_key("Added under the root")
    capturable: bool | None = torch_key("Allow capture in a CUDA graph")


class AdamaxParams(TorchParams):
    betas: Betas | None = torch_key("Decay rates of the two averages")
    eps: NotNegative | None = torch_key("Added to the absolute gradient")
    capturable: bool | None = torch_key("Allow capture in a CUDA graph")


class RAdamParams(AdamaxParams):
    eps: NotNegative | None = torch_key("Added to the root")
    decoupled_weight_decay: bool | None = torch_key("Decay the weights, not the gradients")


class NAdamParams(RAdamParams):
    momentum_decay: NotNegative | None = torch_key("Decay of the momentum")


class AsgdParams(TorchParams):
    lambd: NotNegative | None = torch_key("Decay of the step size")
    alpha: NotNegative | None = torch_key("Exponent of the step size")
    t0: NotNegative | None = torch_key("Step at which averaging begins")
    capturable: bool | None = torch_key("Allow capture in a CUDA graph")


class RpropParams(OptimizerParams):
    lr: NotNegative | None = torch_key("Learning rate")
    etas: tuple[Positive, Positive] | None = torch_key("Factors that shrink and grow the step size")
    step_sizes: tuple[Positive, Positive] | None = torch_key("Smallest and largest step size")
    foreach: bool | None = torch_key("Update all tensors together")
    maximize: bool | None = torch_key("Maximize the loss, not minimize")
    capturable: bool | None = torch_key("Allow capture in a CUDA graph")


class AdafactorParams(TorchParams):
    beta2_decay: float | None = torch_key("Exponent of the decay rate of the second moment", le=0)
    eps: tuple[NotNegative | None, NotNegative] | None = torch_key(
        "Regularization of the squared gradient and of the parameter scale"
    )
    d: float | None = torch_key("Clipping threshold of the update", ge=1)


class MuonParams(OptimizerParams):
    lr: NotNegative | None = torch_key("Learning rate")
    weight_decay: NotNegative | None = torch_key("Weight decay")
    momentum: NotNegative | None = torch_key("Momentum")
    nesterov: bool | None = torch_key("Nesterov's momentum")
    ns_coefficients: tuple[float, float, float] | None = torch_key("Coefficients of Newton-Schulz")
    ns_steps: Whole | None = torch_key("Iterations of Newton-Schulz", le=99)
    eps: NotNegative | None = torch_key("Added to the norm")
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = torch_key(
        "How the learning rate depends on the shape of the matrix"
    )


# `type` selects the class of `params`.
PARAMS: Mapping[str, type[OptimizerParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Lamb": LambParams,
    "SGD": SgdParams,
    "Adadelta": AdadeltaParams,
    "Adafactor": AdafactorParams,
    "Adagrad": AdagradParams,
    "Adamax": AdamaxParams,
    "ASGD": AsgdParams,
    "Muon": MuonParams,
    "NAdam": NAdamParams,
    "RAdam": RAdamParams,
    "RMSprop": RmspropParams,
    "Rprop": RpropParams,
}


class Refused(NamedTuple):
    """Why an optimizer of DeepSpeed or torch is refused, and the one to use instead."""

    why: str
    instead: str


_ONE_BIT = "it needs a compressed all-reduce, which is not supported; use Adam, AdamW or Lamb"
_MU = "it belongs to the mup package, which is not supported; use Adam, AdamW or SGD"
REFUSED: Mapping[str, Refused] = {
    "OneBitAdam": Refused(_ONE_BIT, "Adam"),
    "OneBitLamb": Refused(_ONE_BIT, "Lamb"),
    "ZeroOneAdam": Refused(_ONE_BIT, "Adam"),
    "MuAdam": Refused(_MU, "Adam"),
    "MuAdamW": Refused(_MU, "AdamW"),
    "MuSGD": Refused(_MU, "SGD"),
    "Lion": Refused(
        "it is not in torch.optim; use AdamW, or give the class to initialize(optimizer=...)",
        "AdamW",
    ),
    "LBFGS": Refused(
        "it evaluates the model several times per step, which a pipeline cannot do; use AdamW",
        "AdamW",
    ),
    "SparseAdam": Refused(
        "it needs sparse gradients, and gradients are dense here; use Adam", "Adam"
    ),
}


class OptimizerSection(Section):
    """The optimizer; without this section the engine can evaluate but not train."""

    type: Literal[
        "Adam", "AdamW", "Lamb", "SGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD",
        "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    ] = honoured(..., "The class; case is ignored.")  # fmt: skip
    params: SerializeAsAny[OptimizerParams] = honoured(..., "Parameters of the type, listed below.")
    groups: tuple[Mapping[str, Any], ...] = own(
        (),
        'Options for some parameters: [{"params": "norm|bias", "weight_decay": 0.0}, ...]. '
        "`params` is a regular expression that is searched in logical names; the first "
        "matching group is used.",
    )
    legacy_fusion: bool = ignored(
        False, "DeepSpeed: the old fused step.", "the kernel depends on what is installed"
    )

    @property
    def state_bytes(self) -> int:
        """Bytes of state per parameter: 4 for each fp32 number that the optimizer keeps."""
        # A section with errors can lack both keys.
        params, kind = getattr(self, "params", None), getattr(self, "type", "")
        momentum = 4 if getattr(params, "momentum", None) else 0
        fixed = {"SGD": 0, "RMSprop": 4, "Adagrad": 4, "Muon": 0, "Adafactor": 0}
        return fixed.get(kind, 8) + momentum

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        return normalize_type(raw, "optimizer.type", PARAMS, REFUSED)

    @classmethod
    def section_at(cls, key: str, raw: Mapping[str, Any]) -> SectionClass | None:
        return PARAMS[raw["type"]] if key == "params" else super().section_at(key, raw)

    @rule("groups", "type")
    def _groups_are_valid(self) -> Iterator[str]:
        for spec in read_groups(self.groups, "optimizer.groups"):
            yield from option_errors(spec, type(self.params), self.params.group_options())

    def remarks(self) -> Iterable[str]:
        params = self.params
        if (
            self.type == "Adam"
            and isinstance(params, AdamParams)
            and params.weight_decay
            and "adam_w_mode" not in params.model_fields_set
        ):
            yield (
                "optimizer Adam decays the weights as AdamW does, as in DeepSpeed; "
                "optimizer.params.adam_w_mode false adds the decay to the gradients instead"
            )


def normalize_type(
    raw: Any,
    name: str,
    known: Mapping[str, SectionClass],
    refused_types: Mapping[str, Refused] | None = None,
) -> Any:
    """Return `raw` with the canonical spelling of `type`, and with `params`.

    Raises:
        InvalidType: the type is unknown or refused.
    """
    if not isinstance(raw, Mapping):
        return raw
    open_params = raw.get("params", "auto") in ("auto", None)
    raw = {**raw, "params": {} if open_params else raw["params"]}
    if not isinstance(given := raw.get("type"), str):
        problem = "is missing" if given is None else f"must be text, not {given!r}"
        raise InvalidType(f"{name} {problem}; known here: {', '.join(known)}")
    refused_types = refused_types or {}
    spelling = {word.lower(): word for word in (*known, *refused_types)}
    word = spelling.get(given.lower())
    if word is None:
        near = nearest(given, known)
        meant = {**raw, "type": near[0]} if near else None
        raise InvalidType(f"{name} {given!r} is not known{did_you_mean(given, known)}", meant)
    if word in refused_types:
        why, instead = refused_types[word]
        others, rest = _without_unknown(raw["params"], known[instead])
        section = name.removesuffix(".type")
        keys = ", ".join(f"{section}.params.{key}" for key in others)
        removal = f"; then remove {keys}" if keys else ""
        meant = {**raw, "type": instead, "params": rest}
        raise InvalidType(f"{name} cannot be {given!r}: {why}{removal}", meant)
    return {**raw, "type": word}


def _without_unknown(params: Any, kind: SectionClass) -> tuple[list[str], Any]:
    """Return the keys that `kind` does not have, and the others with their values."""
    if not isinstance(params, Mapping):
        return [], params
    others = [key for key in params if key not in kind.model_fields]
    return others, {key: value for key, value in params.items() if key not in others}
