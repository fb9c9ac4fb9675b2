"""Differences between ranks are found, and each finding names the ranks and a remedy."""

from dataclasses import replace

import pytest
import torch

from pipemega.config import load
from pipemega.distributed.topology import Topology
from pipemega.doctor import rank_facts
from pipemega.doctor.examination import judge_memory
from pipemega.doctor.rank_facts import RankFacts, compare, host_free, read_facts

GIB = 2**30
VERSIONS = {
    "pipemega": "0.1.0", "torch": "2.13.0", "CUDA": "13.0", "NCCL": "2.29.3", "driver": "580.1",
    "Python": "3.12.1",
}  # fmt: skip


def gpus(nodes=2, per_node=2):
    """Return the facts of a healthy cluster."""
    return {
        rank: RankFacts(
            host=f"node{rank // per_node}",
            pid=100 + rank,
            versions=VERSIONS,
            device=f"cuda:{rank % per_node}",
            device_name="NVIDIA H100",
            device_id=f"GPU-{rank}",
            device_free=79 * GIB,
            device_total=80 * GIB,
            host_free=500 * GIB,
            shared_free=200 * GIB,
            omp_threads="8",
            network={"NCCL_SOCKET_IFNAME": "ib0"},
            config="abc",
        )
        for rank in range(nodes * per_node)
    }


def bad(facts, topology=None):
    return [f for f in compare(facts, topology) if f.status != "ok"]


def test_a_healthy_cluster_has_only_ok_findings():
    findings = compare(gpus(), Topology(pipeline=2, tensor=2))
    assert {finding.status for finding in findings} == {"ok"}
    text = {finding.check: finding.text for finding in findings}
    assert text["nodes"] == "node0: ranks 0-1; node1: ranks 2-3"
    assert text["devices"] == "4 x NVIDIA H100"
    assert "NCCL 2.29.3" in text["versions"]


@pytest.mark.parametrize(
    ("change", "status", "check", "text"),
    [
        (
            {"versions": VERSIONS | {"NCCL": "2.20.5"}}, "failed", "versions",
            "NCCL differs: 2.29.3 on ranks 0-2, 2.20.5 on rank 3",
        ),
        (
            {"versions": VERSIONS | {"driver": "570.1"}}, "warning", "versions",
            "driver differs: 580.1 on ranks 0-2, 570.1 on rank 3",
        ),
        (
            {"device_id": "GPU-2"}, "failed", "devices",
            "ranks 2-3 on node1 use the same GPU (GPU-2)",
        ),
        (
            {"device": "cpu", "device_name": "", "device_id": ""}, "failed", "devices",
            "some ranks use a GPU and some the CPU: cuda on ranks 0-2, cpu on rank 3",
        ),
        (
            {"device": "", "device_error": "there is no GPU for local rank 1"}, "failed", "devices",
            "rank 3: there is no GPU for local rank 1",
        ),
        (
            {"device_name": "NVIDIA A100"}, "warning", "devices",
            "different GPUs: NVIDIA H100 on ranks 0-2, NVIDIA A100 on rank 3",
        ),
        ({"host": "node2"}, "warning", "nodes", "unequal numbers of ranks: node0: ranks 0-1; "),
        ({"device_free": 40 * GIB}, "warning", "memory", "rank 3 on node1 has 42.9 GB free"),
        ({"network": {}}, "warning", "variables", "not equal on all ranks: NCCL_SOCKET_IFNAME"),
        ({"omp_threads": ""}, "warning", "variables", "OMP_NUM_THREADS is not set"),
        ({"config": "xyz"}, "failed", "configs", "(hashes): abc on ranks 0-2, xyz on rank 3"),
    ],
)  # fmt: skip
def test_a_rank_that_differs_is_named(change, status, check, text):
    facts = gpus()
    facts[3] = replace(facts[3], **change)
    found = [f for f in bad(facts) if f.check == check]
    assert [finding.status for finding in found] == [status]
    assert text in found[0].text
    assert found[0].remedy


def test_a_tensor_group_over_two_nodes_is_a_warning():
    (finding,) = bad(gpus(), Topology(tensor=4))
    assert "tensor ranks 0-3 are on different nodes" in finding.text
    assert finding.remedy.endswith("divides the ranks of a node (2)")


def test_ranks_without_facts_leave_the_others_compared():
    facts = gpus()
    del facts[0]
    assert {f.status for f in compare(facts, Topology(pipeline=2, tensor=2))} == {"ok", "warning"}
    (unequal,) = bad(facts, Topology(pipeline=2, tensor=2))
    assert unequal.text.startswith("unequal numbers of ranks: node0: rank 1; node1: ranks 2-3")


