"""A module that is no pipeline on data ranks; the oracle is the loop of one process."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.compat import data_parallel_runs as runs
from tests.ranks.pool import RankPool, RanksFailed


def plain(given: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train in plain torch on the data of two ranks."""
    model = runs.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5 if given else 1.0)
    losses = []
    for step in range(runs.STEPS):
        total = 0.0
        for m in range(runs.MICRO_BATCHES):
            for rank in range(2):
                loss = runs.loss_of(model, runs.tokens(step, m, rank)) / 4
                loss.backward()
                total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("keys", "given"),
    [
        ({}, False),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, True),
        ({"zero_optimization": {"stage": 0}}, True),
    ],
)
def test_two_data_ranks_train_as_one_process(
    pool: RankPool, keys: dict[str, Any], given: bool
) -> None:
    losses, state = plain(given)
    for rank_losses, rank_state in pool.run(2, runs.trained, True, 2, keys, given):
        assert rank_losses == pytest.approx(losses, abs=1e-10)
        assert_close(rank_state, state)


def test_a_checkpoint_of_two_ranks_is_loaded_on_four(pool: RankPool, tmp_path: Path) -> None:
    _, state = plain(False)
    pool.run(2, runs.saved_and_loaded, str(tmp_path), True)
    for rank_state in pool.run(4, runs.saved_and_loaded, str(tmp_path), False):
        assert_close(rank_state, state)


def test_an_error_in_forward_ends_all_ranks(pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(2, runs.fails_in_forward)
    errors = {rank: text for rank, (text, _) in caught.value.errors.items()}
    assert "IndexError" in errors[1]
    assert "PeerError: rank 1 failed first: forward: IndexError" in errors[0]


def test_a_rank_with_fewer_steps_is_named_after_the_timeout(pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(2, runs.runs_fewer_steps)
    assert "mesh.timeout_seconds" in caught.value.errors[0][0]


def test_a_process_may_have_two_engines(pool: RankPool) -> None:
    (one, other), (same, same_other) = pool.run(2, runs.two_engines)
    for a, b in ((one, same), (other, same_other)):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(one["hidden.weight"], other["hidden.weight"])


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_a_hugging_face_model_trains_with_keyword_arguments(pool: RankPool, tmp_path: Path) -> None:
    for losses in pool.run(2, runs.tiny_llama, str(tmp_path)):
        assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "model.safetensors").exists()
