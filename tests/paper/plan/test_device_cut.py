"""Cuts of layers that are for one device only."""

from itertools import combinations, pairwise

import pytest

from pipemega.errors import ConfigError
from pipemega.pipeline.plan.partition import (
    changes_of_device,
    check_stage_devices,
    partition_on_devices,
)

CPU, CUDA = "cpu", "cuda"


@pytest.mark.parametrize(
    ("costs", "layers", "stages"),
    [
        ([100, 1, 1, 1, 1], [CPU, None, None, None, None], [CPU, CUDA, CUDA]),
        ([100, 1, 1, 1, 1], [CPU, CUDA, CUDA, CUDA, CUDA], [CPU, CUDA, CUDA]),
        ([5, 1, 2, 9, 3, 4], [CPU, None, CUDA, CUDA, None, CPU], [CPU, CUDA, CUDA, CPU]),
        ([1, 1, 1, 1], [None, None, None, CPU], [CUDA, CPU]),
        ([0, 0, 0], [CPU, CUDA, None], [CPU, CUDA]),
    ],
)
def test_the_cut_is_the_most_even_one_that_puts_each_layer_on_its_device(costs, layers, stages):
    bounds = partition_on_devices(costs, layers, stages, ["Linear"] * len(costs))

    def fits(bounds):
        return all(
            layers[layer] in (None, device)
            for device, (a, b) in zip(stages, pairwise(bounds), strict=True)
            for layer in range(a, b)
        )

    def evenness(bounds):
        work = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        return max(work), sum(w * w for w in work)

    cuts = ([0, *c, len(costs)] for c in combinations(range(1, len(costs)), len(stages) - 1))
    assert fits(bounds)
    assert evenness(bounds) == min(evenness(cut) for cut in cuts if fits(cut))


def test_a_large_layer_of_another_device_does_not_make_the_other_stages_uneven():
    bounds = partition_on_devices(
        [1000, *[1] * 8], [CPU, *[CUDA] * 8], [CPU, CUDA, CUDA], ["x"] * 9
    )
    assert bounds == [0, 1, 5, 9]


def test_layers_that_fit_no_stages_are_refused_with_both_lists():
    with pytest.raises(ConfigError) as error:
        partition_on_devices(
            [1, 1, 1], [CUDA, CUDA, CPU], [CPU, CUDA], ["Linear", "Linear", "Head"]
        )
    assert str(error.value) == (
        "the layers cannot be cut into stages on these devices: the layers are on cuda (layers 0 "
        "to 1), cpu (layer 2, Head), and the stages on cpu, cuda: give mesh.device a device for "
        "each pipeline rank in the order of the layers, with at least one rank for each change of "
        "device"
    )


def test_two_devices_in_one_stage_are_refused_by_the_names_of_the_layers():
    names = ["Embedding", "Linear", "Linear"]
    check_stage_devices([0, 1, 3], [CPU, CUDA, None], [CPU, CUDA], names)
    with pytest.raises(ConfigError) as error:
        check_stage_devices([0, 2, 3], [CPU, CUDA, None], [CPU, CUDA], names)
    assert str(error.value) == (
        "stage 0 has layers on two devices: layer 0 (Embedding) on 'cpu' and layer 1 (Linear) on "
        "'cuda'; a stage is on one device: start a stage at each change of device, with more "
        "pipeline ranks (mesh.pipeline) or other bounds (pipeline.partition)"
    )


def test_a_layer_for_another_device_than_its_rank_is_refused():
    with pytest.raises(ConfigError, match=r"layer 2 \(Head\) is for device 'cpu', and its pipeline "
                       r"rank is on 'cuda': change mesh\.device"):  # fmt: skip
        check_stage_devices([0, 1, 3], [None, None, CPU], [CPU, CUDA], ["Linear", "Tanh", "Head"])


def test_changes_of_device():
    assert changes_of_device([CPU, CPU, CUDA, None, CUDA]) == [2, 3, 4]
    assert changes_of_device([CPU]) == []
