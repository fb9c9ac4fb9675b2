"""A pipeline whose ranks have different devices trains like one process."""

import socket
from typing import Any

import numpy
import pytest

from tests.ranks import mixed_devices
from tests.ranks.fake_device import NAME, compile_fake_device, needs_compiler
from tests.ranks.pool import RankPool

ADAM = {"type": "AdamW", "params": {"lr": 0.01}}
THREE = {"pipeline": 3, "device": ["cpu", "cuda", "cuda"]}
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"net": "plain", "mesh": THREE, "gradient_clipping": 0.05},
    "zb-h1": {"net": "tied_thrice", "mesh": THREE, "pipeline": {"schedule": "zb-h1"}},
    "zb-v": {
        "net": "tied_thrice",
        "mesh": {"pipeline": 2, "device": ["cuda", "cpu"]},
        "pipeline": {"schedule": "zb-v", "partition": "uniform"},
        "optimizer": ADAM,
    },
    "interleaved": {
        "net": "tree_model",
        "mesh": {"pipeline": 2, "device": ["cpu", "cuda"]},
        "pipeline": {"schedule": "interleaved", "shapes": "exchanged"},
    },
    "post-validation": {
        "net": "plain",
        "mesh": THREE,
        "pipeline": {"optimizer_sync": "post_validate"},
        "gradient_clipping": 0.05,
    },
    "devices of layers": {"net": "placed", "mesh": {"pipeline": 3}, "optimizer": ADAM},
}
# Run with the fake device only.
SWEPT: dict[str, dict[str, Any]] = {
    "recomputation": {
        "net": "tied_thrice",
        "mesh": THREE,
        "pipeline": {"activation_checkpoint_interval": 1},
        "optimizer": ADAM,
    },
    "activations on the host": {
        "net": "tied_thrice",
        "mesh": THREE,
        "pipeline": {"schedule": "zb-h1"},
        "activation_checkpointing": {"cpu_checkpointing": True},
    },
    "activations on the host, recomputation": {
        "net": "tree_model",
        "mesh": {"pipeline": 2, "device": ["cuda", "cpu"]},
        "pipeline": {"schedule": "zb-v", "partition": "uniform"},
        "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 3},
    },
    "offload": {
        "net": "tied_thrice",
        "mesh": {"pipeline": 3, "device": ["cuda", "cpu", "cuda"]},
        "pipeline": {"schedule": "zb-h1", "optimizer_sync": "post_validate"},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "optimizer": ADAM,
        "gradient_clipping": 0.05,
    },
}
ZERO = {
    "net": "plain",
    "mesh": {"pipeline": 2, "data": 2, "device": ["cpu", "cuda"]},
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 3,
    "zero_optimization": {"stage": 1},
    "optimizer": ADAM,
}


def _assert_like_one_process(pool: RankPool, case: dict[str, Any], found: dict[str, Any]) -> None:
    single = {**case, "mesh": {"device": "cpu"}, "pipeline": {}, "zero_optimization": {}}
    single["gradient_accumulation_steps"] = 4
    (oracle,) = pool.run(1, mixed_devices.train_each, [single])[0]
    numpy.testing.assert_allclose(found["losses"], oracle["losses"], rtol=1e-10)
    numpy.testing.assert_allclose(found["norm"], oracle["norm"], rtol=1e-10)
    assert found["parameters"].keys() == oracle["parameters"].keys()
    for name, parameter in oracle["parameters"].items():
        numpy.testing.assert_allclose(found["parameters"][name], parameter, 1e-10, 1e-12, name)


@pytest.mark.parametrize("name", CASES)
def test_ranks_on_cpus_and_gpus_train_like_one_process(pool, name):
    ranks = CASES[name]["mesh"]["pipeline"]
    for (found,) in pool.run(ranks, mixed_devices.train_each, [CASES[name]]):
        _assert_like_one_process(pool, CASES[name], found)


def test_zero_shards_the_state_of_each_device_over_its_data_ranks(pool):
    for (found,) in pool.run(4, mixed_devices.train_each, [ZERO]):
        _assert_like_one_process(pool, ZERO, found)


