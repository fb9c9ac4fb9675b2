"""DeepSpeed's PipelineModule trains as the unsplit model, in scripts like those of its users."""

import pytest
import torch
from torch import nn

from tests.ranks.compat.deepspeed_scripts import (
    CASES,
    WIDTH,
    ds_config,
    loaded_weights,
    script_states,
    unsplit_states,
)
from tests.ranks.compat.megatron_layers import RANKS, tensor_parallel_states, unsplit_tensors
from tests.ranks.pool import RankPool


def check(pool: RankPool, name: str, world: int, *, subset: int = 0, **changes: object) -> None:
    num_stages = 2
    results = pool.run(world, script_states, name, num_stages, ds_config(**changes), subset)
    losses, before, after = results[0]
    expected_losses, expected = unsplit_states(name, before, world // num_stages)
    assert losses == pytest.approx(expected_losses, abs=1e-10)
    trained = {key for key in after if not torch.equal(after[key], before[key])}
    assert trained == {key for key, p in expected.items() if not torch.equal(p, before[key])}
    assert trained
    for key, value in expected.items():
        torch.testing.assert_close(after[key], value, rtol=0, atol=1e-10)
    for other, *_ in results[1:]:
        assert other == losses


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_of_deepspeed_gives_the_gradients_of_the_unsplit_model(
    pool: RankPool, name: str
) -> None:
    check(pool, name, 2)


def test_a_torch_optimizer_with_groups_and_zero_1_on_four_ranks_is_that_of_the_unsplit_model(
    pool: RankPool,
) -> None:
    check(pool, "tied", 4, subset=1, zero_optimization={"stage": 1})


def test_layers_that_load_their_weights_in_the_constructor_keep_them(
    pool: RankPool, tmp_path: object
) -> None:
    torch.manual_seed(1)
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for number, linear in enumerate(linears):
        torch.save(linear.state_dict(), f"{tmp_path}/{number}.pt")
    weights, losses = pool.run(2, loaded_weights, str(tmp_path))[0]
    for weight, linear in zip(weights, linears, strict=True):
        assert torch.equal(weight, linear.weight)
    assert losses[1] < losses[0]


def test_parameters_that_megatron_marks_as_cut_are_shards_of_the_whole_ones(
    pool: RankPool,
) -> None:
    expected_norms, expected = unsplit_tensors()
    for norms, state in pool.run(RANKS, tensor_parallel_states):
        assert norms == pytest.approx(expected_norms, abs=1e-10)
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
