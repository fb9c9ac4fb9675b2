"""`optimizer`: its type, and the parameters that each type has.  Floor 1.

Adam, AdamW and Lamb have DeepSpeed's keys and defaults; the others are the classes of torch.optim,
whose own defaults stand where a key is null.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import SerializeAsAny

from pipemega.config.keys import (
    Fraction,
    NotNegative,
    Positive,
    Section,
    SectionClass,
    Whole,
    honoured,
    ignored,
    own,
    refused,
)
from pipemega.config.nearest import did_you_mean

Betas = tuple[Fraction, Fraction]


def torchs(text: str, **constraints: Any) -> Any:
    """A key whose default is that of the class in torch.optim."""
    return own(None, f"{text}; null: torch's default.", **constraints)


class OptimizerParams(Section):
    """What every optimizer takes."""

    max_grad_norm: None = refused(
        None, "Clipping, in the wrong place.", "set gradient_clipping at the top level instead"
    )

    def arguments(self) -> dict[str, Any]:
        """What was given, for the constructor of the optimizer."""
        return {name: value for name, value in self if value is not None}


class TorchParams(OptimizerParams):
    """What every class of torch.optim takes."""

    lr: NotNegative | None = torchs("Learning rate")
    weight_decay: NotNegative | None = torchs("Weight decay")
    foreach: bool | None = torchs("Step all tensors together")
    maximize: bool | None = torchs("Go up, not down")


class AdamParams(OptimizerParams):
    """Adam and AdamW, with DeepSpeed's defaults."""

    lr: NotNegative = honoured(1e-3, "Learning rate.")
    betas: Betas = honoured((0.9, 0.999), "Memory of the two running averages.")
    eps: NotNegative = honoured(1e-8, "Added to the root of the second moment.")
    weight_decay: NotNegative = honoured(0.0, "Weight decay.")
    torch_adam: bool = honoured(False, "torch's Adam, even where apex's is there.")
    adam_w_mode: bool = honoured(
        True, 'Decay the weights, not the gradients; so that "Adam" is AdamW unless this is false.'
    )
    bias_correction: bool = honoured(
        True, "Correct the averages for their start at 0; false needs apex's Adam."
    )
    amsgrad: bool | None = torchs("The AMSGrad variant")
    foreach: bool | None = torchs("Step all tensors together")
    fused: bool | None = torchs("Step in one kernel")
    maximize: bool | None = torchs("Go up, not down")
    capturable: bool | None = torchs("Can be captured in a CUDA graph")


class LambParams(OptimizerParams):
    """LAMB, with DeepSpeed's defaults."""

    lr: NotNegative = honoured(1e-3, "Learning rate.")
    betas: Betas = honoured((0.9, 0.999), "Memory of the two running averages.")
    eps: NotNegative = honoured(1e-8, "Added to the root of the second moment.")
    weight_decay: NotNegative = honoured(0.0, "Weight decay.")
    bias_correction: bool = honoured(True, "Correct the averages for their start at 0.")
    max_coeff: Positive = honoured(10.0, "Largest trust ratio.")
    min_coeff: Positive = honoured(0.01, "Smallest trust ratio.")


class SgdParams(TorchParams):
    momentum: NotNegative | None = torchs("Momentum")
    dampening: float | None = torchs("Dampening of the momentum")
    nesterov: bool | None = torchs("Nesterov's momentum")
    fused: bool | None = torchs("Step in one kernel")


class AdagradParams(TorchParams):
    lr_decay: NotNegative | None = torchs("Decay of the learning rate")
    initial_accumulator_value: NotNegative | None = torchs("Start of the sum of squares")
    eps: NotNegative | None = torchs("Added to the root")
    fused: bool | None = torchs("Step in one kernel")


class RmspropParams(TorchParams):
    alpha: NotNegative | None = torchs("Memory of the average of squares")
    eps: NotNegative | None = torchs("Added to the root")
    momentum: NotNegative | None = torchs("Momentum")
    centered: bool | None = torchs("Subtract the mean's square")
    capturable: bool | None = torchs("Can be captured in a CUDA graph")


class AdadeltaParams(TorchParams):
    rho: Fraction | None = torchs("Memory of the averages")
    eps: NotNegative | None = torchs("Added to the root")
    capturable: bool | None = torchs("Can be captured in a CUDA graph")


class AdamaxParams(TorchParams):
    betas: Betas | None = torchs("Memory of the two averages")
    eps: NotNegative | None = torchs("Added to the maximum")
    capturable: bool | None = torchs("Can be captured in a CUDA graph")


class RAdamParams(AdamaxParams):
    decoupled_weight_decay: bool | None = torchs("Decay the weights, not the gradients")