@pytest.mark.parametrize(
    "case",
    [
        {"mesh": THREE},
        {"mesh": THREE, "pipeline": {"optimizer_sync": "post_validate", "optimizer_sync_after": 0}},
        {"mesh": ZERO["mesh"], "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}},
    ],
    ids=["1f1b", "post-validation", "ZeRO"],
)
def test_replicas_of_a_tied_parameter_stay_equal_though_their_devices_round_differently(pool, case):
    ranks = 4 if "zero_optimization" in case else 3
    # With clipping, post-validation repeats each step.
    case = {**case, "optimizer": ADAM, "gradient_clipping": 0.05}
    losses = pool.run(ranks, mixed_devices.replicas_with_rounding, case)
    assert all(each == losses[0] for each in losses)


def test_a_gpu_where_there_is_none_is_one_message_on_every_rank(pool):
    errors = pool.run(3, mixed_devices.without_gpus, ["cpu", "cuda", "cuda"])
    host = socket.gethostname()
    assert set(errors) == {
        'MeshError: mesh.device ["cpu", "cuda", "cuda"], mesh pipeline 3 x data 1 x tensor 1: '
        f"rank 1 is to use a GPU, and torch sees no CUDA device on {host}: write "
        '"cpu" in its place'
    }


@pytest.fixture(scope="module")
def fake_device(tmp_path_factory):
    """The folder of the fake device, compiled."""
    folder = tmp_path_factory.mktemp("fake_device")
    compile_fake_device(str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def new_ranks():
    """Ranks that have run no backward: torch counts the devices in the first one."""
    ranks = RankPool(3)
    yield ranks
    ranks.close()


@pytest.mark.sweep
@needs_compiler
@pytest.mark.parametrize("name", [*CASES, *SWEPT])
def test_tensors_are_on_the_device_of_their_rank(pool, new_ranks, fake_device, name):
    case = {**CASES, **SWEPT}[name]
    ranks = case["mesh"]["pipeline"]
    devices = case["mesh"].get("device", ["cpu", "cuda", "cuda"])
    found = new_ranks.run(ranks, mixed_devices.train_each, [case], fake_device)
    for (run,), device in zip(found, devices, strict=True):
        kind = "cpu" if device == "cpu" else NAME
        assert run["device"] == kind
        assert run["of parameters"] in ([kind], [])  # a stage may have no parameter
        kind = "cpu" if "zero_optimization" in case else kind
        assert run["of state"] in ([kind], [])
        _assert_like_one_process(pool, case, run)


@pytest.mark.sweep
def test_checkpoints_load_on_other_devices(pool, tmp_path):
    meshes = [{"pipeline": 1}, THREE, {"pipeline": 2, "device": ["cuda", "cpu"]}]
    folders = [str(tmp_path / str(number)) for number in range(3)]
    oracle, *saved = [
        pool.run(mesh["pipeline"], mixed_devices.save_and_load, folder, "", mesh)[0]
        for folder, mesh in zip(folders, meshes, strict=True)
    ]
    for losses in saved:
        numpy.testing.assert_allclose(losses, oracle, rtol=1e-10)
    # The checkpoint of three ranks in one process, and on two.
    for mesh in (meshes[0], meshes[2]):
        losses = pool.run(mesh["pipeline"], mixed_devices.resume, folders[1], "", mesh)[0]
        numpy.testing.assert_allclose(losses, oracle[2:], rtol=1e-10)


@needs_compiler
@pytest.mark.sweep
def test_copies_are_ordered_by_streams_and_events(new_ranks, fake_device):
    (order,) = new_ranks.run(1, mixed_devices.order_of_copies, fake_device)
    assert order == [
        "record on main",
        "host waits for main",
        "side waits for main",
        "record on side",
        "main waits for event of side",
    ]


@needs_compiler
@pytest.mark.sweep
def test_streams_and_events_order_the_copies_of_activations(new_ranks, fake_device):
    program = "F0@0 F1@0 F2@0 B0@0 B1@0 B2@0"
    (order,) = new_ranks.run(1, mixed_devices.order_of_offload, fake_device, program)
    copied, waited = ["side waits for main", "record on side"], ["main waits for event of side"]
    assert order == [
        "F0@0",
        *copied,
        "F1@0",
        # The memory of F0 is free.
        *waited,
        *copied,
        # Back, beside F2.
        *copied,
        "F2@0",
        *waited,
        *copied,
        *copied,
        *waited,
        "B0@0",
        *waited,
        *copied,
        *waited,
        "B1@0",
        *waited,
        "B2@0",
    ]
