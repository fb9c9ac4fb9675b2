"""DeepSpeed's small calls: arguments, config, topologies, random numbers, schedules, data."""

import argparse
import base64
import json
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipemega.compat.deepspeed.activation_checkpoints import (
    RngTracker,
    check_checkpoint_function,
    checkpoint,
    configure,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
)
from pipemega.compat.deepspeed.deepspeed_engine import decoded, encoded
from pipemega.compat.deepspeed.initialize_deepspeed import merged_config
from pipemega.compat.deepspeed.pipeline_engine import ScriptBatches
from pipemega.compat.deepspeed.pipeline_module import (
    PipeLayerSpec,
    PipeTiedLayerSpec,
    RepeatingLoader,
)
from pipemega.compat.deepspeed.process_topology import (
    PipeModelDataParallelTopology,
    ProcessTopology,
    add_config_arguments,
    mesh_topology,
)
from pipemega.compat.deepspeed.small_calls import (
    DeepSpeedCPUAdam,
    FusedAdam,
    warmup_decay_lr,
    warmup_lr,
)
from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError
from pipemega.optimizer.lr_schedules import TorchSchedule


def test_the_options_of_a_launch_line_are_added_beside_those_of_the_script() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", default="mine.json")
    args = add_config_arguments(parser).parse_args(["--deepspeed"])
    assert args.deepspeed
    assert args.deepspeed_config == "mine.json"


def test_the_config_comes_from_one_of_three_arguments() -> None:
    config = {"train_batch_size": 8}
    text = json.dumps(config)
    assert merged_config(None, config, None) == config
    assert merged_config(None, None, config) == config
    assert merged_config(Namespace(deepspeed_config="ds.json"), None, None) == "ds.json"
    encoded_text = base64.urlsafe_b64encode(text.encode()).decode()
    assert merged_config(None, encoded_text, None) == text
    with pytest.raises(ConfigError, match="the option --deepspeed_config FILE"):
        merged_config(Namespace(local_rank=0), None, None)
    with pytest.raises(ConfigError, match=r"got a config and args.deepspeed_config \(ds.json\)"):
        merged_config(Namespace(deepspeed_config="ds.json"), config, None)


def test_a_topology_has_the_ranks_of_the_mesh() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    mesh = mesh_topology(topology)
    assert mesh == Topology(pipeline=2, data=3, tensor=2)
    for rank in range(12):
        here = mesh.coordinate(rank)
        assert topology.get_coord(rank) == (here.pipeline, here.data, here.tensor)
        assert topology.get_rank(pipe=here[0], data=here[1], model=here[2]) == rank
    assert topology.get_axis_comm_lists("data")[0] == list(mesh.along("data", 0)) == [0, 2, 4]
    assert topology.filter_match(pipe=1, data=0) == [6, 7]
    assert topology.get_axis_list("pipe", 0) == [0, 1, 2, 3, 4, 5]
    assert topology.get_rank_repr(7) == "model_01"
    assert topology.get_dim("model") == 2
    assert topology.get_dim("sequence") == 0


def test_a_topology_with_other_axes_or_another_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="orders the axes data, pipe, and the ranks of the mesh"):
        mesh_topology(ProcessTopology(["data", "pipe"], [2, 2]))
    with pytest.raises(ConfigError, match="has the axis 'expert' of size 2"):
        mesh_topology(ProcessTopology(["pipe", "expert"], [2, 2]))
    assert mesh_topology(ProcessTopology(["data", "pipe"], [1, 4])) == Topology(pipeline=4)


def test_the_stream_of_tensor_ranks_repeats_when_a_layer_is_recomputed() -> None:
    tracker = RngTracker()
    tracker.add("model-parallel-rng", 1)
    weight = torch.ones(4, requires_grad=True)
    drawn = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            drawn.append(torch.rand(4))
        return torch.exp(x * weight * drawn[-1])

    checkpoint(layer, torch.ones(4)).sum().backward()
    assert len(drawn) == 2
    assert torch.equal(drawn[0], drawn[1])
    with pytest.raises(ConfigError, match="no stream 'other'"), tracker.fork("other"):
        pass