def test_a_small_shared_memory_is_a_warning():
    facts = {rank: replace(fact, shared_free=64 * 2**20) for rank, fact in gpus().items()}
    (finding,) = bad(facts)
    assert "/dev/shm has 67.1 MB free on node0, node1" in finding.text
    assert "--shm-size" in finding.remedy


def test_a_build_of_torch_without_cuda_beside_a_driver_is_a_warning():
    versions = VERSIONS | {"CUDA": "none", "NCCL": "none"}
    plain = RankFacts("node0", 1, versions, "cpu", omp_threads="1")
    (finding,) = bad({0: plain})
    assert "torch is a build without CUDA" in finding.text


def test_the_facts_of_this_process():
    facts = read_facts(None)
    assert set(facts.versions) == set(VERSIONS)
    assert facts.host_free is not None


def test_ranks_of_srun_get_the_gpus_of_their_node_in_their_order(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    variables = {"STEP_NUM_TASKS": "3", "PROCID": "2", "LOCALID": "2", "STEP_NODELIST": "node0"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(rank_facts, "_gpu", lambda device: {})
    monkeypatch.setattr(rank_facts, "_nccl", lambda: "none")
    mesh = {"pipeline": 3, "device": ["cpu", "cuda", "cuda"]}
    assert read_facts(load({"train_batch_size": 1, "mesh": mesh})).device == "cuda:1"


def test_the_free_host_memory_is_within_the_limit_of_the_cgroup():
    files = {
        "/proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 80 kB\n",
        "/sys/fs/cgroup/memory.max": "max",
        "/sys/fs/cgroup/memory.current": "1024",
    }
    assert host_free(files.__getitem__) == 80 * 1024
    files["/sys/fs/cgroup/memory.max"] = "10240"
    assert host_free(files.__getitem__) == 9 * 1024


def test_ranks_on_the_cpu_are_right_if_the_config_gives_them_the_cpu():
    """The doctor refused every list of different devices."""
    facts = gpus()
    facts[0] = replace(facts[0], device="cpu", device_name="", device_id="", device_free=None)
    statuses = {found.check: found for found in compare(facts, Topology(pipeline=4), mixed=True)}
    assert {found.status for found in statuses.values()} == {"ok"}
    assert statuses["devices"].text == "3 x NVIDIA H100, 1 x cpu"
    assert bad(facts, Topology(pipeline=4))[0].text.startswith("some ranks use a GPU")
    (fits,) = judge_memory({0: 300 * GIB, 1: 60 * GIB, 2: 60 * GIB, 3: 60 * GIB}, facts)
    assert fits.status == "ok"
    assert fits.text.startswith("pipemega plan predicts at most 64.4 GB for a rank on a GPU; each")


def test_the_ranks_of_a_node_that_use_the_cpu_are_compared_with_its_free_memory():
    facts = gpus()
    for rank in (0, 1):
        facts[rank] = replace(facts[rank], device="cpu", device_free=None, host_free=100 * GIB)
    needed = {0: 60 * GIB, 1: 60 * GIB, 2: 60 * GIB, 3: 60 * GIB}
    warning, fits = judge_memory(needed, facts)
    assert (warning.status, fits.status) == ("warning", "ok")
    assert warning.text == (
        "pipemega plan predicts 129 GB for ranks 0-1 on the CPU of node0, which has 107 GB of "
        "memory free"
    )
    facts = {rank: replace(facts[rank], host_free=130 * GIB) for rank in facts}
    (fits,) = judge_memory(needed, facts)
    assert fits.status == "ok"


def test_a_small_shared_memory_is_found_if_the_first_rank_of_the_node_uses_the_cpu():
    facts = {rank: replace(fact, shared_free=1 << 26) for rank, fact in gpus().items()}
    facts[0] = replace(facts[0], device="cpu", device_name="", device_id="", device_free=None)
    warnings = [found.text for found in compare(facts, Topology(pipeline=4), mixed=True)]
    assert any(text.startswith("/dev/shm has 67.1 MB free on node0") for text in warnings)


def test_a_predicted_memory_that_does_not_fit_is_named_by_rank():
    (fits,) = judge_memory(dict.fromkeys(range(4), 60 * GIB), gpus())
    assert (fits.status, fits.check) == ("ok", "plan")
    (short,) = judge_memory({0: 60 * GIB, 1: 60 * GIB, 2: 90 * GIB, 3: 90 * GIB}, gpus())
    assert short.status == "failed"
    assert "predicts 96.6 GB for rank 2, which has 84.8 GB free" in short.text
    assert "ranks 2-3" in short.text
    assert "--device-memory" in short.remedy