class NAdamParams(RAdamParams):
    momentum_decay: NotNegative | None = torchs("Decay of the momentum")


class AsgdParams(TorchParams):
    lambd: NotNegative | None = torchs("Decay of the step")
    alpha: NotNegative | None = torchs("Power of the step")
    t0: NotNegative | None = torchs("When averaging begins")
    capturable: bool | None = torchs("Can be captured in a CUDA graph")


class RpropParams(OptimizerParams):
    lr: NotNegative | None = torchs("Learning rate")
    etas: tuple[Positive, Positive] | None = torchs("Factors of smaller and larger steps")
    step_sizes: tuple[Positive, Positive] | None = torchs("Smallest and largest step")
    foreach: bool | None = torchs("Step all tensors together")
    maximize: bool | None = torchs("Go up, not down")
    capturable: bool | None = torchs("Can be captured in a CUDA graph")


class AdafactorParams(TorchParams):
    beta2_decay: float | None = torchs("Power by which the memory grows", le=0)
    eps: tuple[NotNegative | None, NotNegative] | None = torchs("Two small numbers")
    d: float | None = torchs("Clipping threshold of the update", ge=1)


class MuonParams(OptimizerParams):
    lr: NotNegative | None = torchs("Learning rate")
    weight_decay: NotNegative | None = torchs("Weight decay")
    momentum: NotNegative | None = torchs("Momentum")
    nesterov: bool | None = torchs("Nesterov's momentum")
    ns_coefficients: tuple[float, float, float] | None = torchs("Of Newton-Schulz")
    ns_steps: Whole | None = torchs("Steps of Newton-Schulz", le=99)
    eps: NotNegative | None = torchs("Added to a norm")
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = torchs("Scale of the rate")


# SerializeAsAny and the union below are for the JSON Schema; which class it is follows from `type`.
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

_ONE_BIT = "it needs an all-reduce that compresses, which is not here; use Adam, AdamW or Lamb"
_MU = "it belongs to the mup package, which is not used here; use Adam, AdamW or SGD"
REFUSED: Mapping[str, str] = {
    "OneBitAdam": _ONE_BIT,
    "OneBitLamb": _ONE_BIT,
    "ZeroOneAdam": _ONE_BIT,
    "MuAdam": _MU,
    "MuAdamW": _MU,
    "MuSGD": _MU,
    "Lion": "it is not in torch.optim; use AdamW",
    "LBFGS": "it evaluates the model several times a step, which a pipeline cannot offer it",
    "SparseAdam": "it takes sparse gradients only, and gradients here are dense; use Adam",
}


class OptimizerSection(Section):
    """The optimizer; leave it out to hand one to `initialize`."""

    type: Literal[
        "Adam", "AdamW", "Lamb", "SGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD",
        "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    ] = honoured(..., "Which one, in any case of letters.")  # fmt: skip
    params: SerializeAsAny[OptimizerParams] = honoured(..., "What that type takes; see below.")
    legacy_fusion: bool = ignored(
        False, "DeepSpeed: its old fused step.", "the kernel is chosen by what is installed"
    )

    @property
    def state_bytes(self) -> int:
        """Of an fp32 parameter: 4 for each number that the optimizer keeps beside it."""
        momentum = 4 if getattr(self.params, "momentum", None) else 0
        fixed = {"SGD": 0, "RMSprop": 4, "Adagrad": 4, "Muon": 0, "Adafactor": 0}
        return fixed.get(self.type, 8) + momentum

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        return with_type(raw, "optimizer.type", PARAMS, REFUSED)

    @classmethod
    def section_at(cls, key: str, raw: Mapping[str, Any]) -> SectionClass | None:
        return PARAMS[raw["type"]] if key == "params" else super().section_at(key, raw)

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


def with_type(
    raw: Any, name: str, known: Iterable[str], reasons: Mapping[str, str] | None = None
) -> Any:
    """`raw` with its `type` as we write it, and `params` if they are missing.

    Raises:
        ValueError: a type that is refused, or that nobody knows.
    """
    if not isinstance(raw, Mapping):
        return raw
    if not isinstance(given := raw.get("type"), str):
        is_there = "is missing" if given is None else f"must be a text, not {given!r}"
        raise ValueError(f"{name} {is_there}; known here: {', '.join(known)}")
    words = {word.lower(): word for word in (*known, *(reasons or {}))}
    word = words.get(given.lower())
    if word is None:
        raise ValueError(f"{name} {given!r} is not known{did_you_mean(given, known)}")
    if reasons and word in reasons:
        raise ValueError(f"{name} cannot be {given!r}: {reasons[word]}")
    open_params = raw.get("params", "auto") in ("auto", None)
    return {**raw, "type": word, "params": {} if open_params else raw["params"]}
