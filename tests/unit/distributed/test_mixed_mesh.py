"""The device of each rank of a mesh with different devices."""

import pytest
import torch

from pipemega.distributed.mesh import pick_mixed_device
from pipemega.errors import MeshError

WISHES = ["cpu", "cuda", "cuda", "cpu", "cuda", "cuda"]
TWO_HOSTS = ["a"] * 3 + ["b"] * 3


def found(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_the_ranks_of_a_host_that_use_gpus_get_them_in_their_order(monkeypatch):
    found(monkeypatch, 2)
    devices = [str(pick_mixed_device(rank, WISHES, TWO_HOSTS)) for rank in range(6)]
    assert devices == ["cpu", "cuda:0", "cuda:1"] * 2


def test_each_rank_may_see_only_its_own_gpu(monkeypatch):
    found(monkeypatch, 1)
    assert str(pick_mixed_device(2, WISHES, TWO_HOSTS)) == "cuda:0"


def test_a_host_without_gpus_is_named(monkeypatch):
    found(monkeypatch, 0)
    assert pick_mixed_device(3, WISHES, TWO_HOSTS).type == "cpu"
    with pytest.raises(MeshError) as error:
        pick_mixed_device(4, WISHES, TWO_HOSTS)
    assert str(error.value) == (
        'rank 4 is to use a GPU, and torch sees no CUDA device on b: write "cpu" in its place'
    )


def test_more_ranks_than_gpus_on_a_host_are_refused_with_both_numbers(monkeypatch):
    found(monkeypatch, 2)
    with pytest.raises(
        MeshError, match=r"4 ranks on a are to use a GPU, and it has 2 GPUs: start fewer"
    ):
        pick_mixed_device(5, WISHES, ["a"] * 6)
