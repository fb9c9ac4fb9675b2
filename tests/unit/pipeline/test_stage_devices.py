"""The devices of `LayerSpec`s decide the devices of ranks and the bounds of stages."""

import pytest
import torch
from torch import nn

import pipemega
from pipemega import LayerSpec, PipelineModule, TiedLayerSpec
from pipemega.config import load
from pipemega.errors import ConfigError, MeshError
from pipemega.pipeline.model.stages import with_stage_devices


def net_of(*devices, head=None):
    layers = [LayerSpec(nn.Linear, 4, 4, device=device) for device in devices]
    return PipelineModule([*layers, *([head] if head else [])], nn.MSELoss())


def settings(pipeline, device="auto", **section):
    return {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "mesh": {"pipeline": pipeline, "device": device},
        "pipeline": section,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }


def config_of(*arguments, **section):
    return load(settings(*arguments, **section))


def resolved(net, config, auto="cuda", plan=None):
    found = with_stage_devices(config, net, 4, auto, plan)
    return found.mesh.device, found.pipeline.partition


def test_the_device_of_a_layer_is_no_argument_of_its_constructor():
    spec = LayerSpec(nn.Tanh, device="cpu")
    assert spec.device == "cpu"
    assert isinstance(spec.build(None), nn.Tanh)
    assert repr(spec) == "LayerSpec(Tanh, device='cpu')"
    assert LayerSpec(nn.Tanh, device=torch.device("cuda")).device == "cuda"
    assert TiedLayerSpec("key", nn.Linear, 4, 4, device="cpu").device == "cpu"
    assert LayerSpec(nn.Tanh).device is None


@pytest.mark.parametrize("device", ["gpu", "cuda:1", torch.device("cpu", 0), 3])
def test_a_device_that_a_layer_cannot_name_is_refused(device):
    with pytest.raises(ConfigError) as error:
        LayerSpec(nn.Linear, 4, 4, device=device)
    assert "device is 'cpu' or 'cuda', the kind of device of the layer's stage" in str(error.value)
    assert "LayerSpec(Linear, device=" in str(error.value)


def test_layers_are_collected_into_stages_with_bounds_where_the_device_changes():
    net = net_of("cpu", None, None, None, None)
    assert resolved(net, config_of(3)) == (("cpu", "cuda", "cuda"), (0, 1, 3, 5))
    net = net_of("cpu", "cuda", "cuda", "cuda", "cpu")
    assert resolved(net, config_of(3)) == (("cpu", "cuda", "cpu"), (0, 1, 4, 5))


def test_without_a_gpu_all_layers_are_on_the_cpu():
    config, net = config_of(3), net_of("cpu", None, None)
    assert with_stage_devices(config, net, 4, "cpu") is config


def test_the_bounds_of_the_user_stay():
    net = net_of("cpu", None, None, None)
    config = config_of(3, partition=[0, 1, 2, 4])
    assert resolved(net, config) == (("cpu", "cuda", "cuda"), (0, 1, 2, 4))


def test_bounds_that_put_two_devices_in_one_stage_are_refused():
    net = net_of("cpu", "cuda", "cuda")
    for device in ("auto", ["cpu", "cuda"]):
        with pytest.raises(ConfigError, match="stage 0 has layers on two devices: layer 0"):
            resolved(net, config_of(2, device, partition=[0, 2, 3]))


def test_a_list_in_the_config_decides_where_layers_without_a_device_are():
    net = net_of("cpu", None, None, None, None, None)
    listed = ["cpu", "cpu", "cuda"]
    assert resolved(net, config_of(3, listed)) == (tuple(listed), (0, 2, 4, 6))


def test_with_several_stages_per_rank_the_list_is_of_ranks():
    net = net_of("cpu", None, None, None, None, "cpu")
    found = resolved(net, config_of(2, ["cpu", "cuda"], schedule="zb-v"))
    assert found == (("cpu", "cuda"), (0, 1, 2, 4, 6))
    with pytest.raises(ConfigError) as error:
        resolved(net, config_of(2, schedule="zb-v"))
    assert "'zb-v' has 4 stages on 2 ranks: give the device of each pipeline rank" in str(
        error.value
    )


@pytest.mark.parametrize(("pipeline", "stage", "layers"), [(1, 0, (0, 1)), (2, 1, (1, 2))])
def test_more_changes_of_device_than_stages_are_two_devices_in_one_stage(pipeline, stage, layers):
    with pytest.raises(ConfigError) as error:
        resolved(net_of("cpu", "cuda", "cpu"), config_of(pipeline))
    devices = ["cpu", "cuda", "cpu"]
    first, second = (f"layer {n} (Linear) on '{devices[n]}'" for n in layers)
    assert f"stage {stage} has layers on two devices: {first} and {second}" in str(error.value)


def test_a_layer_on_another_device_than_all_ranks_is_refused():
    with pytest.raises(ConfigError, match=r"layer 1 \(Linear\) is for device 'cuda', and its"):
        resolved(net_of(None, "cuda"), config_of(2, "cpu"))


@pytest.mark.parametrize("section", [{"schedule": "auto"}, {"partition": "profile"}])
def test_settings_for_equal_devices_are_refused(section):
    with pytest.raises(ConfigError, match="has ranks of different speed"):
        resolved(net_of("cpu", None, None), config_of(2, **section))


def test_initialize_refuses_two_devices_in_one_stage():
    with pytest.raises(ConfigError, match="stage 0 has layers on two devices"):
        pipemega.initialize(net_of("cpu", "cuda"), settings(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_for_all_ranks_on_a_machine_without_one_is_refused():
    with pytest.raises(MeshError, match=r"mesh\.device is 'cuda', and torch sees no CUDA device"):
        pipemega.initialize(net_of(None), settings(1, ["cuda"]))


def test_a_layer_for_the_cpu_trains_there():
    engine, *_ = pipemega.initialize(net_of("cpu", "cpu"), settings(1, "cpu"))
    batch = (torch.ones(2, 4), torch.zeros(2, 4))
    assert engine.train_batch(iter([batch] * 4)) > 0
    assert {p.device.type for p in engine.module.parameters()} == {"cpu"}
