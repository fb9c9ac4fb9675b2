"""The keys of `model` and `mesh` for experts; the tests read each message."""

from typing import Any

import pytest

from pipemega.config import load
from pipemega.errors import ConfigError

MODEL = {
    "num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24,
    "seq_length": 8, "vocab_size": 64,
}  # fmt: skip


def load_model(model: dict[str, Any], **changes: Any) -> Any:
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "model": MODEL | model}
    return load(config | changes)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            {"num_experts": 8},
            {"mesh": {"data": 4, "expert": 3}},
            "mesh.data (4) is not a multiple of mesh.expert (3)",
        ),
        (
            {"num_experts": 6},
            {"mesh": {"data": 4, "expert": 4}},
            "model.num_experts (6) must be a multiple of mesh.expert (4), over which the experts "
            "are divided; the nearest that fit are 4 and 8",
        ),
        (
            {},
            {"mesh": {"data": 4, "expert": 2}},
            "mesh.expert is 2, and the model has no experts: set it to 1, or set model.num_experts",
        ),
        (
            {"num_experts": 2, "moe_router_topk": 3},
            {},
            "model.moe_router_topk (3) must be at most model.num_experts (2)",
        ),
        (
            {"num_experts": 2, "moe_router_topk": 1},
            {},
            "set model.moe_router_pre_softmax to true",
        ),
        (
            {"num_experts": 8, "moe_router_num_groups": 4},
            {},
            "model.moe_router_num_groups and model.moe_router_group_topk belong together",
        ),
        (
            {"num_experts": 8, "moe_router_num_groups": 3, "moe_router_group_topk": 2},
            {},
            "model.num_experts (8) must be a multiple of model.moe_router_num_groups (3); the "
            "nearest that fit are 6 and 9",
        ),
        (
            {"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 8},
            {},
            "model.moe_router_group_topk (8) must be at most model.moe_router_num_groups (4)",
        ),
        (
            {
                "num_experts": 8, "moe_router_topk": 3, "moe_router_num_groups": 4,
                "moe_router_group_topk": 2,
            },
            {},
            "model.moe_router_topk (3) must be a multiple of model.moe_router_group_topk (2), and "
            "at most 4: 2 groups of 2 experts",
        ),
        (
            {"num_experts": 8, "moe_layer_freq": [0, 1]},
            {},
            "model.moe_layer_freq has 2 entries, and model.num_layers is 4",
        ),
        (
            {"moe_aux_loss_coeff": 0.01},
            {},
            "model.moe_aux_loss_coeff has no effect without experts: set model.num_experts",
        ),
        (
            {"num_experts": 8, "moe_shared_expert_gate": True},
            {},
            "set model.moe_shared_expert_intermediate_size",
        ),
        (
            {"num_experts": 8, "moe_expert_capacity_factor": 1.25},
            {},
            "no token is dropped here",
        ),
        (
            {"num_experts": 8, "moe_router_load_balancing_type": "sinkhorn"},
            {},
            'model.moe_router_load_balancing_type must be "seq_aux_loss" or "aux_loss"',
        ),
        (
            {"num_experts": 8, "moe_ffn_hidden_size": 6},
            {"mesh": {"tensor": 4}},
            "model.moe_ffn_hidden_size (6) must be a multiple of mesh.tensor (4)",
        ),
        (
            {"num_experts": 8},
            {
                "mesh": {"data": 2, "expert": 2},
                "optimizer": {"type": "Lamb", "params": {"lr": 0.1}},
            },
            "mesh.expert (2) divides those of experts over data ranks",
        ),
        (
            {"num_experts": 8},
            {"mesh": {"data": 2, "expert": 2, "pipeline": 2, "device": ["cpu", "cuda"]}},
            "mesh.expert (2) needs equal devices on all ranks",
        ),
        (
            {"num_experts": 8},
            {"mesh": {"data": 2}, "pipeline": {"schedule": "zb-h1", "fill_waits": True}},
            "with mesh.expert 1 there are none: remove pipeline.fill_waits, or set mesh.expert to",
        ),
        *(
            (
                {"num_experts": 8},
                {
                    "mesh": {"data": 2, "expert": 2},
                    "pipeline": {"schedule": name, "fill_waits": True},
                },
                f"schedule {name!r} has no W of its own",
            )
            for name in ("1f1b", "auto")
        ),
        (
            {"num_experts": 8},
            {
                "mesh": {"data": 2, "expert": 2},
                "pipeline": {"schedule": "zb-h1", "fill_waits": True},
                "activation_checkpointing": {"cpu_checkpointing": True},
            },
            "pipeline.fill_waits and activation_checkpointing.cpu_checkpointing both change how",
        ),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit_are_refused_with_the_numbers(
    model: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_model(model, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        ({"enabled": True, "autoep_size": 2}, 2),
        ({"enabled": True}, 1),
        ({"enabled": False, "autoep_size": 2}, 1),
        (None, 1),
    ],
)
def test_deepspeed_s_expert_parallel_size_is_that_of_the_mesh(keys: Any, ranks: int) -> None:
    config = load_model({"num_experts": 8}, expert_parallel=keys)
    assert config.mesh.expert == ranks
    assert not config.warnings


def test_keys_that_name_the_layers_of_the_experts_are_ignored_with_a_warning() -> None:
    keys = {"enabled": True, "preset_model": "mixtral", "expert_tensor_parallel_size": 1}
    assert load_model({"num_experts": 8}, expert_parallel=keys).warnings == (
        "expert_parallel.preset_model is ignored: the layers of the model have their experts, "
        "which are not replaced",
    )
    keys = {"enabled": True, "expert_tensor_parallel_size": 2}
    assert load_model({"num_experts": 8}, expert_parallel=keys).warnings == (
        "expert_parallel.expert_tensor_parallel_size is ignored: mesh.tensor cuts experts like "
        "other layers",
    )


def test_other_models_have_no_experts_to_divide() -> None:
    resnet = {"type": "resnet"}
    with pytest.raises(ConfigError, match=r"model\.type 'resnet' has no experts"):
        load({"train_batch_size": 8, "mesh": {"expert": 2}, "model": resnet})


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0, 0, 0, 1], [0, 0, 0, 1])],
)
def test_the_frequency_says_which_blocks_have_experts(frequency: Any, layers: list[int]) -> None:
    section = load_model({"num_experts": 4, "moe_layer_freq": frequency}).model
    assert [*section.expert_layers] == layers
    # Two experts of 24 in a block with experts, one network of 24 elsewhere.
    assert section.active_feed_forward_size == 24 * (1 + sum(layers) / 4)
