"""Megatron's arguments for mixtures of experts."""

from typing import Any

import pytest

from pipemega.compat.megatron import MegatronConversion, convert, find_launches
from pipemega.config import load

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --train-iters 100 --mock-data --vocab-size 128 "
)
EXPERTS = SMALL + "--num-experts 8 "


def conversion_of(arguments: str) -> MegatronConversion:
    return convert(find_launches(arguments, None, {})[0])


def expert_keys(conversion: MegatronConversion) -> dict[str, Any]:
    """Return the keys of experts in the section `model`, without their number."""
    return {key: value for key, value in conversion.config["model"].items() if "moe_" in key}


def lines_of(conversion: MegatronConversion) -> list[str]:
    return [str(remark) for remark in conversion.remarks]


KEYS: dict[str, dict[str, Any]] = {
    # Megatron's defaults, two experts of a token and no auxiliary loss, are the defaults here.
    "": {},
    "--moe-router-topk 4 --moe-ffn-hidden-size 96 --moe-layer-freq 2": {
        "moe_router_topk": 4, "moe_ffn_hidden_size": 96, "moe_layer_freq": 2,
    },
    "--moe-layer-freq ([0]*1+[1]*3)": {"moe_layer_freq": [0, 1, 1, 1]},
    "--moe-layer-freq '([0] + [1]) * 2'": {"moe_layer_freq": [0, 1, 0, 1]},
    "--moe-layer-freq [1]*4": {"moe_layer_freq": [1, 1, 1, 1]},
    "--moe-layer-freq [0,1,1,0]": {"moe_layer_freq": [0, 1, 1, 0]},
    # The loss of a micro-batch is Megatron's default type.
    "--moe-aux-loss-coeff 1e-2": {
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01,
    },
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4": {
        "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4,
    },
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-2": {},
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0": {},
    "--moe-z-loss-coeff 1e-3": {"moe_z_loss_coeff": 1e-3},
    "--moe-router-pre-softmax --moe-router-topk 1": {
        "moe_router_pre_softmax": True, "moe_router_topk": 1,
    },
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4": {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0, "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4,
    },
    "--moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate": {
        "moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("arguments", KEYS)
def test_an_argument_of_experts_sets_its_keys_in_a_config_that_loads(arguments: str) -> None:
    conversion = conversion_of(EXPERTS + arguments)
    assert conversion.config["model"]["num_experts"] == 8
    assert expert_keys(conversion) == KEYS[arguments]
    assert conversion.is_complete, lines_of(conversion)
    load(conversion.config)


def test_the_mesh_has_the_expert_parallel_size() -> None:
    arguments = "--expert-model-parallel-size 4 --tensor-model-parallel-size 2 "
    conversion = conversion_of(EXPERTS + arguments + "--expert-tensor-parallel-size 2")
    assert conversion.config["mesh"] == {"tensor": 2, "pipeline": 1, "expert": 4}
    assert conversion.is_complete, lines_of(conversion)
    assert "expert" not in conversion_of(EXPERTS).config["mesh"]


@pytest.mark.parametrize(
    "pattern",
    [
        "__import__('os')", "[0]*-1", "[1]**4", "[0]*99999999*99999999", "[0]*10000*10000",
        "[1", "[1]+1", "[True]*4", "1.5", "+".join(["[1]"] * 9000), "(" * 300 + "1" + ")" * 300,
    ],
    ids=range(11),
)  # fmt: skip
def test_a_pattern_of_layers_has_lists_sums_and_products_only(pattern: str) -> None:
    conversion = conversion_of(f'{EXPERTS} --moe-layer-freq "{pattern}"')
    assert not conversion.is_complete
    text = "the value must be an integer, or a list such as ([0]*3+[1]*58)"
    assert any(line.endswith(text) for line in lines_of(conversion)), lines_of(conversion)
    assert expert_keys(conversion) == {}


REFUSED = {
    "--moe-router-load-balancing-type sinkhorn": (
        "--moe-router-load-balancing-type sinkhorn: it must be one of aux_loss, seq_aux_loss, "
        "none: use seq_aux_loss, or --moe-router-enable-expert-bias"
    ),
    "--moe-router-load-balancing-type global_aux_loss": (
        "--moe-router-load-balancing-type global_aux_loss: it must be one of aux_loss"
    ),
    "--moe-router-load-balancing-type quantile_balancing": (
        "--moe-router-load-balancing-type quantile_balancing: it must be one of aux_loss"
    ),
    "--moe-router-load-balancing-type aux_loss seq_aux_loss": (
        "--moe-router-load-balancing-type aux_loss seq_aux_loss: it must be one of aux_loss"
    ),
    "--moe-router-score-function sqrtsoftplus": (
        "--moe-router-score-function sqrtsoftplus: it must be softmax or sigmoid"
    ),
    "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1": (
        "--expert-tensor-parallel-size 1: mesh.tensor cuts experts like other layers: set it to "
        "--tensor-model-parallel-size, 2"
    ),
    "--moe-expert-capacity-factor 1.25": (
        "--moe-expert-capacity-factor 1.25: no token is dropped here, so experts have no capacity"
    ),
    "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity": (
        "--moe-expert-capacity-factor 1: no token is dropped here"
    ),
    "--moe-input-jitter-eps 0.1": "--moe-input-jitter-eps 0.1: the router adds no noise",
    "--moe-latent-size 32": "--moe-latent-size 32: experts take tokens of --hidden-size channels",
    "--moe-apply-probs-on-input": "--moe-apply-probs-on-input: the weights of the router multiply",
    "--moe-use-upcycling": "--moe-use-upcycling: the weights of a dense model are not made into",
    "--moe-router-force-load-balancing": (
        "--moe-router-force-load-balancing: it replaces the choices of the router by random ones"
    ),
    "--moe-router-topk-limited-devices 2": (
        "--moe-router-topk-limited-devices 2: use its new form: --moe-router-group-topk with this"
    ),
    "--deepspeed": (
        "--num-experts 8: with --deepspeed these are DeepSpeed's experts, which drop tokens: use "
        "Megatron-LM's arguments, without --deepspeed"
    ),
    "--moe-expert-parallel-size 4 --topk 2": (
        "--moe-expert-parallel-size 4: it configures DeepSpeed's experts, which have another router"
    ),
    "--moe-something-new 3": (
        "--moe-something-new 3: it is not known what it changes in experts: remove it if the "
        "results do not depend on it"
    ),
}  # fmt: skip


@pytest.mark.parametrize("arguments", REFUSED)
def test_an_argument_that_would_train_other_experts_is_refused_by_name(arguments: str) -> None:
    conversion = conversion_of(EXPERTS + arguments)
    lines = lines_of(conversion)
    assert any(line.startswith(f"refused: {REFUSED[arguments]}") for line in lines), lines
    assert not conversion.is_complete


LINES = {
    "--moe-grouped-gemm": "ignored: --moe-grouped-gemm: the same numbers by other messages or",
    "--moe-token-dispatcher-type alltoall": "ignored: --moe-token-dispatcher-type alltoall: the",
    "--moe-permute-fusion": "ignored: --moe-permute-fusion: the same numbers",
    "--moe-flex-dispatcher-backend deepep": "ignored: --moe-flex-dispatcher-backend deepep: the",
    "--overlap-moe-expert-parallel-comm": (
        "ignored: --overlap-moe-expert-parallel-comm: the same numbers: an exchange of tokens "
        "overlaps with the shared expert, and pipeline.fill_waits runs weight gradients within it, "
        "under schedules with split backward"
    ),
    "--delay-wgrad-compute": "ignored: --delay-wgrad-compute: the same numbers: an exchange of",
    "--moe-router-dtype fp32": (
        "ignored: --moe-router-dtype fp32: this value is what pipemega does"
    ),
    "--moe-router-dtype fp64": "changed: --moe-router-dtype fp64: the router computes in fp32",
    "--moe-expert-capacity-factor -1": (
        "ignored: --moe-expert-capacity-factor -1: this value is what pipemega does"
    ),
    "--moe-token-drop-policy probs": (
        "ignored: --moe-token-drop-policy probs: it configures an argument that is refused"
    ),
    "--moe-router-num-groups 4": (
        "note: --moe-router-num-groups 4: no effect without --moe-router-group-topk"
    ),
    "--moe-shared-expert-gate": (
        "note: --moe-shared-expert-gate: no effect without --moe-shared-expert-intermediate-size"
    ),
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4": (
        "changed: --moe-router-group-topk 2: groups are chosen by sums of probabilities; Megatron "
        "adds logits, without --moe-router-pre-softmax"
    ),
}  # fmt: skip


