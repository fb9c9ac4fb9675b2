"""ZeRO on a mesh: the numbers in its errors and notes."""

import pytest

from pipemega.config import load
from pipemega.errors import ConfigError

BASE = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}


def config(stage, **changes):
    return load(BASE | {"zero_optimization": {"stage": stage}} | changes)


@pytest.mark.parametrize(
    ("stage", "changes", "data", "expected"),
    [
        (2, {}, 4, "4 + 4 + 8 bytes (weight + gradient + optimizer)"),
        (2, {}, 4, "10 bytes per rank for each parameter of the model (stage 0: 16;"),
        (2, {}, 4, "stage 2 would be 7)"),
        (3, {"bf16": {"enabled": True}}, 1, "2 + 4 + 12 bytes"),
        (
            3,
            {"bf16": {"enabled": True}, "mesh": {"pipeline": 2, "tensor": 2}},
            4,
            "mesh.pipeline 2 x mesh.tensor 2 divides all three by 4, and stage 1 on 4 data ranks "
            "divides the last by 4: 2.25 bytes per rank for each parameter of the model (stage 0: "
            "4.5; stage 3 would be 1.12)",
        ),
        (
            3,
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            2,
            "2 + 2 + 12 bytes",
        ),
        (2, {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 2, "4 + 4 + 4 bytes"),
        (2, {"optimizer": {"type": "SGD"}}, 2, "4 + 4 + 0 bytes"),
        (2, {}, 2, "it shards the gradients over the data ranks"),
        (3, {}, 2, "it shards the gradients and weights over the data ranks"),
        (3, {}, 2, "Set zero_optimization.stage to 1; to save more, raise mesh.pipeline or mesh."),
    ],
)  # fmt: skip
def test_a_stage_above_1_is_refused_with_the_bytes_of_stage_1_on_this_mesh(
    stage, changes, data, expected
):
    with pytest.raises(ConfigError) as refused:
        config(stage, **changes).check_zero(data)
    assert expected in str(refused.value)


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_0_and_1_are_accepted(stage):
    config(stage).check_zero(3)


def test_stage_1_logs_the_saved_memory_and_that_one_data_rank_saves_none():
    (note,) = config(1, bf16={"enabled": True}).zero_notes(4)
    assert note.startswith(
        "ZeRO stage 1 on 4 data ranks lowers memory from 18 to 9 bytes per param"
    )
    assert "(2 + 4 + 12: weight + gradient + optimizer; the last is sharded)" in note
    (note,) = config(1).zero_notes(1)
    assert note.startswith("zero_optimization.stage 1 saves nothing on one data rank")
    assert config(0).zero_notes(4) == ()


def test_optimizer_offload_works_with_any_stage():
    for stage in (0, 1):
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
        found = load(BASE | {"zero_optimization": zero})
        assert found.zero_optimization.offloads
        assert found.warnings == ()
    assert not config(1).zero_optimization.offloads
