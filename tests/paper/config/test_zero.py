"""ZeRO on a mesh: the numbers in its errors and notes."""

import re

import pytest

from pipemega.config import examine, load
from pipemega.errors import ConfigError

BASE = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}


def config(stage, **changes):
    return load(BASE | {"zero_optimization": {"stage": stage}} | changes)


def refusal_of(stage, data, **changes):
    mesh = {"mesh": {"data": data, **changes.pop("mesh", {})}}
    with pytest.raises(ConfigError) as refused:
        config(stage, **mesh, **changes)
    return str(refused.value)


@pytest.mark.parametrize(
    ("stage", "changes", "data", "expected"),
    [
        (2, {}, 4, "4 + 4 + 8 bytes (weight + gradient + optimizer)"),
        (2, {}, 4, "takes 10 per rank (stage 0: 16; stage 2 would be 7)"),
        (3, {"bf16": {"enabled": True}}, 1, "2 + 4 + 12 bytes"),
        (
            3,
            {"bf16": {"enabled": True}, "mesh": {"pipeline": 2, "tensor": 2}},
            4,
            "mesh.pipeline 2 x mesh.tensor 2 divides all three by 4, and stage 1 on 4 data ranks "
            "divides the last by 4: 2.25 bytes per rank (stage 0: 4.5; stage 3 would be 1.12)",
        ),
        (
            3,
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            2,
            "2 + 2 + 12 bytes",
        ),
        (2, {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 2, "4 + 4 + 4 bytes"),
        (2, {"optimizer": {"type": "SGD"}}, 2, "4 + 4 + 0 bytes"),
        (2, {"mesh": {"pipeline": 2}}, 2, "it shards the gradients over the data ranks, so that"),
        (3, {"mesh": {"pipeline": 2}}, 2, "has to reduce and gather them"),
        (
            3,
            {"mesh": {"pipeline": 2}},
            2,
            "Set zero_optimization.stage to 1 (--set zero_optimization.stage=1); to save more, "
            "raise mesh.pipeline or mesh.tensor",
        ),
    ],
)  # fmt: skip
def test_a_stage_above_1_is_refused_with_the_bytes_of_stage_1_on_this_mesh(
    stage, changes, data, expected
):
    assert expected in refusal_of(stage, data, **changes)


def test_without_a_pipeline_the_refusal_names_what_a_pipeline_saves_and_fully_shard():
    message = refusal_of(3, 8, bf16={"enabled": True})
    assert "with pipeline parallelism" not in message
    assert message == (
        "zero_optimization.stage 3 is not supported: it shards the gradients and weights over the "
        "data ranks. A parameter takes 2 + 4 + 12 bytes (weight + gradient + optimizer): stage 1 "
        "on 8 data ranks takes 7.5 per rank (stage 0: 18; stage 3 would be 2.25); on the same 8 "
        "ranks with mesh.pipeline 2: 4.5, with mesh.pipeline 4: 3, with mesh.pipeline 8: 2.25. "
        "Set zero_optimization.stage to 1 (--set zero_optimization.stage=1); if the model then "
        "does not fit, raise mesh.pipeline or mesh.tensor. If you want neither, torch's "
        "fully_shard (torch.distributed.fsdp) does what stages 2 and 3 do"
    )
    assert "with mesh.pipeline" not in refusal_of(2, 3)


def test_the_number_of_data_ranks_is_that_of_the_config_the_command_or_the_launcher(monkeypatch):
    tree = BASE | {"zero_optimization": {"stage": 2}, "mesh": {"tensor": 2}}
    assert "on 8 data ranks, for example," in examine(tree).errors[0].message
    assert "on 3 data ranks takes" in examine(tree, world=6).errors[0].message
    monkeypatch.setenv("WORLD_SIZE", "10")
    assert "on 5 data ranks takes" in examine(tree).errors[0].message
    known = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "mesh": {}}
    assert "on 2 data ranks takes" in examine(tree | known, world=2).errors[0].message


def test_the_refusal_comes_with_all_that_must_change_and_the_override_in_it_suffices():
    tree = BASE | {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "overlapcomm": True},
        "optimizer": {"type": "AdamW", "eps": 1e-8},
        "amp": {"enabled": True},
    }
    with pytest.raises(ConfigError) as refused:
        load(tree)
    assert [problem.split(";")[0].split(":")[0] for problem in refused.value.problems] == [
        "unknown key 'optimizer.eps'",
        "unknown key 'zero_optimization.overlapcomm'",
        "amp.enabled is enabled, but not supported",
        "zero_optimization.stage 3 is not supported",
    ]
    (override,) = re.findall(r"--set (\S+=\d)", refused.value.problems[-1])
    del tree["zero_optimization"]["overlapcomm"], tree["optimizer"]["eps"], tree["amp"]
    assert load(tree, [override]).zero_optimization.stage == 1


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_0_and_1_are_accepted(stage):
    assert config(stage).zero_optimization.stage == stage


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