@pytest.mark.parametrize("arguments", LINES)
def test_an_argument_without_a_key_trains_the_same_experts(arguments: str) -> None:
    conversion = conversion_of(EXPERTS + arguments)
    lines = lines_of(conversion)
    assert any(line.startswith(LINES[arguments]) for line in lines), lines
    assert conversion.is_complete
    load(conversion.config)


@pytest.mark.parametrize("number", ["", "--num-experts 0 ", "--num-experts 1 --deepspeed "])
def test_a_model_without_experts_has_no_key_of_them(number: str) -> None:
    arguments = (
        "--moe-router-topk 4 --moe-expert-capacity-factor 2 --moe-train-capacity-factor 1.0 "
        "--moe-loss-coeff 0.01 --expert-model-parallel-size 1 --moe-new 3"
    )
    conversion = conversion_of(SMALL + number + arguments)
    assert conversion.is_complete, lines_of(conversion)
    assert expert_keys(conversion) == {}
    assert "num_experts" not in conversion.config["model"]
    for name in ("router-topk 4", "expert-capacity-factor 2", "train-capacity-factor 1.0", "new 3"):
        assert f"note: --moe-{name}: no effect without --num-experts" in lines_of(conversion)


def test_groups_with_one_expert_each_are_the_same_by_logits_and_by_probabilities() -> None:
    groups = "--moe-router-num-groups 4 --moe-router-group-topk 2"
    assert not any("group" in line for line in lines_of(conversion_of(EXPERTS + groups)))


def test_a_value_that_the_script_does_not_have_is_named() -> None:
    lines = lines_of(conversion_of(EXPERTS + "--moe-layer-freq $LAYERS"))
    text = "$LAYERS has no value in the script: give --var LAYERS=VALUE"
    assert f"unknown: --moe-layer-freq $LAYERS: {text}" in lines
