"""The keys of the config section `model` for mixtures of experts, from Megatron's arguments."""

from typing import Any

from pipemega.compat.megatron.arguments import SECTIONS, Argument, Given

_ARGUMENTS = SECTIONS["Mixtures of experts"]
_SCORES = ("softmax", "sigmoid")
_BALANCE = ("aux_loss", "seq_aux_loss", "none")
# Without the second argument the first has no effect in Megatron; here its key would be an error.
_NEEDS = {
    "moe-router-num-groups": "moe-router-group-topk",
    "moe-shared-expert-gate": "moe-shared-expert-intermediate-size",
}


def expert_keys(given: Given) -> dict[str, Any]:
    """Return the keys of experts that are given; none for a model without experts."""
    if (given.number("num-experts") or 0) <= 1:
        for argument in _ARGUMENTS[1:]:
            if argument.name in given:
                given.say("note", argument.name, "no effect without --num-experts")
        return {}
    _check_layout(given)
    found: dict[str, Any] = {}
    for argument in _ARGUMENTS:
        name, other = argument.name, _NEEDS.get(argument.name)
        if other is not None and name in given and other not in given:
            given.say("note", name, f"no effect without --{other}")
        elif name in given:
            found[argument.keys.removeprefix("model.")] = _value(given, argument)
    _check_scores(given, found)
    return found | _balance(given)


def _value(given: Given, argument: Argument) -> Any:
    readers = {"flag": given.flag, "text": given.text, "list": given.text, "pattern": given.pattern}
    return readers.get(argument.kind, given.number)(argument.name)


def _check_layout(given: Given) -> None:
    if given.flag("deepspeed"):
        given.say("refused", "num-experts", "with --deepspeed these are DeepSpeed's experts, which "
                  "drop tokens: use Megatron-LM's arguments, without --deepspeed")  # fmt: skip
    tensor = given.number("tensor-model-parallel-size", 1)
    if given.number("expert-tensor-parallel-size", tensor) != tensor:
        given.say("refused", "expert-tensor-parallel-size", "mesh.tensor cuts experts like other "
                  f"layers: set it to --tensor-model-parallel-size, {tensor}")  # fmt: skip


def _check_scores(given: Given, found: dict[str, Any]) -> None:
    kind, topk = found.get("moe_router_score_function", "softmax"), found.get("moe_router_topk", 2)
    if kind not in _SCORES:
        del found["moe_router_score_function"]
        given.say("refused", "moe-router-score-function", f"it must be {' or '.join(_SCORES)}")
    # With one expert of each group, logits and probabilities give the same order.
    several = found.get("moe_router_group_topk", topk) != topk
    if several and kind == "softmax" and not found.get("moe_router_pre_softmax"):
        given.say("changed", "moe-router-group-topk", "groups are chosen by sums of probabilities; "
                  "Megatron adds logits, without --moe-router-pre-softmax")  # fmt: skip


def _balance(given: Given) -> dict[str, Any]:
    """Return the auxiliary loss; None for its keys if there is none."""
    name = "moe-router-load-balancing-type"
    kind, coefficient = given.text(name, "aux_loss"), given.number("moe-aux-loss-coeff")
    if kind not in _BALANCE or len(given.values.get(name, ())) > 1:
        given.say("refused", name, f"it must be one of {', '.join(_BALANCE)}: use seq_aux_loss, or "
                  "--moe-router-enable-expert-bias")  # fmt: skip
        coefficient = None
    used = bool(coefficient) and kind != "none"
    return {
        "moe_router_load_balancing_type": kind if used else None,
        "moe_aux_loss_coeff": coefficient if used else None,
    }