def test_tensor_ranks_draw_different_numbers_after_configure() -> None:
    class Mpu:
        rank = 0

        def get_tensor_model_parallel_rank(self) -> int:
            return self.rank

    drawn = []
    for rank in (0, 1):
        mpu = Mpu()
        mpu.rank = rank
        configure(mpu, deepspeed_config=None)
        assert is_configured()
        model_parallel_cuda_manual_seed(5)
        with get_cuda_rng_tracker().fork():
            drawn.append(torch.rand(3))
    assert not torch.equal(*drawn)
    with pytest.raises(ConfigError, match="checkpoint_in_cpu=True"):
        configure(None, checkpoint_in_cpu=True)


def test_a_checkpoint_function_of_the_user_is_refused() -> None:
    check_checkpoint_function(torch.utils.checkpoint.checkpoint)
    with pytest.raises(ConfigError, match=r"activation_checkpoint_func=print\) is not supp"):
        check_checkpoint_function(print)


def test_a_client_state_with_namespaces_and_arrays_is_restored() -> None:
    random_state = np.random.RandomState(3).get_state()
    client = {"args": Namespace(lr=0.1, layers=[1, 2]), "random": random_state, "n": np.int64(3)}
    restored: Any = decoded(encoded(client))
    assert restored["args"] == client["args"]
    assert restored["n"] == 3
    assert restored["random"][1].dtype == np.uint32
    np.random.RandomState().set_state(restored["random"])
    np.testing.assert_array_equal(restored["random"][1], random_state[1])


def test_micro_batches_have_tuples_and_may_lack_labels() -> None:
    x = torch.zeros(2)
    read = list(ScriptBatches(iter([[[x, x], x], ((x,),)]), None))
    assert read[0][0] == (x, x)
    assert read[1] == ((x,), None)
    made = ScriptBatches(None, lambda nothing: (x, nothing))
    assert next(made) == (x, None)


def test_a_repeating_loader_starts_again() -> None:
    loader = iter(RepeatingLoader([1, 2]))
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
def test_deepspeeds_adam_is_torchs_adamw(kind: Any) -> None:
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.3}
    for optimizer in (kind([a], **options), torch.optim.AdamW([b], **options)):
        for parameter in (p for g in optimizer.param_groups for p in g["params"]):
            parameter.grad = torch.full((3,), 0.5)
        optimizer.step()
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="bias_correction=False"):
        kind([a], bias_correction=False)


def test_deepspeeds_schedules_are_schedulers_that_can_be_saved() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = warmup_lr(optimizer, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == [0.0, 0.0, 0.25, 0.5]
    wrapped = TorchSchedule(optimizer, lambda _: schedule, "step")
    state = wrapped.state_dict()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    again = warmup_lr(other, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    TorchSchedule(other, lambda _: again, "step").load_state_dict(state)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.75
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps"):
        warmup_decay_lr(optimizer, total_num_steps=0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.size = 2

    @property
    def shared(self) -> torch.Tensor:
        return self.inner.weight


def test_a_tied_attribute_may_be_a_property_and_must_be_a_parameter() -> None:
    spec = PipeTiedLayerSpec("key", Tied, tied_weight_attr="shared")
    assert spec.ties == {"inner.weight": ("key", "shared")}
    nested = PipeTiedLayerSpec("key", Tied, tied_weight_attr=["inner.weight", "inner.bias"])
    assert list(nested.ties) == ["inner.weight", "inner.bias"]
    for name, problem in (("size", "is of type int"), ("weight", "does not exist")):
        with pytest.raises(ConfigError, match=f"tied_weight_attr '{name}' {problem}"):
            _ = PipeTiedLayerSpec("key", Tied, tied_weight_attr=name).ties


def test_a_spec_has_deepspeeds_attributes_and_builds_without_arguments() -> None:
    spec = PipeLayerSpec(nn.Linear, 2, 3, bias=False)
    assert (spec.module_args, spec.module_kwargs) == ((2, 3), {"bias": False})
    assert isinstance(spec.build(), nn.Linear)
    assert spec.build(log=True).weight.shape == (3, 2)
    assert spec.build(device="meta").weight.is_meta
