"""`mesh.device` as a list: one device for each pipeline rank."""

import pytest

from pipemega.config import load
from pipemega.errors import ConfigError

THREE = {"pipeline": 3, "device": ["cpu", "cuda", "cuda"]}


def load_mesh(mesh, **changes):
    return load({"train_batch_size": 6, "gradient_accumulation_steps": 6, "mesh": mesh, **changes})


def test_each_pipeline_rank_has_the_device_of_the_list():
    mesh = load_mesh(THREE).mesh
    assert mesh.mixed_devices == ("cpu", "cuda", "cuda")
    assert [mesh.device_of(rank) for rank in range(3)] == ["cpu", "cuda", "cuda"]


@pytest.mark.parametrize("device", ["cpu", ["cpu", "cpu"]])
def test_equal_devices_are_not_mixed(device):
    mesh = load_mesh({"pipeline": 2, "device": device}).mesh
    assert mesh.mixed_devices == ()
    assert mesh.first_device == "cpu"


@pytest.mark.parametrize(("devices", "count"), [(["cpu"], "1 device"), (["cpu"] * 4, "4 devices")])
def test_a_list_of_another_length_than_the_pipeline_is_refused_with_both_numbers(devices, count):
    with pytest.raises(ConfigError) as error:
        load_mesh({"pipeline": 3, "device": devices})
    assert (
        f"mesh.device is a list of {count}, and mesh.pipeline is 3: give one device for each "
        'pipeline rank, or one for all: "device": "cuda"'
    ) in str(error.value)


@pytest.mark.parametrize("devices", [["cpu", "gpu", "cuda"], ["auto", "cuda", "cuda"]])
def test_other_devices_are_refused(devices):
    with pytest.raises(ConfigError, match=r"mesh\.device"):
        load_mesh({"pipeline": 3, "device": devices})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"schedule": "auto"}, "pipeline.schedule 'auto' assumes ranks of equal speed, and"),
        ({"partition": "profile"}, "measures all layers on the device of rank 0"),
        ({"vocabulary": "parallel"}, "gives each rank an equal part of the vocabulary"),
    ],
)
def test_what_needs_equal_devices_is_refused_by_its_key(section, message):
    load_mesh({"pipeline": 3, "device": ["cuda"] * 3}, pipeline=section)
    with pytest.raises(ConfigError) as error:
        load_mesh(THREE, pipeline=section)
    assert message in str(error.value)
    assert "mesh.device [cpu, cuda, cuda] has ranks of different speed" in str(error.value)
